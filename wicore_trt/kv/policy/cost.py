"""The `cost` policy, the default: keep the pages that save most recompute time per byte and unit of time.

Worth of a page = reuse rate of its class and age (learnt by `reuse.ReuseModel` from this tier's own traffic) x what
recomputing it costs. It knows no wall clock, workload or model. Invariant: every number that depends on the workload
is learnt; the constants are pseudo-counts and bin widths relative to the capacity.

The class of a page: how often it was used (the page itself), whether it ends its request, how many pages that request
brought anew (a long new prompt is rarely continued, a short extension of a known chain often is), whether its answer
was short, and, as a finer distinction, how long the chain had been idle before the request and how long that was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

from wicore_trt.arithmetic import div_ceil
from wicore_trt.kv.policy.guard import LRUGuard
from wicore_trt.kv.policy.policy import ChainPolicy, Key, Node, ghost_limit
from wicore_trt.kv.policy.reuse import Group, PageClass, ReuseModel

LENGTH_UNIT = 512
"""Tokens in which lengths are counted before they are sorted into octaves."""
_SHORT_ANSWER = 64
"""Tokens. Short answers are extracted or chosen by a program or a reader of a long document, which may come back after
any time; a conversation goes on soon or never."""
_ANSWER = 1 << 8
"""Factor of the answer's length in a coarse class: 0 unknown (the request still runs), 1 short, 2 long."""
_MAX_USES, _MAX_FRESH, _MAX_IDLE, _MAX_LENGTH = 3, 6, 5, 9
_GROUP_OF, _USES_OF = attrgetter("group"), attrgetter("uses")


class CostPolicy(ChainPolicy):
    """Lowest learnt worth first; least recently used first until there is enough evidence.

    `page_cost(depth)` is the relative cost per byte of recomputing the page at index `depth` of its chain; None means
    that all pages cost the same, which maximises the token hit rate. A `victim_cache` holds only what the tier above
    evicted; its hits cannot be compared with an LRU over all traffic, so it has no guard. `page_tokens` makes the
    classes of request lengths mean the same for any page size.
    """

    def __init__(
        self,
        capacity: int,
        *,
        page_cost: Callable[[int], float] | None = None,
        victim_cache: bool = False,
        page_tokens: int = LENGTH_UNIT,
    ) -> None:
        super().__init__(capacity, ghosts=ghost_limit(capacity))
        self._unit_pages = max(1, LENGTH_UNIT // page_tokens)
        self._page_cost = page_cost
        self._model = ReuseModel(unit=max(1.0, capacity / 64), memory=16.0 * max(capacity, 1))
        self._guard = None if victim_cache else LRUGuard(capacity, self._worth, self._value)
        self._groups: dict[Group, None] = {}
        self._values = [0.0]
        self._refresh_after = max(256, capacity // 8)
        self._evicted = 0

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        if self._guard is not None:
            self._guard.resize(capacity)

    def _score(self, node: Node) -> float:
        return self._worth(node) if self._learnt() else node.last

    def _worth(self, node: Node) -> float:
        group = node.group
        assert isinstance(group, Group)
        worth = self._model.index(group.page_class, self._clock - group.last)
        return worth if self._page_cost is None else worth * self._page_cost(node.depth)

    def _value(self, pages: int) -> float:
        """Cost of recomputing the first pages of a chain."""
        if self._page_cost is None:
            return pages
        while len(self._values) <= pages:
            self._values.append(self._values[-1] + self._page_cost(len(self._values) - 1))
        return self._values[pages]

    @property
    def lru_decides(self) -> bool:
        """Whether the guard does not believe the learnt order."""
        return self._guard is not None and self._guard.use_lru

    def _learnt(self) -> bool:
        return self._model.ready and not self.lru_decides

    def _observe(self, path: list[Node], seen: int, signal: Sequence[float] | None) -> None:
        for _, run in groupby(path[:seen], key=_GROUP_OF):
            self._close(list(run), reused=True)
        for node in path[:seen]:
            node.uses += 1
        known = path[seen - 1] if seen else None
        idle = self._idle_level(self._clock - known.last) if known is not None else 0
        fresh = self._length_level(len(path) - seen, _MAX_FRESH)
        fine = idle << 4 | self._length_level(len(path), _MAX_LENGTH)
        groups: dict[int, Group] = {}
        for uses, run in groupby(path[:-1], key=_USES_OF):
            self._join(list(run), groups, min(uses, _MAX_USES) << 5 | fresh << 1 | 1, fine)
        self._join(path[-1:], groups, min(path[-1].uses, _MAX_USES) << 5 | fresh << 1, fine)
        for group in groups.values():
            group.weight = group.open**-0.5
            self._groups[group] = None
        changed = self._model.observed >= self._refresh_after
        if changed:
            self._model.refresh(self._groups, self._clock)
        if self._consult_guard(path, refreshed=changed) or changed:
            self._rescore()

    def answered(self, keys: Sequence[Key], tokens: int) -> None:
        path = [self._nodes[key] for key in keys if key in self._nodes]
        level = (1 if tokens < _SHORT_ANSWER else 2) * _ANSWER
        for group in {node.group: None for node in path}:
            assert isinstance(group, Group)
            coarse, fine = group.page_class
            group.page_class = PageClass(coarse % _ANSWER + level, fine)
        for node in path:
            node.version += 1
            if not node.children:
                self._offer(node)

    def _consult_guard(self, path: list[Node], *, refreshed: bool) -> bool:
        """Whether another order decides from now on."""
        guard = self._guard
        if guard is None:
            return False
        if refreshed:
            guard.refresh()
        if guard.idle and self._model.ready:
            guard.begin_trial([node for node in self._nodes.values() if node.resident])
        hits = next((i for i, node in enumerate(path) if not node.resident), len(path))
        return guard.observe(path, hits)

    def _length_level(self, pages: int, highest: int) -> int:
        return min((div_ceil(pages, self._unit_pages)).bit_length(), highest)

    def _idle_level(self, age: int) -> int:
        """Octaves of the time the chain was idle, from an eighth of the capacity."""
        return min(1 + int(8 * age / max(self.capacity, 8)).bit_length(), _MAX_IDLE)

    def _join(self, nodes: Sequence[Node], groups: dict[int, Group], coarse: int, fine: int) -> None:
        group = groups.get(coarse)
        if group is None:
            group = groups[coarse] = Group(PageClass(coarse, fine), self._clock)
        group.open += len(nodes)
        for node in nodes:
            node.group = group

    def _adopt(self, nodes: Sequence[Node]) -> None:
        above = nodes[0].parent.group if nodes[0].parent is not None else None
        kind = above.page_class if isinstance(above, Group) else PageClass(0, 0)
        group = Group(kind, self._clock)  # of weight 1, as no one request brought them
        group.open = len(nodes)
        self._groups[group] = None
        for node in nodes:
            node.group = group
            if self._guard is not None:
                self._guard.hold(node)

    def remove(self, key: object) -> None:
        super().remove(key)
        self._evicted += 1
        if self._evicted > 64 and 4 * self._evicted > len(self._heap) and self._learnt():
            self._evicted = 0
            self._rescore()

    def _forget(self, node: Node) -> None:
        self._close([node], reused=False)

    def _close(self, nodes: Sequence[Node], *, reused: bool) -> None:
        """The wait of pages of one group is over: pages of one request were mostly touched together before."""
        group = nodes[0].group
        assert isinstance(group, Group)
        self._model.end(group, len(nodes), self._clock - group.last, reused=reused)
        group.open -= len(nodes)
        if not group.open:
            self._groups.pop(group, None)
