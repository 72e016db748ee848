"""Belady's policy for simulations: evict the page whose next use is farthest. It reads the future from the trace.

Must not be offered to a server. Invariant: `touch` is called once per request of the trace, in order. A page's next
use is never later than its child's, so "leaf first" and "farthest first" agree and contiguous hits are optimal up to
ties among pages of unequal chains.
"""

from __future__ import annotations

from collections.abc import Sequence

from wicore_trt.kv.policy.policy import ChainPolicy, Node

_NEVER = 1 << 60


def next_uses(chains: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each page of each request, the index of the next request that contains it."""
    coming: dict[int, int] = {}
    uses: list[list[int]] = [[] for _ in chains]
    for i in range(len(chains) - 1, -1, -1):
        uses[i] = [coming.get(page, _NEVER) for page in chains[i]]
        for page in chains[i]:
            coming[page] = i
    return uses


class BeladyPolicy(ChainPolicy):
    """`future` is `next_uses` of the trace that will be replayed."""

    def __init__(self, capacity: int, future: list[list[int]]) -> None:
        super().__init__(capacity)
        self._future = iter(future)

    def _score(self, node: Node) -> float:
        return -node.uses

    def _observe(self, path: list[Node], seen: int, signal: Sequence[float] | None) -> None:
        for node, use in zip(path, next(self._future), strict=True):
            node.uses = use
