"""Which slots of the host or disk tier hold which pages: the books of one tier, on plain data.

One free list serves all layer groups: a page takes as many slots as its bytes fill, so capacity is what the arithmetic
says. The index decides what is evicted, through a policy over chain nodes; it must not know bytes, threads or clocks.
A node is one page index of a chain; it has a copy per layer group. The primary group (global, where the model has it)
carries the chain; a local copy leaves with its node, or earlier when no request is expected to resume there.
Invariant (`check_integrity`): every slot is free or belongs to exactly one copy; a copy that is written, read or lost
is never evicted and its slots are never handed out.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from wicore_trt.kv.page import Page
from wicore_trt.kv.policy import ChainPolicy, Key


class CopyState(enum.Enum):
    """WRITING is filled now; READY can be read; LOST left the index while its buffers are still touched; FREE is
    final."""

    WRITING = "writing"
    READY = "ready"
    LOST = "lost"
    FREE = "free"


TRANSITIONS: dict[CopyState, frozenset[CopyState]] = {
    CopyState.WRITING: frozenset({CopyState.READY, CopyState.LOST, CopyState.FREE}),
    CopyState.READY: frozenset({CopyState.LOST, CopyState.FREE}),
    CopyState.LOST: frozenset({CopyState.FREE}),
    CopyState.FREE: frozenset(),
}


@dataclass(slots=True, eq=False)
class TierCopy:
    """One page in one tier. `readers` count transfers that read its slots; `checksum` is set by the tier that checks
    it; `saved`: the next tier has had it, or is not to have it."""

    page: Page
    slots: tuple[int, ...]
    state: CopyState = CopyState.WRITING
    readers: int = 0
    checksum: bytes = b""
    saved: bool = False

    @property
    def ready(self) -> bool:
        return self.state is CopyState.READY

    def move(self, state: CopyState) -> None:
        """Change state; an illegal transition is a bug of ours."""
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state


@dataclass(slots=True, eq=False)
class TierNode:
    """All copies of one page index of a chain. `busy` counts writers, readers and one for a session's hold (`held`)."""

    key: bytes
    tenant: bytes
    copies: dict[str, TierCopy] = field(default_factory=dict)
    busy: int = 0
    held: bool = False


class TierIndex:
    """`num_slots` slots; a page of group g takes `slots_per_page[g]` of them. `primary` is the group that carries the
    chains. `quota` bounds one tenant's share of the slots, `pin_share` what sessions may hold. `on_evict` is told of
    every copy that left the index, with its cause, when its slots are free again."""

    def __init__(
        self,
        num_slots: int,
        slots_per_page: dict[str, int],
        policy: ChainPolicy,
        *,
        primary: str,
        quota: float = 1.0,
        pin_share: float = 0.5,
        on_evict: Callable[[TierCopy, str], None] = lambda copy, cause: None,
    ) -> None:
        self.num_slots = num_slots
        self.slots_per_page = slots_per_page
        self.primary = primary
        self.policy = policy
        self.evictions: Counter[str] = Counter()
        self.pages: Counter[str] = Counter()
        self._quota_slots = int(quota * num_slots)
        self._pin_slots = int(pin_share * num_slots)
        self._on_evict = on_evict
        self._free = list(range(num_slots - 1, -1, -1))
        self._nodes: dict[Key, TierNode] = {}
        self._spare: OrderedDict[bytes, None] = OrderedDict()  # keys whose local copy goes before any node
        self._lost: set[TierCopy] = set()
        self._tenants: dict[bytes, OrderedDict[bytes, None]] = {}
        self._tenant_slots: Counter[bytes] = Counter()
        self._holds: Counter[bytes] = Counter()  # by key, whether its page is here or not
        self.held_slots = 0
        self.unsaved_slots = 0

    @property
    def used_slots(self) -> int:
        return self.num_slots - len(self._free)

    def get(self, group: str, key: bytes) -> TierCopy | None:
        """The copy of a page, in state WRITING or READY, or None."""
        node = self._nodes.get(key)
        return node.copies.get(group) if node is not None else None

    def copies(self) -> Iterator[TierCopy]:
        """All copies that can be found, in no particular order. Do not change the index meanwhile."""
        return (copy for node in self._nodes.values() for copy in node.copies.values())

    # --- writing -------------------------------------------------------------------------------------------------

    def reserve(self, page: Page) -> TierCopy | None:
        """Slots for a page that is not in the index, evicting what the policy gives up first; None when what is left
        is in use, held or of other tenants and this one is at its quota."""
        assert self.get(page.group, page.key) is None, "a page was reserved twice"
        need = self.slots_per_page[page.group]
        if not self._make_room(need, page):
            return None
        copy = TierCopy(page, tuple(self._free.pop() for _ in range(need)))
        node = self._nodes.get(page.key)
        if node is None:
            node = self._nodes[page.key] = TierNode(page.key, page.tenant)
            self._tenants.setdefault(page.tenant, OrderedDict())[page.key] = None
        self._let_go(node)
        node.copies[page.group] = copy
        self._tenant_slots[page.tenant] += need
        self.unsaved_slots += need
        if page.group == self.primary:
            self.policy.add([page.key], page.parent)
            self._spare.pop(page.key, None)
            if node.busy:
                self.policy.pin([page.key])
        elif self.primary not in node.copies:
            self._spare[page.key] = None
        self._busy(node, 1)
        above = self._nodes.get(page.parent) if page.parent is not None else None
        if page.key in self._holds and (above is None or above.held):
            self._try_hold(node)
        return copy

    def commit(self, copy: TierCopy) -> None:
        """The page is written: it can be found and read. A copy that was dropped meanwhile is freed."""
        if copy.state is CopyState.LOST:
            self.reclaim(copy)
            return
        copy.move(CopyState.READY)
        self.pages[copy.page.group] += 1
        self._busy(self._nodes[copy.page.key], -1)

    def abort(self, copy: TierCopy, cause: str, *, touched: bool = False) -> None:
        """The page could not be written. `touched`: its buffers may still change, until `reclaim`."""
        if copy.state is CopyState.LOST:
            if not touched:
                self.reclaim(copy)
            return
        assert copy.state is CopyState.WRITING
        self._remove(copy, cause, lost=touched)

    def reclaim(self, copy: TierCopy) -> None:
        """Nothing touches the buffers of a lost copy any more."""
        self._lost.discard(copy)
        copy.move(CopyState.FREE)
        self._free.extend(copy.slots)

    # --- reading -------------------------------------------------------------------------------------------------

    def acquire(self, copy: TierCopy) -> None:
        """Keep a READY copy in place while it is read."""
        assert copy.ready
        copy.readers += 1
        self._busy(self._nodes[copy.page.key], 1)

    def release(self, copy: TierCopy) -> None:
        """End of `acquire`. The slots of a copy that was dropped meanwhile are free after its last reader."""
        assert copy.readers > 0, "a copy was released twice"
        copy.readers -= 1
        if copy.state is CopyState.LOST:
            if not copy.readers:
                self.reclaim(copy)
            return
        self._busy(self._nodes[copy.page.key], -1)

    def touch(self, keys: Sequence[bytes], signal: Sequence[float] | None = None) -> None:
        """A request looked up this chain, whether its pages are here or not."""
        self.policy.touch(keys, signal)
        for key in reversed(keys):  # a chain's tail is to leave before its head
            node = self._nodes.get(key)
            if node is not None:
                self._tenants[node.tenant].move_to_end(key)

    # --- leaving -------------------------------------------------------------------------------------------------

    def drop(self, copy: TierCopy, cause: str) -> None:
        """Take a READY copy out of the index at once; its slots are free when nobody reads them any more."""
        assert copy.ready
        self._remove(copy, cause, lost=copy.readers > 0)

    def drop_key(self, key: bytes, cause: str) -> None:
        """Drop all READY copies of a page."""
        node = self._nodes.get(key)
        for copy in list(node.copies.values()) if node is not None else ():
            if copy.ready:
                self.drop(copy, cause)

    def spare(self, group: str, key: bytes) -> None:
        """No request is expected to need this local copy: it leaves before any other page."""
        if group != self.primary and self.get(group, key) is not None:
            self._spare[key] = None

    def keep(self, key: bytes) -> None:
        """Undo `spare`: a request resumed here."""
        node = self._nodes.get(key)
        if node is not None and self.primary in node.copies:
            self._spare.pop(key, None)

    def hold(self, keys: Iterable[bytes]) -> None:
        """A session's chain, first page first: its pages, here now or stored later, do not leave for space until
        `unhold` with the same keys. Holds count. Pages that would pass `pin_share` are not held."""
        room = True
        for key in keys:
            self._holds[key] += 1
            node = self._nodes.get(key)
            if node is not None and not node.held and room:
                room = self._try_hold(node)

    def unhold(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            assert self._holds[key] > 0, "a hold was taken back twice"
            self._holds[key] -= 1
            if not self._holds[key]:
                del self._holds[key]
                node = self._nodes.get(key)
                if node is not None:
                    self._let_go(node)

    def cold(self, slots: int) -> list[TierCopy]:
        """Copies that the next tier should get, in the order in which they would leave, for about `slots` slots."""
        found: dict[TierCopy, None] = {}
        count = 1
        while (victims := self.policy.victims(count)) is not None:
            for key in victims[count // 2 :]:
                found.update((c, None) for c in self._nodes[key].copies.values() if c.ready and not c.saved)
            if sum(len(copy.slots) for copy in found) >= slots:
                break
            count *= 2
        return list(found)

    def mark_saved(self, copy: TierCopy) -> None:
        if not copy.saved:
            copy.saved = True
            if copy.state in (CopyState.WRITING, CopyState.READY):
                self.unsaved_slots -= len(copy.slots)

    # --- inside --------------------------------------------------------------------------------------------------

    def _try_hold(self, node: TierNode) -> bool:
        slots = self._slots_of(node)
        if self.held_slots + slots > self._pin_slots:
            return False
        node.held = True
        self.held_slots += slots
        self._busy(node, 1)
        return True

    def _let_go(self, node: TierNode) -> None:
        if node.held:
            node.held = False
            self.held_slots -= self._slots_of(node)
            self._busy(node, -1)

    def _busy(self, node: TierNode, change: int) -> None:
        before = node.busy
        node.busy += change
        assert node.busy >= 0
        if self.primary in node.copies:
            if before == 0:
                self.policy.pin([node.key])
            elif node.busy == 0:
                self.policy.unpin([node.key])

    def _make_room(self, need: int, page: Page) -> bool:
        over = self._tenant_slots[page.tenant] + need - self._quota_slots
        if over > 0 and not self._evict_tenant(page, over):
            return False
        while len(self._free) < need:
            if not (self._evict_spare(page.key) or self._evict_node(page)):
                return False
        return True

    def _evict_spare(self, protected: bytes) -> bool:
        for key in self._spare:
            node = self._nodes[key]
            copy = next((c for g, c in node.copies.items() if g != self.primary), None)
            if copy is not None and copy.ready and not copy.readers and not node.held and key != protected:
                self._remove(copy, "window")
                return True
        return False

    def _evict_node(self, page: Page) -> bool:
        protected = {page.key} if page.parent is None else {page.key, page.parent}
        victims = self.policy.victims(1, protected)
        if victims is None:
            return False
        self._remove_node(self._nodes[victims[0]], "capacity")
        return True

    def _evict_tenant(self, page: Page, slots: int) -> bool:
        """Make a tenant give up its own oldest pages; only used at its quota."""
        leaving: list[TierNode] = []
        for key in self._tenants.get(page.tenant, ()):
            if slots <= 0:
                break
            node = self._nodes[key]
            if not node.busy and key not in (page.key, page.parent):
                leaving.append(node)
                slots -= self._slots_of(node)
        if slots > 0:
            return False
        for node in leaving:
            self._remove_node(node, "quota")
        return True

    def _remove_node(self, node: TierNode, cause: str) -> None:
        for copy in list(node.copies.values()):
            self._remove(copy, cause)

    def _remove(self, copy: TierCopy, cause: str, *, lost: bool = False) -> None:
        node, page, count = self._nodes[copy.page.key], copy.page, len(copy.slots)
        was_busy = node.busy > 0
        if page.group == self.primary:
            self.policy.remove(page.key)
        del node.copies[page.group]
        # the copy's own writer or readers no longer count for the node
        node.busy -= copy.readers + (copy.state is CopyState.WRITING)
        if copy.ready:
            self.pages[page.group] -= 1
            self.evictions[cause] += 1
        self._tenant_slots[page.tenant] -= count
        if not copy.saved:
            self.unsaved_slots -= count
        if node.held:
            self.held_slots -= count
        if page.group != self.primary or not node.copies:
            self._spare.pop(page.key, None)
        elif node.copies:
            self._spare[page.key] = None
        if self.primary in node.copies and was_busy and not node.busy:
            self.policy.unpin([page.key])
        if not node.copies:
            del self._nodes[page.key]
            del self._tenants[page.tenant][page.key]
            if not self._tenants[page.tenant]:
                del self._tenants[page.tenant]
                del self._tenant_slots[page.tenant]
        if lost:
            copy.move(CopyState.LOST)
            self._lost.add(copy)
        else:
            copy.move(CopyState.FREE)
            self._free.extend(copy.slots)
        self._on_evict(copy, cause)

    def _slots_of(self, node: TierNode) -> int:
        return sum(len(copy.slots) for copy in node.copies.values())

    def check_integrity(self) -> None:
        """Assert the invariant of this module and the counters."""
        copies = [copy for node in self._nodes.values() for copy in node.copies.values()]
        slots = [slot for copy in (*copies, *self._lost) for slot in copy.slots] + self._free
        assert len(slots) == self.num_slots and len(set(slots)) == self.num_slots, "a slot is lost or shared"
        assert all(c.state in (CopyState.WRITING, CopyState.READY) for c in copies), "a copy in the index has ended"
        assert all(c.state is CopyState.LOST for c in self._lost)
        for key, node in self._nodes.items():
            assert node.copies and node.key == key, "an empty node"
            working = sum(c.readers + (c.state is CopyState.WRITING) for c in node.copies.values())
            assert node.busy == working + node.held, "a node's users are miscounted"
            assert (key in self.policy) == (self.primary in node.copies), "policy and index disagree"
            assert self.primary in node.copies or key in self._spare, "a copy can never leave"
        assert len(self.policy) == sum(self.primary in n.copies for n in self._nodes.values())
        assert all(self._nodes[key].copies for key in self._spare)
        self._check_counters(copies)
        self.policy.check_integrity()

    def _check_counters(self, copies: list[TierCopy]) -> None:
        ready, tenants = Counter(c.page.group for c in copies if c.ready), Counter[bytes]()
        for copy in copies:
            tenants[copy.page.tenant] += len(copy.slots)
        assert +self.pages == ready, "pages are miscounted"
        assert +self._tenant_slots == tenants, "tenants are miscounted"
        assert all(tenants[t] <= max(self._quota_slots, 0) for t in tenants), "a tenant passed its quota"
        assert self.unsaved_slots == sum(len(c.slots) for c in copies if not c.saved)
        held = [node for node in self._nodes.values() if node.held]
        assert self.held_slots == sum(map(self._slots_of, held)) <= self._pin_slots, "held slots are miscounted"
        assert all(node.key in self._holds for node in held), "a hold without a holder"
