"""Keys of KV pages: keyed hash chains over everything that a page's content depends on.

Keys are equal across processes and restarts that share the operator's secret and differ as soon as one input differs.
Without the secret nobody can compute or check them, even knowing parents and tokens. Must not know pools, tiers or
policies. Invariant (I1): pages of one layer group with one key hold the same KV values and are of one tenant and salt.
"""

from __future__ import annotations

import secrets
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from wicore_trt.kv.pages.page import TENANT_BYTES
from wicore_trt.types import ContentSpan

KEY_BYTES = 32
_FIRST = bytes(KEY_BYTES)
_SPAN = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class TenantNames:
    """Names of the pages of one tenant under one salt. Immutable; for any thread. `tag` (TENANT_BYTES) stands for the
    tenant in headers, quotas, events and statistics, whatever its salts, and tells nothing of it without the secret.
    `scope` (KEY_BYTES) stands for tenant and salt: a client's names, such as a session's, are named within it."""

    tag: bytes
    scope: bytes
    page_tokens: int
    _key: bytes
    _keyed: Any = field(init=False, repr=False, compare=False)
    """The hash of no page, to be copied."""

    def __post_init__(self) -> None:
        keyed = blake2b(digest_size=KEY_BYTES, key=self._key, person=b"wicore-kv-page")
        object.__setattr__(self, "_keyed", keyed)

    def extend_keys(
        self, keys: list[bytes], tokens: Sequence[int], marks: Mapping[int, bytes] | None = None
    ) -> list[bytes]:
        """Append to `keys` those of all full pages of `tokens` that it lacks; keys[i] names page i. `marks` are those
        of the whole prompt (`mark_content`). The key of page i hashes the key of page i - 1, the page's token ids and
        its marks. Returns the new `Page.tokens`: nothing from the first marked page on."""
        size, begun = self.page_tokens, len(keys)
        blocks: list[bytes] = []
        marks = marks or {}
        parent, keyed = keys[-1] if keys else _FIRST, self._keyed
        words = array("I", tokens[begun * size : len(tokens) // size * size])
        content, step = words.tobytes(), size * words.itemsize
        for at in range(0, len(content), step):
            block = content[at : at + step]
            page = keyed.copy()
            page.update(parent + block + marks.get(len(keys), b""))
            parent = page.digest()
            keys.append(parent)
            blocks.append(block)
        first = max(0, min(marks, default=len(keys)) - begun)
        blocks[first:] = [b""] * (len(blocks) - first)
        return blocks


class KeyChain:
    """Page keys of one engine. `fingerprint` identifies model, weights, dtype and KV dtype; `rank`/`world` the shard of
    a tensor-parallel engine. `secret` (KEY_BYTES) is the operator's; without one no other object has these keys."""

    def __init__(
        self, fingerprint: str, page_tokens: int, *, rank: int = 0, world: int = 1, secret: bytes | None = None
    ) -> None:
        self.page_tokens = page_tokens
        self._secret = secrets.token_bytes(KEY_BYTES) if secret is None else secret
        assert len(self._secret) == KEY_BYTES
        self._engine = struct.pack("<III", page_tokens, rank, world) + _encode_field(fingerprint)

    def derive_names(self, who: str, salt: str) -> TenantNames:
        """Derive the names for the tenant `who` (as the server knows it) and a request's cache_salt. Where the server
        knows no tenants (`who` is "") the salt is the tenant. Tenants of the two kinds never have the same names."""
        fields = _encode_field(who) + _encode_field(salt)
        keyed = partial(blake2b, digest_size=KEY_BYTES, key=self._secret)
        derived = keyed(self._engine + fields, person=b"wicore-kv-names").digest()
        scope = keyed(fields, person=b"wicore-kv-scope").digest()
        return TenantNames(tenant_tag(self._secret, who, salt), scope, self.page_tokens, derived)


def mark_content(content: Sequence[ContentSpan], page_tokens: int) -> dict[int, bytes]:
    """Make the marks of pages, by index: each span that touches a page, with its place in the prompt. They follow token
    ids of a fixed length and each has one length, so different contents never make equal bytes."""
    marks: dict[int, bytes] = {}
    for span in content:
        mark = _SPAN.pack(span.begin, span.end) + span.digest
        for i in range(span.begin // page_tokens, (span.end - 1) // page_tokens + 1):
            marks[i] = marks.get(i, b"") + mark
    return marks


def tenant_tag(secret: bytes, who: str, salt: str = "") -> bytes:
    """Make a tenant's tag (`TenantNames.tag`) from `who` or, where that is "", from the salt. Equal for all engines."""
    kind = b"who " + _encode_field(who) if who else b"salt" + _encode_field(salt)
    return blake2b(kind, digest_size=TENANT_BYTES, key=secret, person=b"wicore-kv-tenant").digest()


def _encode_field(text: str) -> bytes:
    """Encode any text as bytes that are no prefix of another text's."""
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data
