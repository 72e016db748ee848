"""Policy `cost`, the default: keep the pages that save most recompute time per byte and unit of time.

Worth of a page = reuse rate of its class and age (learnt by `reuse.ReuseModel` from this tier's traffic) x recompute
cost. It must not know wall clocks, workloads or models. Invariant: every number that depends on the workload is learnt;
the constants are pseudo-counts and bin widths relative to the capacity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

from wicore_trt.arithmetic import div_ceil
from wicore_trt.kv.policy.policy import ChainPolicy, Key, Node, ghost_limit
from wicore_trt.kv.policy.reuse import PageClass, ReuseModel, TouchGroup

LENGTH_UNIT = 512  # tokens in which lengths are counted before they are sorted into octaves
# Tokens below which an answer is short. A program or a reader of a long document, who gets short answers, may come back
# after any time; a conversation goes on soon or never.
_SHORT_ANSWER = 64
# Factor of the answer's length in a coarse class: 0 unknown (the request still runs), 1 short, 2 long.
_ANSWER = 1 << 8
_MAX_USES, _MAX_FRESH, _MAX_IDLE, _MAX_LENGTH = 3, 6, 5, 9
# Of LRUGuard, in its unit: the lead that a first trial needs, the loss that ends trust in the learnt order, and the
# most gains that are set off against losses.
_FIRST_LEAD, _LOSS, _CREDIT = 4, 4, 64
_GROUP_OF, _USES_OF = attrgetter("learnt"), attrgetter("uses")


class CostPolicy(ChainPolicy):
    """Policy of lowest learnt worth first; least recently used first until there is enough evidence.

    The coarse class of a page: how often it was used, whether it ends its request, how many pages that request brought
    anew, whether its answer was short. The fine class adds how long the chain was idle, and its length.

    `page_cost(depth)` is the relative cost per byte of recomputing the page at index `depth` of its chain; None means
    equal costs, which maximises the token hit rate. A `victim_cache` holds only what the tier above evicted; its hits
    cannot be compared with an LRU over all traffic, so it has no guard. `page_tokens` scales the classes of lengths."""

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
        value = float if page_cost is None else self._prefix_cost
        self._guard = None if victim_cache else LRUGuard(capacity, self._learnt_worth, value)
        self.lru_decides = True  # too little is learnt yet, or the guard does not trust it
        self._groups: dict[TouchGroup, None] = {}
        self._values = [0.0]
        self._refresh_after = max(256, capacity // 8)
        self._evicted = 0

    def set_capacity(self, capacity: int) -> None:
        super().set_capacity(capacity)
        if self._guard is not None:
            self._guard.set_capacity(capacity)

    def _score_node(self, node: Node) -> float:
        return node.last if self.lru_decides else self._learnt_worth(node)

    def _learnt_worth(self, node: Node) -> float:
        group = node.learnt
        assert isinstance(group, TouchGroup)
        worth = self._model.rank_index(group.page_class, self._clock - group.last)
        return worth if self._page_cost is None else worth * self._page_cost(node.depth)

    def _prefix_cost(self, pages: int) -> float:
        """Sum the costs of recomputing the first pages of a chain."""
        assert self._page_cost is not None
        while len(self._values) <= pages:
            self._values.append(self._values[-1] + self._page_cost(len(self._values) - 1))
        return self._values[pages]

    def _learn_touch(self, path: list[Node], seen: int, signal: Sequence[float] | None) -> None:
        for _, run in groupby(path[:seen], key=_GROUP_OF):
            self._close_wait(list(run), reused=True)
        for node in path[:seen]:
            node.uses += 1
        known = path[seen - 1] if seen else None
        idle = 0
        if known is not None:  # octaves of the time that the chain was idle, from an eighth of the capacity
            age = self._clock - known.last
            idle = min(1 + int(8 * age / max(self.capacity, 8)).bit_length(), _MAX_IDLE)
        fresh = self._length_level(len(path) - seen, _MAX_FRESH)
        fine = idle << 4 | self._length_level(len(path), _MAX_LENGTH)
        groups: dict[int, TouchGroup] = {}
        for uses, run in groupby(path[:-1], key=_USES_OF):
            self._join_group(list(run), groups, min(uses, _MAX_USES) << 5 | fresh << 1 | 1, fine)
        self._join_group(path[-1:], groups, min(path[-1].uses, _MAX_USES) << 5 | fresh << 1, fine)
        for group in groups.values():
            group.weight = group.open**-0.5
            self._groups[group] = None
        guard, changed = self._guard, self._model.observed >= self._refresh_after
        if changed:
            self._model.refresh_estimates(self._groups, self._clock)
        if guard is not None:
            if changed and guard.trial is not None:
                guard.trial.rebuild_heap()
            if guard.use_lru and guard.trial is None and self._model.is_ready:
                guard.begin_trial([node for node in self._nodes.values() if node.resident])
            hits = next((i for i, node in enumerate(path) if not node.resident), len(path))
            changed |= guard.observe_request(path, hits)
        if changed:
            self.lru_decides = not self._model.is_ready or (guard is not None and guard.use_lru)
            self.rebuild_heap()

    def note_answer(self, keys: Sequence[Key], tokens: int) -> None:
        level, noted = (1 if tokens < _SHORT_ANSWER else 2) * _ANSWER, None
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                continue
            group = node.learnt
            assert isinstance(group, TouchGroup)
            if group is not noted:
                coarse, fine = group.page_class
                group.page_class, noted = PageClass(coarse % _ANSWER + level, fine), group
            node.version += 1
            if not node.children:
                self._offer_victim(node)

    def _length_level(self, pages: int, highest: int) -> int:
        return min(div_ceil(pages, self._unit_pages).bit_length(), highest)

    def _join_group(self, nodes: Sequence[Node], groups: dict[int, TouchGroup], coarse: int, fine: int) -> None:
        group = groups.get(coarse)
        if group is None:
            group = groups[coarse] = TouchGroup(PageClass(coarse, fine), self._clock)
        group.open += len(nodes)
        for node in nodes:
            node.learnt = group

    def _adopt_pages(self, nodes: Sequence[Node]) -> None:
        above = nodes[0].parent.learnt if nodes[0].parent is not None else None
        kind = above.page_class if isinstance(above, TouchGroup) else PageClass(0, 0)
        group = TouchGroup(kind, self._clock)  # of weight 1, as no one request brought them
        group.open = len(nodes)
        self._groups[group] = None
        for node in nodes:
            node.learnt = group
        if self._guard is not None:
            self._guard.hold_pages(nodes)

    def remove_page(self, key: object) -> None:
        super().remove_page(key)
        self._evicted += 1
        if self._evicted > 64 and 4 * self._evicted > len(self._heap) and not self.lru_decides:
            self._evicted = 0
            self.rebuild_heap()

    def _forget_ghost(self, node: Node) -> None:
        self._close_wait([node], reused=False)

    def _close_wait(self, nodes: Sequence[Node], *, reused: bool) -> None:
        """End the wait of pages of one group: pages of one request were mostly touched together before."""
        group = nodes[0].learnt
        assert isinstance(group, TouchGroup)
        self._model.end_wait(group, len(nodes), self._clock - group.last, reused=reused)
        group.open -= len(nodes)
        if not group.open:
            self._groups.pop(group, None)


class LRUGuard:
    """Guard that decides between the learnt order and LRU, so that learning cannot cost much whatever the traffic does.

    Two shadow caches of the tier's capacity hold keys only and replay its traffic. One is LRU. The other, a trial that
    costs no hits, follows the learnt order while LRU decides. Invariant: the tier follows the learnt order only after a
    trial got far enough ahead of LRU, and until it lost a fixed amount to LRU. Each such failure trebles the lead that
    the next trial needs, so losses grow with the logarithm of the traffic.

    `use_lru` is the verdict for a tier of `capacity` pages. `worth(node)` is the learnt worth, `value(n)` the recompute
    cost that hitting the first n pages of a chain saves. Amounts are in root mean square hits of a request."""

    def __init__(self, capacity: int, worth: Callable[[Node], float], value: Callable[[int], float] = float) -> None:
        self.use_lru = True
        self._capacity = capacity
        self._worth = worth
        self._value = value
        self._lru: OrderedDict[Key, None] = OrderedDict()
        self.trial: _Trial | None = None
        self._needed_lead = _FIRST_LEAD
        self._lead = 0.0
        self._squares = 0.0
        self._hitting = 0

    def set_capacity(self, capacity: int) -> None:
        """Note that the tier holds another number of pages now."""
        self._capacity = capacity
        if self.trial is not None:
            self.trial.capacity = capacity

    def begin_trial(self, residents: Sequence[Node]) -> None:
        """Begin a trial from the pages that the tier holds, in any order."""
        self.trial, self._lead = _Trial(self._capacity, self._worth, residents), 0.0

    def hold_pages(self, nodes: Sequence[Node]) -> None:
        """Note that pages came into the tier that no request looked up (generated ones, or all after a restart)."""
        lru = self._lru
        for node in nodes:
            lru[node.key] = None
        self._shrink_lru()
        if self.trial is not None:
            for node in nodes:
                self.trial.hold_page(node)

    def observe_request(self, path: Sequence[Node], hits: int) -> bool:
        """Learn from a request of which the tier held the first `hits` pages; returns whether the verdict changed."""
        lru, lru_hits = self._lru, 0
        while lru_hits < len(path) and path[lru_hits].key in lru:
            lru_hits += 1
        for node in reversed(path):
            lru[node.key] = None
            lru.move_to_end(node.key)
        self._shrink_lru()
        lru_value = self._value(lru_hits)
        if lru_value:
            self._squares += lru_value * lru_value
            self._hitting += 1
        unit = (self._squares / max(1, self._hitting)) ** 0.5
        if not self.use_lru:
            self._lead += self._value(hits) - lru_value
            if self._lead >= _CREDIT * unit:
                self._lead, self._needed_lead = _CREDIT * unit, _FIRST_LEAD
            if self._lead >= -_LOSS * unit:
                return False
            self.use_lru, self._needed_lead = True, 3 * self._needed_lead
            return True
        if self.trial is None:
            return False
        self._lead = max(0.0, self._lead + self._value(self.trial.serve_request(path)) - lru_value)
        if self._lead <= self._needed_lead * unit:
            return False
        self.use_lru, self.trial, self._lead = False, None, 0.0
        return True

    def _shrink_lru(self) -> None:
        while len(self._lru) > self._capacity:
            self._lru.popitem(last=False)


class _Trial(ChainPolicy):
    """Keys that the tier would hold if the learnt order decided. Nodes share the groups of the tier's."""

    def __init__(self, capacity: int, worth: Callable[[Node], float], residents: Sequence[Node]) -> None:
        super().__init__(capacity, ghosts=ghost_limit(capacity))
        self._worth = worth
        self._coming = residents
        self.add_all([(n.key, n.parent.key if n.parent is not None else None, n.depth) for n in residents])
        self._evict_excess()

    def _score_node(self, node: Node) -> float:
        return self._worth(node)

    def _learn_touch(self, path: list[Node], seen: int, signal: Sequence[float] | None) -> None:
        for node, original in zip(path, self._coming, strict=True):
            node.learnt = original.learnt

    def _adopt_pages(self, nodes: Sequence[Node]) -> None:
        for node, original in zip(nodes, self._coming, strict=True):
            node.learnt = original.learnt

    def serve_request(self, path: Sequence[Node]) -> int:
        """Replay one request; returns its hits."""
        self._coming, keys, find = path, [node.key for node in path], self._nodes.get
        lacking = [key for key in keys if (node := find(key)) is None or not node.resident]
        hits = keys.index(lacking[0]) if lacking else len(keys)
        self.touch_chain(keys)
        self.add_pages(lacking)
        self._evict_excess()
        return hits

    def hold_page(self, node: Node) -> None:
        self._coming = (node,)
        self.add_pages([node.key], node.parent.key if node.parent is not None else None)
        self._evict_excess()

    def _evict_excess(self) -> None:
        excess = len(self) - self.capacity
        for key in (self.choose_victims(excess) or ()) if excess > 0 else ():
            self.remove_page(key)
