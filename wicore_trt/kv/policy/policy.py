"""Eviction policies: the chain bookkeeping that all of them share, LRU and LFU.

Must not know slots, bytes or reference counts: a tier of one layer group asks for victims and reports what it removed.
Invariant (I9): a page is offered as a victim only after every child of it in the tier.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Hashable, Sequence
from operator import itemgetter

Key = Hashable
NEUTRAL_SIGNAL = 1.0  # attention mass of a page nobody measured
_GHOSTS_PER_PAGE = 4
_MANY_GHOSTS = 1 << 18
_DRIFT = 16  # a full tier's capacity is set anew once what it holds differs by more than this part of it


def ghost_limit(capacity: int) -> int:
    """Count the ghosts that a policy with a memory keeps: four cache-fulls, fewer in very large tiers."""
    return min(_GHOSTS_PER_PAGE * capacity, max(capacity, _MANY_GHOSTS))


class Node:
    """Page that is in the tier (`resident`) or was seen lately (a ghost). `children` counts resident children;
    `version` outdates heap entries; `last` is the clock of the last touch; `uses` counts touches after the first;
    `learnt` is the policy's own: a group of pages, or attention mass."""

    __slots__ = (
        "children", "depth", "key", "last", "learnt", "parent", "pins", "resident", "uses", "version",
    )  # fmt: skip

    def __init__(self, key: Key, parent: Node | None) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.children = self.pins = self.version = self.uses = self.last = 0
        self.resident = False
        self.learnt: object = None


class ChainPolicy(ABC):
    """Chains, ghosts, pins and a heap of the pages that may leave; subclasses score pages. Only pages without resident
    children and pins are in the heap. Entries outdated by `version` are dropped when met, so touching costs O(log n).
    `ghosts` keys of pages outside are remembered. The clock counts touched pages."""

    _clock_per_page = 0  # by how much the clock moves with a page that comes in

    def __init__(self, capacity: int, *, ghosts: int = 0) -> None:
        self.capacity = capacity
        self._ghost_limit = ghosts
        self._nodes: dict[Key, Node] = {}
        self._ghosts: OrderedDict[Key, Node] = OrderedDict()
        self._heap: list[tuple[float, int, int, Node]] = []
        self._pushed = 0
        self._resident = 0
        self._clock = 0

    @abstractmethod
    def _score_node(self, node: Node) -> float:
        """Score the worth of keeping a page; the lowest leaves first."""

    def _learn_touch(  # noqa: B027, LRU learns nothing
        self, path: list[Node], seen: int, signal: Sequence[float] | None
    ) -> None:
        """Learn from a touch. The first `seen` pages of the path were known; `last` still holds their earlier touch."""

    def _forget_ghost(self, node: Node) -> None:  # noqa: B027, a policy that learns nothing needs no hook
        """Handle a dropped ghost."""

    def set_capacity(self, capacity: int) -> None:
        """Note that the tier holds another number of pages now, as other kinds of pages share its memory."""
        self.capacity = capacity

    def adapt_capacity(self) -> None:
        """Set the capacity of a full tier to what it holds now, if that differs enough."""
        held = self._resident
        if abs(held - self.capacity) * _DRIFT > held > 0:
            self.set_capacity(held)

    def touch_chain(self, keys: Sequence[Key], signal: Sequence[float] | None = None) -> None:
        """Note that a request looked up this chain from its root; pages may be in the tier or not. `signal[i]` is page
        i's attention mass since its last touch, relative to an average page (1.0 when not measured)."""
        if not keys:
            return
        while len(self._ghosts) > self._ghost_limit:
            key, ghost = self._ghosts.popitem(last=False)
            del self._nodes[key]
            self._forget_ghost(ghost)
        self._clock += len(keys)
        path, seen = self._find_path(keys)
        self._learn_touch(path, seen, signal)
        clock = self._clock
        for node in path:
            node.version += 1
            node.last = clock
            if not node.resident:
                self._ghosts.move_to_end(node.key)
            elif not node.children:
                self._offer_victim(node)

    def note_answer(self, keys: Sequence[Key], tokens: int) -> None:  # noqa: B027, most policies do not ask
        """Note that a request that touched this chain has ended, after an answer of so many tokens."""

    def add_pages(self, keys: Sequence[Key], parent: Key | None = None) -> None:
        """Add consecutive pages that came into the tier, behind `parent` if no `touch_chain` has shown them."""
        above = self._nodes.get(parent) if parent is not None else None
        for key in keys:
            self._clock += self._clock_per_page
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = self._ghosts[key] = Node(key, above)
                node.last = self._clock
                self._adopt_pages([node])
            elif above is not None and node.parent is not above:
                self._set_parent(node, above)
            if not node.resident:
                del self._ghosts[key]
                node.resident = True
                self._resident += 1
                if node.parent is not None:
                    node.parent.children += 1
            above = node
        for key in keys:
            if not (node := self._nodes[key]).children:
                self._offer_victim(node)

    def add_all(self, pages: Sequence[tuple[Key, Key | None, int]]) -> None:
        """Add pages, each once, to an empty policy: (key, key of the page before it, index in the chain). As
        `add_pages` one by one, but in any order of parents and children, and the heap is built once."""
        assert not self._nodes
        for key, _, depth in pages:
            node = self._nodes[key] = Node(key, None)
            self._clock += self._clock_per_page
            node.last, node.depth, node.resident = self._clock, depth, True
        self._resident = len(self._nodes)
        for node, (_, parent, depth) in zip(self._nodes.values(), pages, strict=True):
            above = self._nodes.get(parent) if parent is not None else None
            if above is not None and above.depth == depth - 1:  # so that no pages follow each other in a ring
                node.parent = above
                above.children += 1
        if pages:
            self._adopt_pages(list(self._nodes.values()))
        self._heap = [(0.0, 0, node.version, node) for node in self._nodes.values() if not node.children]
        self.rebuild_heap()

    def _adopt_pages(self, nodes: Sequence[Node]) -> None:  # noqa: B027, likewise
        """Handle pages that came in together without a look-up: a generated one, or all pages after a restart."""

    def remove_page(self, key: Key) -> None:
        """Remove a page that left the tier (evicted, promoted or found corrupt)."""
        node = self._nodes[key]
        assert node.resident, "a page was removed twice"
        node.resident = False
        node.pins = 0
        node.version += 1
        self._resident -= 1
        self._ghosts[key] = node
        if node.parent is not None:
            node.parent.children -= 1
            self._offer_victim(node.parent)

    def pin_pages(self, keys: Sequence[Key]) -> None:
        """Pin pages, so that they are never offered until `unpin_pages`. Pins count."""
        nodes = self._nodes
        for key in keys:
            nodes[key].pins += 1

    def unpin_pages(self, keys: Sequence[Key]) -> None:
        nodes = self._nodes
        for key in keys:
            node = nodes[key]
            assert node.pins > 0, "a page was unpinned twice"
            node.pins -= 1
            if not node.children and not node.pins:
                self._offer_victim(node)

    def choose_victims(self, count: int, protected: Container[Key] = ()) -> list[Key] | None:
        """Choose `count` pages to evict, least valuable first and children before parents; None when pins and
        `protected` leave fewer. Changes nothing: the caller evicts and reports each page with `remove_page`."""
        heap = self._heap
        while count == 1 and heap:  # nearly always; a single victim stays in the heap until it is removed
            _, _, version, node = heap[0]
            if version == node.version and node.resident and not node.pins and not node.children:
                if node.key in protected:
                    break
                return [node.key]
            heapq.heappop(heap)
        taken: list[Node] = []
        popped: list[tuple[float, int, int, Node]] = []
        lost: dict[Node, int] = {}
        while len(taken) < count and self._heap:
            entry = heapq.heappop(self._heap)
            node = entry[3]
            if entry[2] != node.version or not node.resident or node.pins or node.children != lost.get(node, 0):
                continue
            popped.append(entry)
            if node.key in protected:
                continue
            node.version += 1  # a second entry of this page is not to be met
            taken.append(node)
            above = node.parent
            if above is not None and above.resident:
                lost[above] = lost.get(above, 0) + 1
                if lost[above] == above.children and not above.pins:
                    self._pushed += 1
                    heapq.heappush(self._heap, (self._score_node(above), self._pushed, above.version, above))
        for score, order, _, node in popped:
            heapq.heappush(self._heap, (score, order, node.version, node))
        return [node.key for node in taken] if len(taken) == count else None

    def __len__(self) -> int:
        return self._resident

    def __contains__(self, key: Key) -> bool:
        node = self._nodes.get(key)
        return node is not None and node.resident

    def find_branches(self, keys: Sequence[Key]) -> list[int]:
        """List the places of those keys that several pages in the tier follow directly."""
        nodes = self._nodes
        return [i for i, key in enumerate(keys) if (node := nodes.get(key)) is not None and node.children > 1]

    def count_children(self, key: Key) -> int:
        """Count the pages in the tier that follow this one directly."""
        node = self._nodes.get(key)
        return node.children if node is not None else 0

    def _find_path(self, keys: Sequence[Key]) -> tuple[list[Node], int]:
        """Find the nodes of a chain, new ones as ghosts, and count the first ones that were known."""
        path: list[Node] = []
        above, find, seen = None, self._nodes.get, len(keys)
        for key in keys:
            node = find(key)
            if node is None:
                seen = min(seen, len(path))
                node = self._nodes[key] = self._ghosts[key] = Node(key, above)
            if node.parent is not above:
                self._set_parent(node, above)
            path.append(node)
            above = node
        return path, seen

    def _set_parent(self, node: Node, parent: Node | None) -> None:
        """Move a node to a parent that had been dropped and came back as another node."""
        if node.resident:
            if node.parent is not None:
                node.parent.children -= 1
            if parent is not None:
                parent.children += 1
        node.parent = parent

    def _offer_victim(self, node: Node) -> None:
        if node.resident and not node.children and not node.pins:
            self._pushed += 1
            heapq.heappush(self._heap, (self._score_node(node), self._pushed, node.version, node))
            if len(self._heap) > 64 + 4 * self._resident:
                self.rebuild_heap()

    def rebuild_heap(self) -> None:
        """Order the pages that may leave anew, as after their scores changed."""
        known = dict.fromkeys(n for _, _, version, n in sorted(self._heap, key=itemgetter(1)) if version == n.version)
        leaves = [n for n in known if n.resident and not n.children and not n.pins]
        self._heap = [(self._score_node(node), i, node.version, node) for i, node in enumerate(leaves)]
        self._pushed = len(leaves)
        heapq.heapify(self._heap)

    def check_integrity(self) -> None:
        residents = [n for n in self._nodes.values() if n.resident]
        assert len(residents) == self._resident, "the number of resident pages is wrong"
        assert all((key in self._ghosts) != node.resident for key, node in self._nodes.items()), "a page is lost"
        children: dict[Node, int] = {}
        for node in residents:
            if node.parent is not None:
                children[node.parent] = children.get(node.parent, 0) + 1
        assert all(node.children == children.get(node, 0) for node in residents), "children are miscounted"
        live = {entry[3] for entry in self._heap if entry[2] == entry[3].version}
        assert all(n in live for n in residents if not n.children and not n.pins), "a page can never leave (I9)"


class LRUPolicy(ChainPolicy):
    """Least recently touched first, deepest first within one chain."""

    def _score_node(self, node: Node) -> float:
        return node.last


class LFUPolicy(ChainPolicy):
    """Least often touched first, then least recently; counts survive eviction while the page is a ghost."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, ghosts=ghost_limit(capacity))

    def _score_node(self, node: Node) -> float:
        return node.uses * 2.0**40 + node.last

    def _learn_touch(self, path: list[Node], seen: int, signal: Sequence[float] | None) -> None:
        for node in path[:seen]:
            node.uses += 1
