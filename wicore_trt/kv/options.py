"""What a KV cache manager is told of how to keep pages.

Plain data; it must not know pools or tiers. Invariant: none of it changes while a manager lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wicore_trt.kv.copy_down import WritePolicy

MAX_EVENT_LOG_PAGES = 1 << 18


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """`prefix_cache`: keep and find pages of other requests. `checkpoint_tokens`: how often a long prompt keeps a local
    window on the device. `write_policy` and `threshold`: see `copy_down`. `measure_attention`: keep measured attention
    mass for the policy. `slab_pages`: see `KVLayout`."""

    prefix_cache: bool = True
    checkpoint_tokens: int = 4096
    write_policy: WritePolicy = "through"
    threshold: float = 0.85
    measure_attention: bool = False
    slab_pages: Mapping[str, int] | None = None
