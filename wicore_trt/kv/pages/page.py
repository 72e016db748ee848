"""Page: the identity that every tier keeps beside the bytes and checks on every read.

Plain data; it must not know where pages are kept. Invariant: two pages with equal `key` and `group` in one namespace
(engine, kernels, page size, rank layout) hold the same KV values.
"""

from __future__ import annotations

from msgspec import Struct

TENANT_BYTES = 16


class Page(Struct, frozen=True, eq=False, gc=False):
    """Page identity. Each page that fills makes one, so it is a Struct, which is made fastest.

    `key` is the 32-byte chain key, `group` the layer group. `index` is the place in the chain, for positions [index *
    page_tokens, (index + 1) * page_tokens). `parent` is the key of the page before it (None for the first), `tenant`
    the tag of its maker (`hashing.tenant_tag`). `tokens` are its token ids, for routers that match prompts by them:
    little-endian, 4 bytes each, empty if unknown. Equal pages may differ in them."""

    key: bytes
    group: str
    index: int
    parent: bytes | None
    tenant: bytes
    tokens: bytes = b""

    def _identity(self) -> tuple[bytes, str, int, bytes | None, bytes]:
        return (self.key, self.group, self.index, self.parent, self.tenant)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Page) and self._identity() == other._identity())

    def __ne__(self, other: object) -> bool:
        return not self == other  # Struct has one of its own, which compares nothing

    def __hash__(self) -> int:
        return hash(self._identity())

    @property
    def token_ids(self) -> memoryview:
        return memoryview(self.tokens).cast("I")

    @property
    def name(self) -> tuple[str, bytes]:
        return (self.group, self.key)
