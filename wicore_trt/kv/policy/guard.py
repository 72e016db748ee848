"""Decides between a learnt policy and LRU, so that learning cannot cost much whatever the traffic does.

Two shadow caches of the tier's capacity hold keys only and replay the tier's own traffic. One is LRU, always. The other
follows the learnt order while LRU decides in the tier: a trial that costs no hits. It must not know how the policy
ranks pages. Invariant: the tier follows the learnt order only after a trial won against LRU by a stake, and until it
lost a fixed amount to LRU; each such failure trebles the stake, so losses grow with the logarithm of the traffic.

A hit is worth what recomputing it costs. All amounts are in root mean square hits of a request that hits: the size of
one lucky request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from wicore_trt.kv.policy.policy import ChainPolicy, Key, Node, ghost_limit

_FIRST_STAKE = 4
_LOSS = 4
_CREDIT = 64
"""The most by which earlier gains are remembered: what a policy that was better may lose when the traffic changes."""


class LRUGuard:
    """`use_lru` is the verdict for a tier of `capacity` pages. `worth(node)` is the learnt worth of a page; it may look
    at the node's depth and group. `value(n)` is what hitting the first n pages of a chain is worth."""

    def __init__(self, capacity: int, worth: Callable[[Node], float], value: Callable[[int], float] = float) -> None:
        self.use_lru = True
        self._capacity = capacity
        self._worth = worth
        self._value = value
        self._lru: OrderedDict[Key, None] = OrderedDict()
        self._trial: _Trial | None = None
        self._stake = _FIRST_STAKE
        self._lead = 0.0
        self._squares = 0.0
        self._hitting = 0

    def resize(self, capacity: int) -> None:
        """The tier holds another number of pages now."""
        self._capacity = capacity
        if self._trial is not None:
            self._trial.capacity = capacity

    @property
    def idle(self) -> bool:
        """LRU decides and no trial runs."""
        return self.use_lru and self._trial is None

    def begin_trial(self, residents: Sequence[Node]) -> None:
        """Start from what the tier holds: its pages in any order."""
        self._trial = _Trial(self._capacity, self._worth)
        self._trial.hold_all(residents)
        self._lead = 0.0

    def refresh(self) -> None:
        """The worth of pages was estimated anew."""
        if self._trial is not None:
            self._trial.refresh()

    def hold(self, node: Node) -> None:
        """A page came into the tier that no request looked up (a generated one)."""
        self._lru[node.key] = None
        self._shrink()
        if self._trial is not None:
            self._trial.hold(node)

    def observe(self, path: Sequence[Node], hits: int) -> bool:
        """One request of which the tier held the first `hits` pages; returns whether the verdict changed."""
        lru_value = self._value(self._replay(path))
        if lru_value:
            self._squares += lru_value * lru_value
            self._hitting += 1
        unit = (self._squares / max(1, self._hitting)) ** 0.5
        if not self.use_lru:
            return self._audit(self._value(hits) - lru_value, unit)
        if self._trial is None:
            return False
        self._lead = max(0.0, self._lead + self._value(self._trial.serve(path)) - lru_value)
        if self._lead <= self._stake * unit:
            return False
        self.use_lru, self._trial, self._lead = False, None, 0.0
        return True

    def _audit(self, gain: float, unit: float) -> bool:
        self._lead += gain
        if self._lead >= _CREDIT * unit:
            self._lead, self._stake = _CREDIT * unit, _FIRST_STAKE
        if self._lead >= -_LOSS * unit:
            return False
        self.use_lru = True
        self._stake *= 3
        return True

    def _replay(self, path: Sequence[Node]) -> int:
        held, keys = self._lru, [node.key for node in path]
        hits = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        touch = held.move_to_end
        for key in reversed(keys):
            if key in held:
                touch(key)
            else:
                held[key] = None
        self._shrink()
        return hits

    def _shrink(self) -> None:
        while len(self._lru) > self._capacity:
            self._lru.popitem(last=False)


class _Trial(ChainPolicy):
    """Keys that the tier would hold if the learnt order decided. Its nodes take over the groups of the tier's nodes, so
    that a page keeps its worth when the tier has long forgotten it."""

    def __init__(self, capacity: int, worth: Callable[[Node], float]) -> None:
        super().__init__(capacity, ghosts=ghost_limit(capacity))
        self._worth = worth
        self._coming: Sequence[Node] = ()

    def _score(self, node: Node) -> float:
        return self._worth(node)

    def _observe(self, path: list[Node], seen: int, signal: Sequence[float] | None) -> None:
        for node, original in zip(path, self._coming, strict=True):
            node.group = original.group

    def _adopt(self, nodes: Sequence[Node]) -> None:
        for node, original in zip(nodes, self._coming, strict=True):
            node.group = original.group

    def refresh(self) -> None:
        self._rescore()

    def serve(self, path: Sequence[Node]) -> int:
        """Replay one request; returns its hits."""
        self._coming, keys, find = path, [node.key for node in path], self._nodes.get
        lacking = [key for key in keys if (node := find(key)) is None or not node.resident]
        hits = keys.index(lacking[0]) if lacking else len(keys)
        self.touch(keys)
        self.add(lacking)
        self._shrink()
        return hits

    def hold_all(self, nodes: Sequence[Node]) -> None:
        self._coming = nodes
        self.fill([(n.key, n.parent.key if n.parent is not None else None, n.depth) for n in nodes])
        self._shrink()

    def hold(self, node: Node) -> None:
        self._coming = (node,)
        self.add([node.key], node.parent.key if node.parent is not None else None)
        self._shrink()

    def _shrink(self) -> None:
        excess = len(self) - self.capacity
        for key in (self.victims(excess) or ()) if excess > 0 else ():
            self.remove(key)
