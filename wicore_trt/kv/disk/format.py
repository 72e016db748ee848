"""Layout on disk: the header block before each slot's payload, the index record of a slot, and the namespace.

It must not know files, threads or free slots. Invariant: `SlotFormat.open` succeeds only for the very bytes that
`SlotFormat.seal` produced for this page, part, slot and write id, in this namespace and with this cipher.

Layouts are little endian and of fixed size; FORMAT_VERSION changes with any of them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import xxhash

from wicore_trt.kv.pages.page import TENANT_BYTES, Page

if TYPE_CHECKING:
    from wicore_trt.kv.disk.cipher import PageCipher

FORMAT_VERSION = 3
BLOCK_BYTES = 4096
"""Size of a header block, and what offsets, lengths and addresses are multiples of (O_DIRECT on any common disk)."""
CHECK_BYTES = 16
KEY_BYTES = 32
GROUP_BYTES = 64
SEALED_BYTES = 64

_MAGIC = b"WICOREKV"
RECORD_MAGIC = int.from_bytes(b"WKVR", "little")
FLAG_PARENT = 1
FLAG_SEALED = 2
FLAG_TOKENS = 4

# magic, version, flags, namespace, key, parent, tenant, group, index, part, parts, payload bytes, slot, write id
_IDENTITY = struct.Struct(f"<8sII16s{KEY_BYTES}s{KEY_BYTES}s{TENANT_BYTES}s{GROUP_BYTES}sQIIQQQ")
_SEALED_AT = _IDENTITY.size
_CHECK_AT = _SEALED_AT + SEALED_BYTES
_HEADER_CHECK_AT = BLOCK_BYTES - CHECK_BYTES
# magic, group number, flags, key, parent, tenant, index, expires, write id, part, parts, slot; the tokens of the page
# (in its first part's record; before them what a cipher adds) and the check follow
_RECORD = struct.Struct(f"<IHH{KEY_BYTES}s{KEY_BYTES}s{TENANT_BYTES}sIIQHHI")
_RECORD_FIELDS = [
    ("magic", "<u4"), ("group", "<u2"), ("flags", "<u2"), ("key", f"V{KEY_BYTES}"), ("parent", f"V{KEY_BYTES}"),
    ("tenant", f"V{TENANT_BYTES}"), ("index", "<u4"), ("expires", "<u4"), ("write_id", "<u8"), ("part", "<u2"),
    ("parts", "<u2"), ("slot", "<u4"),
]  # fmt: skip
SAME_IN_PARTS = slice(4, 4 + 2 + 2 + 2 * KEY_BYTES + TENANT_BYTES + 4)
"""Bytes of a record, from its group to its index in the chain, that are the same for all parts of a page."""
_TOKENS_BOUND = b"wicore-kv-tokens"


def record_bytes(page_tokens: int) -> int:
    """Size of an index record."""
    return _RECORD.size + SEALED_BYTES + 4 * page_tokens + CHECK_BYTES


def record_fields(page_tokens: int) -> list[tuple[str, str]]:
    """numpy fields of an index record, in the order of the bytes."""
    return [*_RECORD_FIELDS, ("tokens", f"V{SEALED_BYTES + 4 * page_tokens}"), ("check", f"V{CHECK_BYTES}")]


class CorruptSlotError(Exception):
    """A slot does not hold what was asked for. Never leaves the store: it becomes Outcome.CORRUPT."""


@dataclass(frozen=True)
class Namespace:
    """Everything that KV values on disk depend on besides tokens and tenant. Pages of unequal namespaces never mix.
    `layout` maps each layer group to the bytes of its page. `code` names the code of pages, if any, and its format."""

    engine: str
    kernels: str
    page_tokens: int
    layout: Mapping[str, int]
    kv_dtype: str
    rank: int = 0
    world: int = 1
    code: str = ""

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The fields as JSON stores them."""
        facts = {**asdict(self), "layout": dict(sorted(self.layout.items()))}
        return facts if self.code else {name: value for name, value in facts.items() if name != "code"}

    @cached_property
    def digest(self) -> bytes:
        """16 bytes; the name of the directory and part of every header."""
        text = json.dumps(self.facts, sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=16, person=b"wicore-kv-space").digest()

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Layer groups; an index record names a group by its place here."""
        return tuple(sorted(self.layout))


class SlotFormat:
    """Header blocks and index records of one namespace."""

    def __init__(self, namespace: Namespace, cipher: PageCipher | None) -> None:
        self._digest = namespace.digest
        self._group_numbers = {group: number for number, group in enumerate(namespace.groups)}
        self._cipher = cipher
        self.encrypts = cipher is not None
        self._token_bytes = 4 * namespace.page_tokens
        self.record_bytes = record_bytes(namespace.page_tokens)
        self.flags = FLAG_SEALED if self.encrypts else 0

    def seal(
        self,
        block: memoryview,
        page: Page,
        part: int,
        parts: int,
        slot: int,
        write_id: int,
        payload: memoryview,
        room: memoryview,
    ) -> memoryview:
        """Fill `block` (BLOCK_BYTES) and return the payload as it goes to disk: `payload`, or its ciphertext in
        `room` (as long as the payload; not touched without a cipher)."""
        identity = self.pack_identity(page, part, parts, slot, write_id, len(payload))
        sealed = b""
        if self._cipher is not None:
            sealed, ciphertext = self._cipher.seal(page, part, parts, write_id, identity, payload)
            payload = room[: len(payload)]
            payload[:] = ciphertext
        sealed = sealed.ljust(SEALED_BYTES, b"\0")
        head = identity + sealed + _payload_check(identity, sealed, payload)
        head = head.ljust(_HEADER_CHECK_AT, b"\0")
        block[:_HEADER_CHECK_AT] = head
        block[_HEADER_CHECK_AT:] = blake2b(head, digest_size=CHECK_BYTES).digest()
        return payload

    def open(
        self, block: memoryview, page: Page, part: int, parts: int, slot: int, write_id: int, payload: memoryview
    ) -> None:
        """Check `block` and `payload`, which is decrypted in place. Raises CorruptSlotError; then it means nothing."""
        head = bytes(block[:_HEADER_CHECK_AT])
        if block[_HEADER_CHECK_AT:] != blake2b(head, digest_size=CHECK_BYTES).digest():
            raise CorruptSlotError("header checksum")
        identity = self.pack_identity(page, part, parts, slot, write_id, len(payload))
        if head[:_SEALED_AT] != identity:
            raise CorruptSlotError("another page, part, slot, write, namespace or format")
        sealed = head[_SEALED_AT:_CHECK_AT]
        if head[_CHECK_AT : _CHECK_AT + CHECK_BYTES] != _payload_check(identity, sealed, payload):
            raise CorruptSlotError("payload checksum")
        if self._cipher is not None:
            sealed = sealed[: self._cipher.overhead_bytes]
            try:
                self._cipher.open(page, part, parts, write_id, identity, sealed, payload)
            except ValueError as error:
                raise CorruptSlotError(str(error)) from error

    def make_record(self, page: Page, part: int, parts: int, slot: int, write_id: int, expires: int = 0) -> bytes:
        """The index record (`record_bytes`) of a slot. `expires`: seconds since 1970 at which the page's time is over,
        0 for never. `write_id` 0: the page is being written, and nobody finds it yet."""
        flags = self.flags | (FLAG_PARENT if page.parent is not None else 0) | (FLAG_TOKENS if page.tokens else 0)
        group = self._group_numbers[page.group]
        body = _RECORD.pack(
            RECORD_MAGIC, group, flags, page.key, page.parent or b"", page.tenant, page.index, expires,
            write_id, part, parts, slot,
        )  # fmt: skip
        assert len(page.tokens) in (0, self._token_bytes)
        sealed, tokens = b"", page.tokens if part == 0 else b""
        if tokens and self._cipher is not None:
            sealed, tokens = self._cipher.seal(page, 0, parts, write_id, _TOKENS_BOUND, memoryview(tokens))
        body += sealed.ljust(SEALED_BYTES, b"\0") + tokens.ljust(self._token_bytes, b"\0")
        return body + record_check(body)

    def open_tokens(self, page: Page, parts: int, write_id: int, stored: bytes | memoryview) -> bytes:
        """A page's tokens as a record has them (`stored`): nothing, where they do not open."""
        if self._cipher is None:
            return bytes(stored[SEALED_BYTES:])
        sealed, room = bytes(stored[: self._cipher.overhead_bytes]), memoryview(bytearray(stored[SEALED_BYTES:]))
        try:
            self._cipher.open(page, 0, parts, write_id, _TOKENS_BOUND, sealed, room)
        except ValueError:
            return b""
        return bytes(room)

    def pack_identity(self, page: Page, part: int, parts: int, slot: int, write_id: int, payload_bytes: int) -> bytes:
        """The first bytes of a header."""
        assert len(page.key) == KEY_BYTES and len(page.tenant) == TENANT_BYTES, "struct would cut or pad them"
        assert page.parent is None or len(page.parent) == KEY_BYTES
        flags = self.flags | (FLAG_PARENT if page.parent is not None else 0)
        return _IDENTITY.pack(
            _MAGIC, FORMAT_VERSION, flags, self._digest, page.key, page.parent or b"", page.tenant,
            page.group.encode(), page.index, part, parts, payload_bytes, slot, write_id,
        )  # fmt: skip


record_check = xxhash.xxh3_128_digest
"""Checksum of a record without its last CHECK_BYTES. Against accidents only: the slot's header is the truth."""


def _payload_check(identity: bytes, sealed: bytes, payload: memoryview) -> bytes:
    check = xxhash.xxh3_128(identity + sealed)
    check.update(payload)
    return check.digest()
