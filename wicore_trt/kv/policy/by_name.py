"""The eviction policies by name, as recipes and the command line spell them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from wicore_trt.errors import ConfigError
from wicore_trt.kv.policy.a2cr import DEFAULT_WEIGHTS, A2CRPolicy, A2CRWeights
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
    a2cr: A2CRWeights = DEFAULT_WEIGHTS,
) -> ChainPolicy:
    """The policy of one tier that holds `capacity` pages of `page_tokens` tokens. `a2cr` is used by that policy only,
    the rest by `cost` only.

    `page_cost(depth)` is the relative cost per byte of recomputing page `depth` of a chain (None: all alike).
    `victim_cache`: the tier receives pages only when the tier above evicts them and gives them up when they are used.
    Raises ConfigError for an unknown name.
    """
    if name == "cost":
        return CostPolicy(capacity, page_cost=page_cost, victim_cache=victim_cache, page_tokens=page_tokens)
    if name == "a2cr":
        return A2CRPolicy(capacity, a2cr)
    simple: dict[str, Callable[[int], ChainPolicy]] = {"lru": LRUPolicy, "lfu": LFUPolicy}
    if name not in simple:
        raise ConfigError(f"unknown eviction policy {name!r}.", fix=f"Choose one of {', '.join(POLICIES)}.")
    return simple[name](capacity)


class PolicySettings(Protocol):
    """What `config.KVSettings` says of policies."""

    @property
    def policy(self) -> str: ...

    @property
    def a2cr_attention(self) -> float: ...

    @property
    def a2cr_frequency(self) -> float: ...

    @property
    def a2cr_decay(self) -> float | None: ...


def policy_of(settings: PolicySettings, capacity: int, page_tokens: int) -> ChainPolicy:
    """The policy that settings ask for, of one tier as in `make_policy`."""
    weights = A2CRWeights(settings.a2cr_attention, settings.a2cr_frequency, settings.a2cr_decay)
    return make_policy(settings.policy, capacity, page_tokens=page_tokens, a2cr=weights)
