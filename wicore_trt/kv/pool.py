"""Pool of the device pages of one layer group: which slots are free, used or cached.

Slots are integers and keys are bytes; the tensors live in the executor. It must not know requests, or more of another
pool that shares its memory than `kv/slabs.py`. Invariant (I2) (`check_integrity`): every slot of the pool is in exactly
one of three states. Free: no references, no page. Used: references > 0. Cached: no references, indexed under its key.
The index names each key once, and all tokens of a page that it names are written.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

from wicore_trt.errors import UnwrittenPageError
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.policy import ChainPolicy
from wicore_trt.kv.slabs import Slabs


class PagePool:
    """Slots 0..num_pages-1 of one layer group, `page_tokens` tokens each, with reference counts and a key index.

    `slabs` is the memory that it takes its slots from as `group`, by default its own. In shared memory it has fewer
    slots at a time, and `make_room(count, leave)` evicts pages, also of others, until `count` slots are free.

    Cached slots are taken in the order of `policy`, or least recently released first without one; `spare` ones before
    all others. A sequence releases its pages tail first, so a chain's pages leave before their parents and the rest
    stays reachable. `on_evict` is called with a cached page and its slot just before the slot is taken."""

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        policy: ChainPolicy | None = None,
        on_evict: Callable[[Page, int], None] = lambda page, slot: None,
        *,
        slabs: Slabs | None = None,
        group: str = "",
    ) -> None:
        self.make_room: Callable[[int, int], None] = self._evict_coldest
        self._slabs = slabs if slabs is not None else Slabs(1, {group: num_pages})
        self._group = group
        self.page_tokens = page_tokens
        self.evictions = 0
        self.policy = policy
        self._on_evict = on_evict
        self.written = array("i", [0]) * num_pages
        """How many tokens of its page the holder of a slot has written; see `write_tokens`."""
        self._references = [0] * num_pages
        self.trusted = bytearray(num_pages)
        """By slot: whether a step that read its page had finite logits, since the page came there."""
        self.page_of: list[Page | None] = [None] * num_pages
        """By slot: the page that it was published as."""
        self._slot_of: dict[bytes, int] = {}
        self.find_slot: Callable[[bytes], int | None] = self._slot_of.get
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Cached slots that are not spare, in the order of their release, as are the spare ones."""
        self.spare: OrderedDict[int, None] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """Slots of slabs that are its own or nobody's."""
        return self._slabs.count_slots(self._group)

    @property
    def available_slots(self) -> int:
        """Slots that `allocate_slots` can hand out."""
        return self._slabs.available_slots(self._group)

    @property
    def cached_slots(self) -> int:
        return len(self.cached) + len(self.spare)

    @property
    def used_slots(self) -> int:
        return self._slabs.used_slots[self._group]

    def in_use(self, key: bytes) -> bool:
        """Say whether a sequence holds the page named `key`."""
        slot = self._slot_of.get(key)
        return slot is not None and self._references[slot] > 0

    def allocate_slots(self, count: int, leave: int = 0) -> list[int] | None:
        """Take `count` slots with one reference each, or return None and change nothing when there are not enough. In
        shared memory `leave` slabs besides stay without a used page."""
        if count > self.available_slots:
            return None
        self.make_room(count, leave)
        slots = self._slabs.take_slots(self._group, count)
        for slot in slots:
            self._references[slot] = 1
            self.written[slot] = self.trusted[slot] = 0
        return slots

    def acquire_slots(self, slots: Iterable[int]) -> None:
        """Add a reference to each of these used or cached slots."""
        pinned: list[bytes] = []
        for slot in slots:
            if self._references[slot] == 0:
                self._uncache(slot)
                self._slabs.pin_slot(self._group, slot)
                page = self.page_of[slot]
                if page is not None:
                    pinned.append(page.key)
            self._references[slot] += 1
        if self.policy is not None:
            self.policy.pin_pages(pinned)

    def is_cached(self, slot: int) -> bool:
        """Say whether a slot holds a page that nobody uses."""
        return slot in self.cached or slot in self.spare

    def write_tokens(self, slot: int, begin: int, end: int) -> None:
        """Note that a step of the slot's holder wrote tokens [begin, end) of its page. Raises UnwrittenPageError, and
        changes nothing, when tokens before `begin` were never written or the page is published."""
        written = self.written[slot]
        if begin > written or self.page_of[slot] is not None:
            state = f"has {written} tokens" if self.page_of[slot] is None else "is published"
            raise UnwrittenPageError(f"Tokens [{begin}, {end}) were written into a page that {state}.")
        if end > written:
            self.written[slot] = end

    def fill_slots(self, slots: Iterable[int], tokens: int) -> None:
        """Note that a verified load brought the first `tokens` tokens of each slot's page that is not published."""
        written, page_of = self.written, self.page_of
        for slot in slots:
            if page_of[slot] is None and written[slot] < tokens:
                written[slot] = tokens

    def check_full(self, slot: int, index: int) -> None:
        """Raise UnwrittenPageError unless all tokens of the slot's page, the index-th of its chain, are written."""
        if self.written[slot] != self.page_tokens:
            raise UnwrittenPageError(f"Page {index} was to be published with {self.written[slot]} tokens written.")

    def trust_page(self, slot: int) -> bool:
        """Note that a step that read this page had finite logits. False, and no change, if it is not published."""
        if self.page_of[slot] is None:
            return False
        self.trusted[slot] = 1
        return True

    def list_pages(self) -> list[Page]:
        return [page for page in self.page_of if page is not None]

    def publish_slots(self, slots: Sequence[int], pages: Sequence[Page]) -> dict[int, Page]:
        """Publish used slots as these pages, first pages of a chain first. Returns the newly findable ones, without
        keys held elsewhere and slots published before. Raises UnwrittenPageError, changing nothing, if tokens lack."""
        references, written, full = self._references, self.written, self.page_tokens
        for slot, page in zip(slots, pages, strict=True):
            assert references[slot] > 0, "only a used page can be published (I2)"
            if written[slot] != full:
                self.check_full(slot, page.index)
        found: dict[int, Page] = {}
        for slot, page in zip(slots, pages, strict=True):
            if page.key in self._slot_of or self.page_of[slot] is not None:
                continue
            self._slot_of[page.key] = slot
            self.page_of[slot] = found[slot] = page
        if self.policy is not None:  # hears of them run by run of a chain
            keys, parent, last = list[bytes](), None, None
            for page in found.values():
                if keys and page.parent != last:
                    self.policy.add_pages(keys, parent)
                    self.policy.pin_pages(keys)
                    keys = []
                if not keys:
                    parent = page.parent
                keys.append(last := page.key)
            self.policy.add_pages(keys, parent)
            self.policy.pin_pages(keys)
        return found

    def release_slots(self, slots: Iterable[int], *, keep: bool = True, spare: bool = False) -> None:
        """Drop one reference of each slot, in order; pass a chain's tail first. An unused slot becomes cached if it was
        published and `keep` is set, else free; `spare` ones leave first."""
        cached, unpinned = self.spare if spare else self.cached, []
        for slot in slots:
            assert self._references[slot] > 0, f"slot {slot} released twice"
            self._references[slot] -= 1
            if self._references[slot]:
                continue
            self._slabs.unpin_slot(self._group, slot)
            page = self.page_of[slot]
            if keep and page is not None:
                cached[slot] = None
                unpinned.append(page.key)
            else:
                self._unpublish(slot)
                self._slabs.return_slot(self._group, slot)
        if self.policy is not None:
            self.policy.unpin_pages(unpinned)

    def drop_page(self, key: bytes) -> None:
        """Free the cached slot of `key`, if there is one."""
        slot = self._slot_of.get(key)
        if slot is not None and not self._references[slot]:
            self._free_cached(slot)

    def condemn_page(self, key: bytes) -> int | None:
        """Make a page unfindable, even in use: its slot becomes free after its last user. Returns the slot."""
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        if self._references[slot]:
            self._unpublish(slot)
        else:
            self._free_cached(slot)
        return slot

    def make_spare(self, key: bytes) -> None:
        """Make a cached page leave before those that are not spare."""
        slot = self._slot_of.get(key)
        if slot is not None and slot in self.cached:
            del self.cached[slot]
            self.spare[slot] = None

    def list_coldest(self, count: int) -> list[int]:
        """List at most `count` cached slots in the order in which they would be taken."""
        if self.policy is None:
            return list(islice(chain(self.spare, self.cached), count))
        keys = self.policy.choose_victims(min(count, len(self.cached)))
        slots = [self._slot_of[key] for key in keys] if keys is not None else list(self.cached)  # type: ignore[index]
        return slots[:count]

    def evict_slot(self, slot: int) -> None:
        page = self.page_of[slot]
        assert page is not None
        self._on_evict(page, slot)
        self._free_cached(slot)
        self.evictions += 1

    def _evict_coldest(self, count: int, leave: int) -> None:
        # A cached page whose child is in use has no place in the policy's order; then the oldest go.
        for slot in self.list_coldest(max(0, count - self._slabs.free_slots(self._group))):
            self.evict_slot(slot)

    def _free_cached(self, slot: int) -> None:
        self._uncache(slot)
        self._unpublish(slot)
        self._slabs.return_slot(self._group, slot)

    def _uncache(self, slot: int) -> None:
        del (self.spare if slot in self.spare else self.cached)[slot]

    def _unpublish(self, slot: int) -> None:
        page = self.page_of[slot]
        if page is not None:
            del self._slot_of[page.key]
            self.page_of[slot] = None
            if self.policy is not None:
                self.policy.remove_page(page.key)

    def list_states(self) -> tuple[set[int], set[int]]:
        """List the used slots and the cached slots."""
        return {slot for slot, count in enumerate(self._references) if count > 0}, {*self.cached, *self.spare}

    def check_integrity(self) -> None:
        assert self.policy is None or not self.spare, "a policy orders all that is cached"
        used, cached = self.list_states()
        assert len(cached) == self.cached_slots, "a slot is cached twice"
        if len(self._slabs.pages) == 1:
            self._slabs.check_integrity({self._group: (used, cached)})
        pages = {slot for slot, page in enumerate(self.page_of) if page is not None}
        assert pages <= used | cached, "a free slot has a page"
        assert all(self.page_of[slot] is not None for slot in cached), "a cached slot has no page"
        assert all(self.written[slot] == self.page_tokens for slot in self._slot_of.values()), "an unwritten page (I2)"
        named = {page.key: slot for slot, page in enumerate(self.page_of) if page is not None}
        assert named == self._slot_of, "the index is wrong"
        assert len(named) == sum(page is not None for page in self.page_of), "a key is indexed twice"
        if self.policy is not None:
            assert len(self.policy) == len(named) and all(key in self.policy for key in named), "the policy is wrong"
            self.policy.check_integrity()
