"""The eviction policies by name, as recipes and the command line spell them."""

from __future__ import annotations

from collections.abc import Callable

from wicore_trt.errors import ConfigError
from wicore_trt.kv.a2cr import A2CRPolicy
from wicore_trt.kv.cost import CostPolicy
from wicore_trt.kv.policy import ChainPolicy, LFUPolicy, LRUPolicy

POLICIES = ("cost", "lru", "a2cr", "lfu")
DEFAULT_POLICY = "cost"


def make_policy(
    name: str, capacity: int, *, page_cost: Callable[[int], float] | None = None, victim_cache: bool = False
) -> ChainPolicy:
    """The policy of one tier that holds `capacity` pages. `page_cost` is used by `cost` only.

    `victim_cache`: the tier receives pages only when the tier above evicts them and gives them up when they are used.
    Raises ConfigError for an unknown name.
    """
    if name == "cost":
        return CostPolicy(capacity, page_cost=page_cost, victim_cache=victim_cache)
    simple: dict[str, Callable[[int], ChainPolicy]] = {"lru": LRUPolicy, "lfu": LFUPolicy, "a2cr": A2CRPolicy}
    if name not in simple:
        raise ConfigError(f"unknown eviction policy {name!r}.", fix=f"Choose one of {', '.join(POLICIES)}.")
    return simple[name](capacity)
