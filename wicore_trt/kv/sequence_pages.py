"""Page tables of a sequence, the names of its pages, its loads and parked pages.

Plain data that the manager and the loader keep; it must not know pools or tiers. Invariant (I7): `keys` name a prefix
of the sequence's tokens, a table never has a slot before a page that slid out, and tables with the same `stamp` are the
same.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from wicore_trt.arithmetic import div_ceil
from wicore_trt.kv.pages.hashing import TenantNames
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.load import PrefixLoad
from wicore_trt.kv.tiers.moves import TierCopy
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import CacheHints

STAMPS = itertools.count(1)


@dataclass(slots=True)
class ParkedPages:
    """Pages that a preempted sequence goes on with: `tokens` are computed; `pages[group]` are the pages it needs, by
    index, and `copies` keeps them in host memory. `private` ones, by group and index, have names that no look-up can
    make: the last page may be partly filled, and pages that no step with finite logits has read are for this sequence
    alone. `expected` are the names of all that the manager was told to expect."""

    tokens: int
    pages: dict[str, dict[int, Page]] = field(default_factory=dict)
    private: set[tuple[str, int]] = field(default_factory=set)
    expected: list[bytes] = field(default_factory=list)
    copies: list[TierCopy] = field(default_factory=list)


def empty_tables() -> dict[str, array[int]]:
    """Empty page tables. They are arrays of C ints because each step copies all of them into its tensors."""
    return {GLOBAL: array("i"), LOCAL: array("i")}


@dataclass(slots=True)
class SequencePages:
    """Page tables of one sequence.

    `names` says what pages of whoever asks are called, and `marks` what content is in them (`mark_content`).
    `tables[group][i]` is the slot of page i, -1 where a local page slid out. `keys[i]` names page i, whose tokens are
    `blocks[i]`; `known` are identities, by group and index, that a tier has of pages which are being loaded.
    `published` pages are findable; of those the first `trusted` were read by a step of this sequence with finite
    logits, and the first `attached` were on the device when it came. `first_local` is the first page index still held
    in the local table. `resume_points` are page counts whose local windows stay cached when they slide out; `left` are
    slots of such pages, by index, that slid out before they were trusted.
    `failures` is the manager's count of failed steps when what this sequence holds was last known to be good. `load`
    brings the prefix up from lower tiers; `prefetch` brings what it will need from disk to host memory while it waits;
    `parked` is where the pages of a preempted sequence wait. `stamp` stands for
    what the tables hold: each change brings another number, so that who keeps it beside a copy of the tables knows by
    it alone whether the copy is good. Tables are changed by the methods here and nowhere else.
    """

    names: TenantNames
    hints: CacheHints = CacheHints()
    marks: Mapping[int, bytes] = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)
    known: dict[str, dict[int, Page]] = field(default_factory=lambda: {GLOBAL: {}, LOCAL: {}})
    blocks: list[bytes] = field(default_factory=list)
    tables: dict[str, array[int]] = field(default_factory=empty_tables)
    stamp: int = field(default_factory=STAMPS.__next__)
    published: int = 0
    trusted: int = 0
    attached: int = 0
    first_local: int = 0
    resume_points: set[int] = field(default_factory=set)
    left: dict[int, int] = field(default_factory=dict)
    failures: int = 0
    load: PrefixLoad | None = None
    prefetch: PrefixLoad | None = None
    parked: ParkedPages | None = None

    def extend_table(self, group: str, slots: Iterable[int]) -> None:
        """Put `slots` at the end of a table."""
        self.tables[group].extend(slots)
        self.stamp = next(STAMPS)

    def replace_slots(self, group: str, slots: Mapping[int, int]) -> None:
        """Put `slots` into a table, by page index, in place of those it has there."""
        table = self.tables[group]
        for i, slot in slots.items():
            table[i] = slot
        self.stamp = next(STAMPS)

    def cut_table(self, group: str, length: int) -> None:
        """Take from a table what is behind its first `length` pages."""
        del self.tables[group][length:]
        self.stamp = next(STAMPS)

    def clear_tables(self) -> None:
        """Empty tables in place of these."""
        self.tables, self.stamp = empty_tables(), next(STAMPS)

    def name_pages(self, tokens: Sequence[int]) -> None:
        """Give all full pages of `tokens` their names."""
        self.blocks += self.names.extend_keys(self.keys, tokens, self.marks)

    def make_page(self, group: str, index: int) -> Page:
        """The identity of a full page; its key must be there."""
        parent = self.keys[index - 1] if index else None
        return Page(self.keys[index], group, index, parent, self.names.tag, self.blocks[index])

    def make_pages(self, group: str, places: Iterable[int]) -> list[Page]:
        """Make the pages of these indices, or take those that a tier knows."""
        known = self.known[group].get
        return [known(i) or self.make_page(group, i) for i in places]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Longest usable cached prefix: `tokens` computed tokens; `reachable` pages have all their global KV.

    `in_flight`: the page after the hit is being computed by a running sequence; waiting for it saves the work.
    """

    tokens: int
    reachable: int
    in_flight: bool


class Windows:
    """Local pages of a chain that a later request can want: the window before each point where it may start.

    A point is a number of pages. `first_visible(n)` is the first page that a request looks at which starts behind `n`
    pages; a long prompt keeps a window every `checkpoint` pages.
    """

    def __init__(self, first_visible: Callable[[int], int], checkpoint: int) -> None:
        self._first_visible, self._checkpoint = first_visible, checkpoint

    def pages_before(self, points: Iterable[int], start: int = 0, stop: int = 1 << 62) -> set[int]:
        """Pages of [start, stop) in the windows before these points."""
        found: set[int] = set()
        for n in points:
            found.update(range(max(start, self._first_visible(n)), min(n, stop)))
        return found

    def checkpoint_pages(self, start: int, stop: int) -> set[int]:
        """Pages of [start, stop) in the window before their next checkpoint."""
        size = self._checkpoint
        found: set[int] = set()
        for end in range(div_ceil(start + 1, size) * size, stop + size, size):
            found.update(range(max(self._first_visible(end), end - size, start), min(end, stop)))
        return found

    def unwanted_pages(self, start: int, count: int, points: Iterable[int]) -> set[int]:
        """Pages from `start` on that nobody wants once there are `count` pages."""
        stop = self._first_visible(count)
        if stop <= start:
            return set()
        return set(range(start, stop)) - self.pages_before(points, start, stop) - self.checkpoint_pages(start, stop)
