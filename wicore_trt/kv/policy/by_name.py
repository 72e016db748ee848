"""Eviction policies by name, as recipes and the command line spell them."""

from __future__ import annotations

from collections.abc import Callable

from wicore_trt.errors import ConfigError
from wicore_trt.kv.policy.a2cr import A2CRPolicy
from wicore_trt.kv.policy.cost import LENGTH_UNIT, CostPolicy
from wicore_trt.kv.policy.policy import ChainPolicy, LFUPolicy, LRUPolicy

POLICIES = ("cost", "lru", "a2cr", "lfu")
DEFAULT_POLICY = "cost"


def make_policy(
    name: str,
    capacity: int,
    *,
    page_cost: Callable[[int], float] | None = None,
    victim_cache: bool = False,
    page_tokens: int = LENGTH_UNIT,
) -> ChainPolicy:
    """Make the policy of one tier that holds `capacity` pages; the other arguments are for `cost` alone.
    `page_cost(depth)` is the relative cost per byte of recomputing page `depth` of a chain (None: all alike). A
    `victim_cache` gets pages that the tier above evicts alone, and gives them up when used. Raises ConfigError for an
    unknown name."""
    if name == "cost":
        return CostPolicy(capacity, page_cost=page_cost, victim_cache=victim_cache, page_tokens=page_tokens)
    simple: dict[str, Callable[[int], ChainPolicy]] = {"a2cr": A2CRPolicy, "lru": LRUPolicy, "lfu": LFUPolicy}
    if name not in simple:
        raise ConfigError(f"unknown eviction policy {name!r}.", fix=f"Choose one of {', '.join(POLICIES)}.")
    return simple[name](capacity)
