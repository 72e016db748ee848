"""Books of the host or the disk tier on plain data: the slots that hold its pages.

One free list serves all layer groups, so capacity is what the arithmetic says. The index decides what is evicted,
through a policy over chain nodes; it must not know bytes, threads or clocks. A node is one page index of a chain. Its
copy of the primary group (global, where the model has it) carries the chain; that of the other group leaves with its
node, or earlier when no request is expected to resume there. Invariant (I6) (`check_integrity`): every slot is free or
belongs to exactly one copy; a copy that is written, read or lost is never evicted and its slots are never handed out.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import NamedTuple

from msgspec import Struct

from wicore_trt.collector import collection_paused
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.policy import ChainPolicy, Key, LRUPolicy
from wicore_trt.kv.tiers.moves import CopyState, TierCopy

LOOKAHEAD = 256


class Recency(LRUPolicy):
    """Order of a tenant's pages, least recently used or stored first; look-ups of absent pages do not count."""

    _clock_per_page = 1


class TierNode(Struct, eq=False, gc=False):
    """Copies of one page index of a chain: of the primary group, and of the other one. `busy` counts writers, readers
    and one for a session's pin (`pinned`); `spare`: the local copy is to leave before any other page."""

    key: bytes
    tenant: bytes
    carrier: TierCopy | None = None
    local: TierCopy | None = None
    busy: int = 0
    pinned: bool = False
    spare: bool = False

    @property
    def copies(self) -> list[TierCopy]:
        return [copy for copy in (self.carrier, self.local) if copy is not None]

    @property
    def slots(self) -> int:
        return sum(len(copy.slots) for copy in self.copies)


@dataclass(slots=True)
class _Tenant:
    """Share of a tenant in a tier: `slots` in use and keys of `spare` nodes that may leave, oldest first. Under a quota
    `order` has its other pages by the times at which they were used or stored, and by nothing else."""

    slots: int = 0
    spare: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    order: Recency | None = None


class IndexState(NamedTuple):
    """The books of a tier as plain data. `users`: writers and readers of the copies of a key, where there are any."""

    slots: dict[bytes, int]
    users: dict[bytes, int]
    pinned: set[bytes]
    lost_copies: int
    withheld_slots: int


class TierIndex:
    """`num_slots` slots; a page of group g takes `slots_per_page[g]` of them, or `raw_slots[g]`. `primary` is the group
    that carries the chains. `quota` bounds one tenant's share of the slots, `pin_share` what sessions may pin.
    `on_evict` is told of every copy that left the index, with its cause, when its slots are free again."""

    def __init__(
        self,
        num_slots: int,
        slots_per_page: dict[str, int],
        policy: ChainPolicy,
        *,
        primary: str,
        raw_slots: Mapping[str, int] | None = None,
        quota: float = 1.0,
        pin_share: float = 0.5,
        on_evict: Callable[[TierCopy, str], None] = lambda copy, cause: None,
    ) -> None:
        self.num_slots = num_slots
        self.slots_per_page, self.raw_slots = slots_per_page, raw_slots or slots_per_page
        self.primary = primary
        self.policy = policy
        self.evictions: Counter[str] = Counter()
        self.pages = Counter(dict.fromkeys(slots_per_page, 0))
        self._quota_slots = int(quota * num_slots)
        self._pin_slots = int(pin_share * num_slots)
        self._on_evict = on_evict
        self._free = array("I", range(num_slots - 1, -1, -1))
        self._coming = 0
        self._nodes: dict[Key, TierNode] = {}
        self._spare: OrderedDict[bytes, None] = OrderedDict()  # keys of spare nodes that nobody uses, oldest first
        self._lost: set[TierCopy] = set()
        self._tenants: dict[bytes, _Tenant] = {}
        self._pins: Counter[bytes] = Counter()  # by key, whether its page is here or not
        self.pinned_slots = 0
        self.unsaved_slots = 0

    @property
    def used_slots(self) -> int:
        return self.num_slots - len(self._free) - self._coming

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def find_newest(self, count: int) -> list[Page]:
        """Pages of the primary group that can be read, the newest first, among as many nodes."""
        nodes = islice(reversed(self._nodes.values()), count)
        return [node.carrier.page for node in nodes if node.carrier is not None and node.carrier.ready]

    def withhold_slots(self, first: int, stop: int) -> None:
        """Take free slots [first, stop) out of use until `grant_slots`: something else has their memory, or nothing."""
        before = len(self._free)
        self._free = array("I", (slot for slot in self._free if not first <= slot < stop))
        assert before - len(self._free) == stop - first, "only a free slot can be withheld"
        self._coming += stop - first

    def grant_slots(self, first: int, stop: int) -> None:
        """Slots [first, stop), which were withheld, can be used."""
        self._coming -= stop - first
        self._free.extend(range(stop - 1, first - 1, -1))

    def set_aside(self, first: int, others: Collection[int]) -> list[int]:
        """Take the free slots from `first` on, and of the others those that are free, out of use until `give_back`."""
        taken = [slot for slot in self._free if slot >= first or slot in others]
        self._free = array("I", (slot for slot in self._free if slot < first and slot not in others))
        self._coming += len(taken)
        return taken

    def give_back(self, slots: list[int]) -> None:
        """Slots that were set aside can be used, when no other is free."""
        self._coming -= len(slots)
        self._free[:0] = array("I", slots)

    def find_copy(self, group: str, key: bytes) -> TierCopy | None:
        """Find the copy of a page, in state WRITING or READY, or None."""
        node = self._nodes.get(key)
        if node is None:
            return None
        return node.carrier if group == self.primary else node.local

    def find_nodes(self, keys: Iterable[bytes]) -> Iterator[TierNode | None]:
        """Find what is here of each of these pages."""
        return map(self._nodes.get, keys)

    def find_ready(self, group: str, key: bytes) -> TierCopy | None:
        """Find the copy of a page, if it can be read."""
        node = self._nodes.get(key)  # not by `find_copy`: each prompt asks for all its pages
        copy = None if node is None else node.carrier if group == self.primary else node.local
        return copy if copy is not None and copy.state is CopyState.READY else None

    def iterate_copies(self) -> Iterator[TierCopy]:
        """Iterate over the copies that can be found, in no particular order. Do not change the index meanwhile."""
        return (copy for node in self._nodes.values() for copy in node.copies)

    # --- writing -------------------------------------------------------------------------------------------------

    def reserve_copy(self, page: Page, slots: int = 0) -> TierCopy | None:
        """Reserve slots (so many, or as many as a page usually takes) for a page that is not in the index, evicting
        what the policy gives up first; None when the rest is in use or pinned, or this tenant is at its quota."""
        need, key, carries = slots or self.slots_per_page[page.group], page.key, page.group == self.primary
        if not self._make_room(need, page):
            return None
        taken = array("I", sorted(self._free[-need:]))  # side by side where that can be: fewer, larger moves
        del self._free[-need:]
        copy = TierCopy(page, taken)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = TierNode(key, page.tenant)
        elif node.pinned:
            self._unpin_node(node)
        assert (node.carrier if carries else node.local) is None, "a page was reserved twice (I6)"
        self._get_tenant(page.tenant).slots += need
        self.unsaved_slots += need
        if carries:
            node.carrier = copy
            for policy in self._find_policies(page.tenant):
                policy.add_pages([key], page.parent)
                if node.busy:
                    policy.pin_pages([key])
        else:
            node.local = copy
        self._count_users(node, 1)
        if node.spare or node.carrier is None:
            self._set_spare(node, node.carrier is None)
        if key in self._pins:
            above = self._nodes.get(page.parent) if page.parent is not None else None
            if above is None or above.pinned:
                self._try_pin_node(node)
        return copy

    def commit_copy(self, copy: TierCopy, readers: int = 0) -> None:
        """Let a written page be found and read; so many `readers` do. A copy that was dropped meanwhile is freed."""
        if copy.state is CopyState.LOST:
            self.reclaim_slots(copy)
            return
        copy.change_state(CopyState.READY)
        copy.readers += readers
        self.pages[copy.page.group] += 1
        if readers != 1:
            self._count_users(self._nodes[copy.page.key], readers - 1)

    def abort_copy(self, copy: TierCopy, cause: str, *, touched: bool = False) -> None:
        """The page could not be written. `touched`: its buffers may still change, until `reclaim_slots`."""
        if copy.state is CopyState.LOST:
            if not touched:
                self.reclaim_slots(copy)
            return
        assert copy.state is CopyState.WRITING
        self._remove_copy(copy, cause, lost=touched)

    def reclaim_slots(self, copy: TierCopy) -> None:
        """Nothing touches the buffers of a lost copy any more."""
        assert copy.state is CopyState.LOST and not copy.readers
        self._lost.discard(copy)
        copy.change_state(CopyState.FREE)
        self._free.extend(copy.slots)

    @collection_paused()
    def restore_pages(self, found: Iterable[tuple[Page, Sequence[int]]]) -> None:
        """Take over pages that a store recovered, oldest first, no slot twice; for an index that is empty. They are
        READY and saved. A page whose slots do not fit this index is left out; what passes a tenant's quota leaves."""
        assert not self._nodes and not self._lost and not self._pins
        nodes, primary, taken = self._nodes, self.primary, array("I")
        sizes = {group: {self.slots_per_page[group], self.raw_slots[group]} for group in self.slots_per_page}
        shares, last = Counter[bytes](), self.num_slots - 1
        chains: list[tuple[bytes, bytes | None, int]] = []
        for page, slots in found:
            need, group = len(slots), page.group
            if need not in sizes.get(group, ()) or need > self._quota_slots or max(slots) > last:
                continue
            if (node := nodes.get(page.key)) is None:
                node = nodes[page.key] = TierNode(page.key, page.tenant)
            elif (node.carrier if group == primary else node.local) is not None:
                continue
            copy = TierCopy(page, slots, CopyState.READY, saved=True, found=True)
            if group == primary:
                node.carrier = copy
                chains.append((page.key, page.parent, page.index))
            else:
                node.local = copy
            self.pages[group] += 1
            shares[page.tenant] += need
            taken.extend(slots)
        free = bytearray(b"\1") * self.num_slots
        for slot in taken:
            free[slot] = 0
        self._free = array("I", compress(range(last, -1, -1), reversed(free)))
        for tag, count in shares.items():
            self._get_tenant(tag).slots = count
        for node in [node for node in self._nodes.values() if node.carrier is None]:
            self._set_spare(node, True)
        self.policy.add_all(chains)
        if self._quota_slots < self.num_slots:
            self._restore_shares(chains)

    # --- reading -------------------------------------------------------------------------------------------------

    def acquire_copies(self, copies: Iterable[TierCopy]) -> None:
        nodes, begun, ready = self._nodes, list[TierNode](), CopyState.READY
        for copy in copies:
            assert copy.state is ready, "only a written copy can be read (I6)"
            copy.readers += 1
            node = nodes[copy.page.key]
            if not node.busy:
                begun.append(node)
            node.busy += 1
        self._note_users(begun, True)

    def release_copies(self, copies: Iterable[TierCopy]) -> None:
        """End of `acquire_copies`. The slots of a copy that was dropped meanwhile are free after its last reader."""
        nodes, ended, lost = self._nodes, list[TierNode](), CopyState.LOST
        for copy in copies:
            assert copy.readers > 0, "a copy was released twice (I6)"
            copy.readers -= 1
            if copy.state is not lost:
                node = nodes[copy.page.key]
                node.busy -= 1
                if not node.busy:
                    ended.append(node)
            elif not copy.readers:
                self.reclaim_slots(copy)
        self._note_users(ended, False)

    def touch_chain(self, keys: Sequence[bytes], signal: Sequence[float] | None = None) -> None:
        """A request looked up this chain, whether its pages are here or not."""
        self.policy.touch_chain(keys, signal)
        if self._quota_slots < self.num_slots:
            node = next((self._nodes[key] for key in keys if key in self._nodes), None)
            order = self._get_tenant(node.tenant).order if node is not None else None
            if order is not None:
                order.touch_chain(keys)

    # --- leaving -------------------------------------------------------------------------------------------------

    def drop_copy(self, copy: TierCopy, cause: str) -> None:
        """Take a READY copy out of the index at once; its slots are free when nobody reads them any more."""
        assert copy.ready
        self._remove_copy(copy, cause, lost=copy.readers > 0)

    def drop_key(self, key: bytes, cause: str, *, written: bool = False) -> None:
        """Drop READY copies of a page; with `written` WRITING ones, too, whose buffers change until `reclaim_slots`."""
        node = self._nodes.get(key)
        for copy in node.copies if node is not None else ():
            if copy.ready:
                self.drop_copy(copy, cause)
            elif written:
                self._remove_copy(copy, cause, lost=True)

    def spare_copies(self, group: str, keys: Iterable[bytes]) -> None:
        """No request is expected to need these local copies: they leave before any other page."""
        for key in keys if group != self.primary else ():
            node = self._nodes.get(key)
            if node is not None and node.local is not None:
                self._set_spare(node, True)

    def pin_keys(self, keys: Iterable[bytes]) -> None:
        """A session's chain, first page first: its pages, here now or stored later, do not leave for space until
        `unpin_keys` with the same keys. Pins count. Pages that would pass `pin_share` are not pinned."""
        room = True
        for key in keys:
            self._pins[key] += 1
            node = self._nodes.get(key)
            if node is not None and not node.pinned and room:
                room = self._try_pin_node(node)

    def unpin_keys(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            assert self._pins[key] > 0, "a pin was taken back twice"
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                node = self._nodes.get(key)
                if node is not None:
                    self._unpin_node(node)

    def find_cold(self, slots: int) -> list[TierCopy]:
        """Copies that the next tier should get, in the order in which they would leave, for about `slots` slots and
        among the LOOKAHEAD coldest pages: behind those there is no hurry."""
        found: list[TierCopy] = []
        seen, step = 0, 1
        while step and slots > 0 and seen < LOOKAHEAD:
            victims = self.policy.choose_victims(seen + step)
            if victims is None:
                step //= 2
                continue
            for key in victims[seen:]:
                copies = [c for c in self._nodes[key].copies if c.ready and not c.saved]
                found += copies
                slots -= sum(len(copy.slots) for copy in copies)
            seen += step
            step *= 2
        return found

    def mark_saved(self, copy: TierCopy) -> None:
        if not copy.saved:
            copy.saved = True
            if copy.state in (CopyState.WRITING, CopyState.READY):
                self.unsaved_slots -= len(copy.slots)

    # --- inside --------------------------------------------------------------------------------------------------

    def _try_pin_node(self, node: TierNode) -> bool:
        slots = node.slots
        if self.pinned_slots + slots > self._pin_slots:
            return False
        node.pinned = True
        self.pinned_slots += slots
        self._count_users(node, 1)
        return True

    def _unpin_node(self, node: TierNode) -> None:
        if node.pinned:
            node.pinned = False
            self.pinned_slots -= node.slots
            self._count_users(node, -1)

    def _get_tenant(self, tag: bytes) -> _Tenant:
        tenant = self._tenants.get(tag)
        if tenant is None:
            limited = self._quota_slots < self.num_slots
            tenant = self._tenants[tag] = _Tenant(order=Recency(self._quota_slots) if limited else None)
        return tenant

    def _find_policies(self, tag: bytes) -> tuple[ChainPolicy, ...]:
        if self._quota_slots >= self.num_slots:
            return (self.policy,)
        order = self._get_tenant(tag).order
        assert order is not None
        return (self.policy, order)

    def _restore_shares(self, chains: Iterable[tuple[bytes, bytes | None, int]]) -> None:
        """Give each tenant its own order of what was restored; what passes its quota leaves by it."""
        shares: defaultdict[bytes, list[tuple[bytes, bytes | None, int]]] = defaultdict(list)
        for entry in chains:
            shares[self._nodes[entry[0]].tenant].append(entry)
        for tag, tenant in list(self._tenants.items()):
            assert tenant.order is not None
            tenant.order.add_all(shares[tag])
            while tenant.slots > self._quota_slots:
                left = self._evict_one((), tenant.spare, tenant.order, "quota")
                assert left, "nothing is in use yet"

    def _count_users(self, node: TierNode, change: int) -> None:
        before = node.busy
        node.busy += change
        assert node.busy >= 0
        if (before == 0) != (node.busy == 0):
            self._note_users([node], not before)

    def _note_users(self, nodes: Sequence[TierNode], used: bool) -> None:
        """Tell the policies that these nodes have become busy, or are not any more."""
        carriers = [node for node in nodes if node.carrier is not None]
        if carriers and self._quota_slots >= self.num_slots:
            (self.policy.pin_pages if used else self.policy.unpin_pages)([node.key for node in carriers])
        elif carriers:
            for node in carriers:
                for policy in self._find_policies(node.tenant):
                    (policy.pin_pages if used else policy.unpin_pages)([node.key])
        for node in nodes:
            if node.spare:
                self._set_spare(node, True)

    def _set_spare(self, node: TierNode, spare: bool) -> None:
        if not spare and not node.spare:
            return
        node.spare = spare
        for order in (self._spare, self._get_tenant(node.tenant).spare):
            if not spare or node.busy:
                order.pop(node.key, None)
            else:
                order[node.key] = None

    def _make_room(self, need: int, page: Page) -> bool:
        if need > self._quota_slots:
            return False
        stays, tenant = (page.key, page.parent), self._tenants.get(page.tenant)
        if tenant is not None and tenant.order is not None:
            while tenant.slots + need > self._quota_slots:
                if not self._evict_one(stays, tenant.spare, tenant.order, "quota"):
                    return False
        if len(self._free) < need:
            self.policy.adapt_capacity()
        while len(self._free) < need:
            if not self._evict_one(stays, self._spare, self.policy, "capacity"):
                return False
        return True

    def _evict_one(
        self, stays: Sequence[bytes | None], spare: Collection[bytes], policy: ChainPolicy, cause: str
    ) -> bool:
        """Make a spare copy leave, else a whole node; the page that is to come and its parent, `stays`, do not."""
        if spare and (key := next((key for key in spare if key not in stays[:1]), None)) is not None:
            leaving, cause = self._nodes[key].copies[-1:], "window"
        else:
            if (victims := policy.choose_victims(1, stays)) is None:
                return False
            leaving = self._nodes[victims[0]].copies
        for copy in leaving:
            self._remove_copy(copy, cause)
        return True

    def _remove_copy(self, copy: TierCopy, cause: str, *, lost: bool = False) -> None:
        page, count, state = copy.page, len(copy.slots), copy.state
        node = self._nodes[page.key]
        if page.group == self.primary:
            for policy in self._find_policies(page.tenant):
                policy.remove_page(page.key)
            node.carrier = None
        else:
            node.local = None
        if state is CopyState.READY:
            self.pages[page.group] -= 1
            self.evictions[cause] += 1
        tenant = self._get_tenant(page.tenant)
        tenant.slots -= count
        if not copy.saved:
            self.unsaved_slots -= count
        if node.pinned:
            self.pinned_slots -= count
        if users := copy.readers + (state is CopyState.WRITING):  # they no longer count for the node
            self._count_users(node, -users)
        if node.spare or node.local is not None:
            self._set_spare(node, node.carrier is None and node.local is not None)
        if node.carrier is node.local is None:
            del self._nodes[page.key]
            if not tenant.slots:
                del self._tenants[page.tenant]
        copy.change_state(CopyState.LOST if lost else CopyState.FREE)
        if lost:
            self._lost.add(copy)
        else:
            self._free.extend(copy.slots)
        self._on_evict(copy, cause)

    def inspect(self) -> IndexState:
        """Give the books, for tests that look for leaks. O(pages)."""
        nodes = self._nodes.values()
        return IndexState(
            slots={node.key: node.slots for node in nodes},
            users={node.key: node.busy - node.pinned for node in nodes if node.busy > node.pinned},
            pinned={node.key for node in nodes if node.pinned},
            lost_copies=len(self._lost),
            withheld_slots=self._coming,
        )

    def check_integrity(self) -> None:
        """Assert the invariant of this module and the counters."""
        copies = list(self.iterate_copies())
        slots = [slot for copy in (*copies, *self._lost) for slot in copy.slots] + list(self._free)
        assert len(slots) == len(set(slots)) == self.num_slots - self._coming, "a slot is lost or shared"
        assert all(c.state in (CopyState.WRITING, CopyState.READY) for c in copies), "a copy in the index has ended"
        assert all(c.state is CopyState.LOST for c in self._lost)
        for key, node in self._nodes.items():
            assert node.copies and node.key == key, "an empty node"
            working = sum(c.readers + (c.state is CopyState.WRITING) for c in node.copies)
            assert node.busy == working + node.pinned, "a node's users are miscounted"
            for policy in self._find_policies(node.tenant):
                assert (key in policy) == (node.carrier is not None), "policy and index disagree"
            assert node.carrier is not None or node.spare, "a copy can never leave"
            assert not node.spare or node.local is not None, "a spare node without a local copy"
            idle = node.spare and not node.busy
            assert idle == (key in self._spare) == (key in self._tenants[node.tenant].spare), "a spare copy is stuck"
        assert len(self.policy) == sum(n.carrier is not None for n in self._nodes.values())
        assert sum(len(tenant.spare) for tenant in self._tenants.values()) == len(self._spare)
        self.policy.check_integrity()
        ready, tenants = Counter(c.page.group for c in copies if c.ready), Counter[bytes]()
        for copy in copies:
            tenants[copy.page.tenant] += len(copy.slots)
        assert +self.pages == ready, "pages are miscounted"
        assert {tag: tenant.slots for tag, tenant in self._tenants.items()} == tenants, "tenants are miscounted"
        assert all(count <= self._quota_slots for count in tenants.values()), "a tenant passed its quota"
        assert self.unsaved_slots == sum(len(c.slots) for c in copies if not c.saved)
        pinned = [node for node in self._nodes.values() if node.pinned]
        assert self.pinned_slots == sum(node.slots for node in pinned) <= self._pin_slots, "pinned slots are miscounted"
        assert all(node.key in self._pins for node in pinned), "a pin without a session"
        for tenant in self._tenants.values():
            if tenant.order is not None:
                tenant.order.check_integrity()
