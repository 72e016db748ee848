"""What names a stored page: the identity that every tier keeps beside the bytes and checks on every read.

Plain data; it must not know where pages are kept. Invariant: two pages with equal `key` and `group` in one namespace
(engine, kernels, page size, rank layout) hold the same KV values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TENANT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Page:
    """`key` is the 32-byte chain key, `group` the layer group, `index` the page's place in its chain (it holds
    positions [index * page_tokens, (index + 1) * page_tokens)), `parent` the key of the page before it (None for the
    first), `tenant` the tag of whom it was made for (`hashing.tenant_tag`). `tokens` are its own token ids, for routers
    that match prompts by them: little-endian, 4 bytes each, or nothing where they are not known."""

    key: bytes
    group: str
    index: int
    parent: bytes | None
    tenant: bytes
    tokens: bytes = field(default=b"", compare=False, repr=False)

    @property
    def token_ids(self) -> memoryview:
        """`tokens` as numbers."""
        return memoryview(self.tokens).cast("I")

    @property
    def name(self) -> tuple[str, bytes]:
        return (self.group, self.key)
