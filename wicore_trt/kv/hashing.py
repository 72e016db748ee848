"""Names of KV pages: a cryptographic chain over everything that a page's content depends on.

The key of page i is blake2b(key of page i-1, token ids of page i); the root binds the engine's fingerprint (model,
weights, dtype, KV dtype), the page size, the rank layout and the tenant's salt. Keys are equal across processes and
restarts and differ as soon as one input differs. This module must not know pools, tiers or policies. Invariant: two
pages with one key hold the same KV values; a page's layer group is named beside the key, never inside it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 32


class KeyChain:
    """Page keys of one engine.

    `fingerprint` identifies model, weights and dtypes; `rank`/`world` the shard of a tensor-parallel engine. `salt` is
    the operator's secret, which no client can set.
    """

    def __init__(self, fingerprint: str, page_tokens: int, *, rank: int = 0, world: int = 1, salt: str = "") -> None:
        self.page_tokens = page_tokens
        secret = blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"wicore-kv-owner").digest()
        header = struct.pack("<III", page_tokens, rank, world) + secret + fingerprint.encode()
        self._engine = blake2b(header, digest_size=KEY_BYTES, person=b"wicore-kv-root").digest()

    def root(self, salt: str) -> bytes:
        """Parent of the first page for one tenant. A salt keys the hash, so roots cannot be guessed across tenants."""
        return blake2b(self._engine + salt.encode(), digest_size=KEY_BYTES, person=b"wicore-kv-salt").digest()

    def extend(self, keys: list[bytes], tokens: Sequence[int], salt: str) -> None:
        """Append to `keys` the keys of all full pages of `tokens` that it lacks; keys[i] names page i."""
        size = self.page_tokens
        parent = keys[-1] if keys else self.root(salt)
        for i in range(len(keys), len(tokens) // size):
            payload = array("I", tokens[i * size : (i + 1) * size]).tobytes()
            parent = blake2b(parent + payload, digest_size=KEY_BYTES, person=b"wicore-kv-page").digest()
            keys.append(parent)
