"""Page tables of a sequence, the keys of its pages, its loads and parked pages.

Plain data that the manager and the loader keep; it must not know pools or tiers. Invariant (I7): `keys` name a prefix
of the sequence's tokens, no table has a slot before a page that slid out, and tables of one `stamp` are equal.
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
from wicore_trt.types import CacheHints, ContentSpan

STAMPS = itertools.count(1)


@dataclass(slots=True)
class ParkedPages:
    """Parked pages with which a preempted sequence goes on; `tokens` are computed. `pages[group]` are the needed pages
    by index, and `copies` keeps them in host memory. `private` ones, by group and index, have names that no look-up can
    make: a last page may be partly filled, and untrusted pages are its own. `expected` keys have a TTL that waits."""

    tokens: int
    pages: dict[str, dict[int, Page]] = field(default_factory=dict)
    private: set[tuple[str, int]] = field(default_factory=set)
    expected: list[bytes] = field(default_factory=list)
    copies: list[TierCopy] = field(default_factory=list)


def empty_tables() -> dict[str, array[int]]:
    """Make empty page tables: arrays of C ints, because each step copies all of them into its tensors."""
    return {GLOBAL: array("i"), LOCAL: array("i")}


@dataclass(slots=True)
class SequencePages:
    """Page tables of one sequence; only the methods here change them.

    - `names`: makes the page keys of its tenant and salt; `marks`: content that token ids do not tell (`mark_content`)
    - `barred`: page counts behind which nothing starts, as they end inside an image (`bar_pages`)
    - `tables[group][i]`: slot of page i, -1 where a local page slid out; `first_local`: first page of the local table
    - `stamp`: changes with the tables, so that a copy of them with the same stamp is good
    - `keys[i]`: key of page i, whose token bytes are `blocks[i]`
    - `known`: identities, by group and index, that a tier has of pages being loaded
    - `published` pages are findable; the first `trusted` of them were read by a step of this sequence with finite
      logits, and the first `attached` were on the device when it came
    - `resume_points`: page counts whose local windows stay cached when they slide out; `left`: untrusted slots
    - `failures`: the manager's count of failed steps when this sequence's pages were last known to be good
    - `load` brings the prefix up from lower tiers; `prefetch` brings it from disk to host memory while the sequence
      waits; `parked` keeps the pages of a preempted sequence"""

    names: TenantNames
    hints: CacheHints = CacheHints()
    marks: Mapping[int, bytes] = field(default_factory=dict)
    barred: frozenset[int] = frozenset()
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
        self.tables[group].extend(slots)
        self.stamp = next(STAMPS)

    def replace_slots(self, group: str, slots: Mapping[int, int]) -> None:
        table = self.tables[group]
        for i, slot in slots.items():
            table[i] = slot
        self.stamp = next(STAMPS)

    def set_window(self, first: int, slots: Iterable[int]) -> None:
        """Make the local table hold these slots, as pages first, first + 1, ..., and nothing else."""
        self.tables[LOCAL][:] = array("i", [*[-1] * first, *slots])
        self.first_local, self.stamp = first, next(STAMPS)

    def clear_tables(self) -> None:
        self.tables, self.stamp = empty_tables(), next(STAMPS)

    def find_start(self, count: int) -> int:
        """Find the largest page count up to `count` behind which a sequence may start or go on."""
        while count in self.barred:
            count -= 1
        return count

    def name_pages(self, tokens: Sequence[int]) -> None:
        """Make the keys of all full pages of `tokens`."""
        self.blocks += self.names.extend_keys(self.keys, tokens, self.marks)

    def make_page(self, group: str, index: int) -> Page:
        """Make the identity of a full page, whose key must be there."""
        parent = self.keys[index - 1] if index else None
        return Page(self.keys[index], group, index, parent, self.names.tag, self.blocks[index])

    def make_pages(self, group: str, places: Iterable[int]) -> list[Page]:
        """Make the pages of these indices, or take those that a tier knows."""
        known = self.known[group].get
        return [known(i) or self.make_page(group, i) for i in places]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Prefix that is cached and usable, the longest: `tokens` are computed; the first `reachable` pages have all global
    KV. `in_flight`: a running sequence computes the page after the hit; waiting for it saves the work."""

    tokens: int
    reachable: int
    in_flight: bool


def bar_pages(content: Iterable[ContentSpan], page_tokens: int) -> frozenset[int]:
    """List page counts that end strictly inside an image, whose tokens are computed together."""
    images = [span for span in content if span.pixels]
    return frozenset(n for s in images for n in range(s.begin // page_tokens + 1, (s.end - 1) // page_tokens + 1))


class Windows:
    """Windows of local pages that later requests may want, before the points where they start. A request that starts
    behind `n` pages sees them from `first_visible(n)` on; a long prompt keeps a window every `checkpoint` pages."""

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
