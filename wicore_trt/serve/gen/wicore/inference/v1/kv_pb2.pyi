import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CachePriority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_PRIORITY_UNSPECIFIED: _ClassVar[CachePriority]
    CACHE_PRIORITY_LOW: _ClassVar[CachePriority]
    CACHE_PRIORITY_NORMAL: _ClassVar[CachePriority]
    CACHE_PRIORITY_HIGH: _ClassVar[CachePriority]

class CacheStore(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_STORE_UNSPECIFIED: _ClassVar[CacheStore]
    CACHE_STORE_ALL: _ClassVar[CacheStore]
    CACHE_STORE_DEVICE: _ClassVar[CacheStore]
    CACHE_STORE_NEVER: _ClassVar[CacheStore]
CACHE_PRIORITY_UNSPECIFIED: CachePriority
CACHE_PRIORITY_LOW: CachePriority
CACHE_PRIORITY_NORMAL: CachePriority
CACHE_PRIORITY_HIGH: CachePriority
CACHE_STORE_UNSPECIFIED: CacheStore
CACHE_STORE_ALL: CacheStore
CACHE_STORE_DEVICE: CacheStore
CACHE_STORE_NEVER: CacheStore

class CacheHints(_message.Message):
    __slots__ = ("session", "priority", "ttl", "store")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    session: str
    priority: CachePriority
    ttl: _duration_pb2.Duration
    store: CacheStore
    def __init__(self, session: _Optional[str] = ..., priority: _Optional[_Union[CachePriority, str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., store: _Optional[_Union[CacheStore, str]] = ...) -> None: ...

class KVStats(_message.Message):
    __slots__ = ("tiers", "decisions", "parked", "resumed", "event_sequence")
    class DecisionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    EVENT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    decisions: _containers.ScalarMap[str, int]
    parked: int
    resumed: int
    event_sequence: int
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., decisions: _Optional[_Mapping[str, int]] = ..., parked: _Optional[int] = ..., resumed: _Optional[int] = ..., event_sequence: _Optional[int] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "used_bytes", "pinned_bytes", "pages", "hit_tokens", "read_bytes", "read_time", "write_bytes", "write_time", "evictions", "failures", "queue_depth", "raw_bytes")
    class PagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class EvictionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_TIME_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_TIME_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    pages: _containers.ScalarMap[str, int]
    hit_tokens: int
    read_bytes: int
    read_time: _duration_pb2.Duration
    write_bytes: int
    write_time: _duration_pb2.Duration
    evictions: _containers.ScalarMap[str, int]
    failures: _containers.ScalarMap[str, int]
    queue_depth: int
    raw_bytes: int
    def __init__(self, tier: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., pages: _Optional[_Mapping[str, int]] = ..., hit_tokens: _Optional[int] = ..., read_bytes: _Optional[int] = ..., read_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., write_bytes: _Optional[int] = ..., write_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., evictions: _Optional[_Mapping[str, int]] = ..., failures: _Optional[_Mapping[str, int]] = ..., queue_depth: _Optional[int] = ..., raw_bytes: _Optional[int] = ...) -> None: ...

class SubscribeKVEventsRequest(_message.Message):
    __slots__ = ("from_sequence", "epoch", "replica")
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    from_sequence: int
    epoch: int
    replica: int
    def __init__(self, from_sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., replica: _Optional[int] = ...) -> None: ...

class SubscribeKVEventsResponse(_message.Message):
    __slots__ = ("epoch", "sequence", "snapshot", "events")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    snapshot: KVSnapshotPart
    events: KVEvents
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., snapshot: _Optional[_Union[KVSnapshotPart, _Mapping]] = ..., events: _Optional[_Union[KVEvents, _Mapping]] = ...) -> None: ...

class KVSnapshotPart(_message.Message):
    __slots__ = ("pages", "first", "last")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedCompositeFieldContainer[KVPages]
    first: bool
    last: bool
    def __init__(self, pages: _Optional[_Iterable[_Union[KVPages, _Mapping]]] = ..., first: _Optional[bool] = ..., last: _Optional[bool] = ...) -> None: ...

class KVEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[KVEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[KVEvent, _Mapping]]] = ...) -> None: ...

class KVEvent(_message.Message):
    __slots__ = ("sequence", "stored", "removed", "cleared")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stored: KVPages
    removed: KVRemoved
    cleared: KVCleared
    def __init__(self, sequence: _Optional[int] = ..., stored: _Optional[_Union[KVPages, _Mapping]] = ..., removed: _Optional[_Union[KVRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KVCleared, _Mapping]] = ...) -> None: ...

class KVPages(_message.Message):
    __slots__ = ("tier", "group", "pages")
    TIER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    group: str
    pages: _containers.RepeatedCompositeFieldContainer[KVPage]
    def __init__(self, tier: _Optional[str] = ..., group: _Optional[str] = ..., pages: _Optional[_Iterable[_Union[KVPage, _Mapping]]] = ...) -> None: ...

class KVPage(_message.Message):
    __slots__ = ("key", "parent", "index", "tenant", "token_ids")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    parent: bytes
    index: int
    tenant: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., index: _Optional[int] = ..., tenant: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class KVRemoved(_message.Message):
    __slots__ = ("tier", "group", "keys", "cause")
    TIER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    tier: str
    group: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    cause: str
    def __init__(self, tier: _Optional[str] = ..., group: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., cause: _Optional[str] = ...) -> None: ...

class KVCleared(_message.Message):
    __slots__ = ("tier",)
    TIER_FIELD_NUMBER: _ClassVar[int]
    tier: str
    def __init__(self, tier: _Optional[str] = ...) -> None: ...
