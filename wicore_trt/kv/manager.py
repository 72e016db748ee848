"""The paged KV cache over layer groups: prefix look-up, page tables of sequences, windows, publication.

Decides on plain data and imports no torch: slots, keys and token counts. Global layers keep every page of a sequence.
Local (sliding-window) layers hold only the pages that the next token can still see; those that slide out stay
cached only around resume points (end of prompt, branch points, every `checkpoint_tokens`), where a later request can
start. Invariant: a hit of n tokens has every global page up to n and every local page that position n looks at, and
a page is findable only after the step that filled it has run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from wicore_trt.kv.hashing import KeyChain
from wicore_trt.kv.pool import PagePool

GLOBAL = "global"
LOCAL = "local"


def _tables() -> dict[str, array[int]]:
    """Empty page tables. They are arrays of C ints because each step copies all of them into its tensors."""
    return {GLOBAL: array("i"), LOCAL: array("i")}


@dataclass(slots=True)
class SequencePages:
    """Page tables of one sequence.

    `tables[group][i]` is the slot of page i, -1 where a local page slid out. `keys[i]` names page i. `published`
    pages are findable. `first_local` is the first page index still held in the local table. `resume_points` are
    page counts whose local windows stay cached when they slide out.
    """

    salt: str
    keys: list[bytes] = field(default_factory=list)
    tables: dict[str, array[int]] = field(default_factory=_tables)
    published: int = 0
    first_local: int = 0
    resume_points: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Longest usable cached prefix: `tokens` computed tokens; `reachable` pages have all their global KV.

    `in_flight`: the page after the hit is being computed by a running sequence; waiting for it saves the work.
    """

    tokens: int
    reachable: int
    in_flight: bool


class KVCacheManager:
    """Device pages of all layer groups of one engine.

    `num_pages` maps "global" and "local" to pool sizes (a model without layers of a kind has no entry for it).
    """

    def __init__(
        self,
        num_pages: dict[str, int],
        window: int,
        chain: KeyChain,
        *,
        prefix_cache: bool = True,
        checkpoint_tokens: int = 4096,
    ) -> None:
        self.pools = {group: PagePool(count) for group, count in num_pages.items()}
        self.window = window
        self.page_tokens = chain.page_tokens
        self._chain = chain
        self._prefix_cache = prefix_cache
        self._checkpoint_pages = max(1, checkpoint_tokens // chain.page_tokens)
        self._computing: dict[bytes, int] = {}

    def first_visible_page(self, position: int) -> int:
        """Index of the first local page that a query at `position` looks at (keys position-window+1..position)."""
        return max(0, position - self.window + 1) // self.page_tokens

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def fits(self, tokens: int, chunk: int) -> bool:
        """Whether a lone sequence of `tokens`, computed `chunk` tokens at a time, fits the empty pools."""
        local = self.pages_for(min(tokens, self.window + chunk)) + 1
        need = {GLOBAL: self.pages_for(tokens), LOCAL: min(local, self.pages_for(tokens))}
        return all(need[group] <= pool.num_pages for group, pool in self.pools.items())

    def lookup(self, pages: SequencePages, tokens: Sequence[int]) -> PrefixHit:
        """Find the longest cached prefix that leaves at least one token of `tokens` to compute. Changes nothing but
        `pages.keys`."""
        if not self._prefix_cache:
            return PrefixHit(0, 0, in_flight=False)
        self._chain.extend(pages.keys, tokens, pages.salt)
        limit = min(len(pages.keys), (len(tokens) - 1) // self.page_tokens)
        reachable = limit
        if GLOBAL in self.pools:
            found = self.pools[GLOBAL].find
            reachable = next((i for i in range(limit) if found(pages.keys[i]) is None), limit)
        best = self._longest_window(pages.keys, reachable)
        in_flight = best < limit and pages.keys[best] in self._computing
        return PrefixHit(best * self.page_tokens, reachable, in_flight)

    def _longest_window(self, keys: list[bytes], reachable: int) -> int:
        """Largest n <= reachable whose local window is cached."""
        if LOCAL not in self.pools:
            return reachable
        found, n = self.pools[LOCAL].find, reachable
        while n > 0:
            first = self.first_visible_page(n * self.page_tokens)
            gap = next((i for i in range(n - 1, first - 1, -1) if found(keys[i]) is None), None)
            if gap is None:
                break
            n = gap  # every longer window has this gap too
        return n

    def attach(self, pages: SequencePages, hit: PrefixHit, prompt_tokens: int) -> None:
        """Take references on the pages of a hit found just before, as the start of an empty sequence."""
        count = hit.tokens // self.page_tokens
        first = self.first_visible_page(hit.tokens)
        for group, pool in self.pools.items():
            start = first if group == LOCAL else 0
            slots = [pool.find(key) for key in pages.keys[start:count]]
            table = pages.tables[group]
            table.extend([-1] * start)
            for slot in slots:
                assert slot is not None, "a hit was attached after its pages left"
                pool.acquire(slot)
                table.append(slot)
        pages.first_local = first
        pages.published = count
        # The next request with this prompt, and one that leaves it where this one did, start at these points.
        ends = {prompt_tokens // self.page_tokens, (prompt_tokens - 1) // self.page_tokens}
        pages.resume_points.update(ends | {hit.reachable})

    def announce(self, pages: SequencePages, owner: int) -> None:
        """Say that `owner` is computing the unpublished prompt pages, so that equal requests wait for them."""
        for key in pages.keys[pages.published :]:
            self._computing.setdefault(key, owner)

    def reserve(self, pages: SequencePages, tokens: int, *, total: int = 0, spare: int = 0) -> bool:
        """Extend the tables to hold positions below `tokens`, the global one below `total` if that is more.

        False, and no change, when that would leave a pool with fewer than `spare` available slots.
        """
        count = {GLOBAL: self.pages_for(max(tokens, total)), LOCAL: self.pages_for(tokens)}
        missing = {group: count[group] - len(pages.tables[group]) for group in self.pools}
        if any(missing[group] > 0 and missing[group] + spare > pool.available for group, pool in self.pools.items()):
            return False
        for group, pool in self.pools.items():
            if missing[group] > 0:
                slots = pool.allocate(missing[group])
                assert slots is not None
                pages.tables[group].extend(slots)
        return True

    def commit(self, pages: SequencePages, tokens: Sequence[int], computed: int, owner: int) -> None:
        """Record that positions below `computed` are written: publish full pages, let local pages slide out."""
        full = computed // self.page_tokens
        if self._prefix_cache and full > pages.published:
            self._chain.extend(pages.keys, tokens, pages.salt)
            for i in range(pages.published, full):
                for group, pool in self.pools.items():
                    slot = pages.tables[group][i]
                    if slot >= 0:
                        pool.publish(slot, pages.keys[i])
                self._done_computing(pages.keys[i], owner)
            pages.published = full
        self._slide(pages, computed)

    def _slide(self, pages: SequencePages, computed: int) -> None:
        if LOCAL not in self.pools:
            return
        first, table = self.first_visible_page(computed), pages.tables[LOCAL]
        for i in range(min(first, len(table)) - 1, pages.first_local - 1, -1):
            if table[i] >= 0:
                self.pools[LOCAL].release([table[i]], keep=self._near_resume_point(pages, i))
                table[i] = -1
        pages.first_local = max(pages.first_local, min(first, len(table)))

    def _near_resume_point(self, pages: SequencePages, page: int) -> bool:
        """Whether local page `page` lies in the window of a point where a later request may start."""
        points = set(pages.resume_points)
        points.add(-(-(page + 1) // self._checkpoint_pages) * self._checkpoint_pages)
        return any(self.first_visible_page(n * self.page_tokens) <= page < n for n in points)

    def free(self, pages: SequencePages, owner: int, *, keep: bool = True) -> None:
        """Release everything the sequence holds; published pages stay cached if `keep`. The tables become empty."""
        for key in pages.keys[pages.published :]:
            self._done_computing(key, owner)
        for group, pool in self.pools.items():
            pool.release([slot for slot in reversed(pages.tables[group]) if slot >= 0], keep=keep)
        pages.tables = _tables()
        pages.published = pages.first_local = 0

    def clear(self) -> None:
        """Forget all cached pages; those in use stay."""
        for pool in self.pools.values():
            pool.clear()

    def _done_computing(self, key: bytes, owner: int) -> None:
        if self._computing.get(key) == owner:
            del self._computing[key]

    def check_integrity(self) -> None:
        """Assert the pools' invariants."""
        for pool in self.pools.values():
            pool.check_integrity()
