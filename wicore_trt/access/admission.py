"""Limits for every way into the server: keys, open calls, rates of requests and tokens, counts of ended calls.

All servers of a process share one Admission, so that limits hold over all protocols. It must not know what a call does.
Invariants: over any span a tenant starts at most one bucket more than its rate gives; a reservation is settled once;
names that strangers write (methods, paths) add no row to the counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from wicore_trt.access.keys import Identity, KeyRing
from wicore_trt.arithmetic import div_ceil
from wicore_trt.config import ServerSettings
from wicore_trt.core.shares import Gate
from wicore_trt.errors import AuthenticationError, RateLimitError
from wicore_trt.types import ImageInfo, TextRequest

MAX_CALLS = 4096
"""Calls that are open at the same time; more are refused."""
CHARS_PER_TOKEN = 4
"""Characters of a token in a text that nobody has tokenized yet, roughly."""
OPEN_OUTPUT = 256
"""Tokens that a sequence without max_tokens reserves; what it takes beyond is a debt of its tenant."""
BYTES_PER_TOKEN, LEAST_MESSAGE_BYTES = 128, 4 << 20
"""No token of Gemma's is longer than 93 bytes of UTF-8, so that every prompt that fits the context fits a message."""
OTHER = "other"
VERBS = frozenset(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "WEBSOCKET"))


@dataclass(slots=True)
class CallCounts:
    http: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by method, path and status
    grpc: Counter[tuple[str, str]] = field(default_factory=Counter)  # by method and code
    refused: Counter[str] = field(default_factory=Counter)  # without a valid key, by "http" and "grpc"


MINUTE_S = 60.0


class Bucket:
    """Token bucket that holds `per_minute` units, full at first, and fills evenly. While in debt it grants nothing."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.capacity = per_minute
        self._per_s = per_minute / MINUTE_S
        self._clock = clock
        self._level, self._stamp = float(per_minute), clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(float(self.capacity), self._level + (now - self._stamp) * self._per_s)
        self._stamp = now
        return self._level

    def wait_s(self, units: float) -> float:
        return max(0.0, units - self.level) / self._per_s

    def change_rate(self, per_minute: int) -> None:
        """Hold and fill `per_minute` units from now on; a debt stays."""
        level = self.level
        self.capacity, self._per_s = per_minute, per_minute / MINUTE_S
        self._level = min(level, float(per_minute))

    def add_units(self, units: float) -> None:
        self._level = min(float(self.capacity), self.level + units)


@dataclass(frozen=True, slots=True)
class Allowance:
    """State of one limit of a tenant. `reset_s`: seconds until the bucket is full again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class Grant:
    """Tokens that requests reserved in a bucket; `bucket` is None where they have no limit. `used` counts
    tokens of prompts, once the engine has taken them, and of outputs."""

    bucket: Bucket | None = None
    reserved: int = 0
    used: int = 0


class Rates:
    """Buckets: one for each tenant, and for each key that has its own rate; None is no limit."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._clock = clock
        self._buckets: dict[tuple[str | bytes, str], Bucket] = {}

    def reserve_units(self, who: Identity, tokens: int, requests: int = 1) -> Grant:
        """Count `requests`, reserve `tokens` (a full bucket at most). Raises RateLimitError, and takes nothing."""
        taken: list[tuple[Bucket, int]] = []
        grant = Grant()
        for kind, units in (("requests", requests), ("tokens", tokens)):
            bucket = self._find_bucket(who, kind)
            if bucket is None:
                continue
            units = min(units, bucket.capacity)
            wait_s = bucket.wait_s(units)
            if wait_s > 0:
                raise RateLimitError(f"You may send {bucket.capacity} {kind} a minute.", retry_after_s=wait_s)
            taken.append((bucket, units))
            if kind == "tokens":
                grant = Grant(bucket, units)
        for bucket, units in taken:
            bucket.add_units(-units)
        return grant

    def change_limits(
        self, requests_per_minute: int | None, tokens_per_minute: int | None, own: Mapping[bytes, Identity]
    ) -> None:
        """Apply other limits from now on, with the `own` ones of keys, by the keys' names. Units taken stay taken, and
        for the time that has passed buckets fill at their former pace."""
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        for (name, kind), bucket in self._buckets.items():
            limit = self._limits[kind] if isinstance(name, str) else getattr(own.get(name), f"{kind}_per_minute", None)
            if limit is not None:
                bucket.change_rate(limit)

    def list_allowances(self, who: Identity) -> dict[str, Allowance]:
        found = {}
        for kind in self._limits:
            bucket = self._find_bucket(who, kind)
            if bucket is not None:
                left = max(0, int(bucket.level))
                found[kind] = Allowance(bucket.capacity, left, bucket.wait_s(bucket.capacity))
        return found

    def _find_bucket(self, who: Identity, kind: str) -> Bucket | None:
        own: int | None = getattr(who, f"{kind}_per_minute")
        limit, name = (own, (who.key, kind)) if own is not None else (self._limits[kind], (who.tenant, kind))
        if limit is None:
            self._buckets.pop(name, None)
            return None
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = Bucket(limit, self._clock)
        elif bucket.capacity != limit:  # it was changed
            bucket.change_rate(limit)
        return bucket


@dataclass(frozen=True, slots=True)
class Admission:
    keys: KeyRing
    calls: Gate
    rates: Rates
    counts: CallCounts = field(default_factory=CallCounts)

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> Admission:
        """Make an admission of settings. Raises ConfigError for a bad keys file."""
        return cls(
            KeyRing.from_files(settings.api_key, settings.keys_file),
            Gate(MAX_CALLS, "calls"),
            Rates(settings.requests_per_minute, settings.tokens_per_minute),
        )

    def apply_settings(self, settings: ServerSettings) -> None:
        """Apply other keys and rates from now on. Raises ConfigError, and changes nothing, for a bad keys file."""
        self.keys.replace_keys(KeyRing.from_files(settings.api_key, settings.keys_file))
        self.rates.change_limits(settings.requests_per_minute, settings.tokens_per_minute, self.keys.named)

    def check_identity(self, who: Identity) -> Identity:
        """Look up again whose key an open connection uses. Raises AuthenticationError if the key was revoked."""
        found = self.keys.refresh_identity(who)
        if found is None:
            raise AuthenticationError("The API key of this connection is not valid any more.", fix="Use another one.")
        return found

    @contextmanager
    def reserve_tokens(
        self, who: Identity, requests: Sequence[TextRequest], images: ImageInfo | None = None
    ) -> Iterator[Grant]:
        """Reserve the most tokens that the requests of one call may use, and settle what they `used` at the end. The
        tokens of a prompt that is not tokenized yet are estimated, with the tokens of `images` for each image. A
        sequence without max_tokens reserves OPEN_OUTPUT. Raises RateLimitError."""
        tokens = 0
        for request in requests:
            if request.prompt_token_ids is not None:
                tokens += len(request.prompt_token_ids)
            else:
                text = request.prompt if request.prompt is not None else "".join(map(str, request.messages or ()))
                tokens += div_ceil(len(text), CHARS_PER_TOKEN) + (images.tokens if images else 0) * len(request.images)
            limit = request.params.max_tokens
            tokens += request.params.n * (OPEN_OUTPUT if limit is None else limit)
        grant = self.rates.reserve_units(who, tokens, len(requests))
        try:
            yield grant
        finally:
            if grant.bucket is not None:  # unused tokens come back, those beyond the reservation are taken
                grant.bucket.add_units(grant.reserved - grant.used)


def find_message_limit(max_context: int | None, megabytes: int | None = None) -> int:
    """Return the bytes of the largest request: as set, else what a context of `max_context` tokens can take."""
    return megabytes << 20 if megabytes is not None else max(LEAST_MESSAGE_BYTES, BYTES_PER_TOKEN * (max_context or 0))
