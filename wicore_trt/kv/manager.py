"""Paged KV cache over layer groups: prefix look-up, page tables of sequences, windows, publication.

Plain data: slots, keys and token counts; it must not import torch. Invariant (I2, I3, I4): a hit of n tokens has every
global page up to n and every local page that position n looks at. A page is findable only when all its tokens were
written by steps of the sequence that publishes it, or by a verified load. A lower tier gets a page only after a step
with finite logits has read it. A page that a step with other logits read leaves all tiers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice

from wicore_trt.arithmetic import count_lone_pages, div_ceil, first_visible_page
from wicore_trt.kv.copy_down import CopyDown, WritePolicy
from wicore_trt.kv.events import Entry, KVEventLog
from wicore_trt.kv.memory import Memory, SharedMemory
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.a2cr import AttentionSignals
from wicore_trt.kv.policy.policy import ChainPolicy, LRUPolicy
from wicore_trt.kv.pool import PagePool
from wicore_trt.kv.sequence_pages import PrefixHit, SequencePages, Windows
from wicore_trt.kv.slabs import Slabs
from wicore_trt.kv.tiers.retention import Retention
from wicore_trt.kv.tiers.tiers import LowerTiers
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import CacheStore


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Options of the cache. `prefix_cache`: keep and find pages of other requests. `write_policy`: see `copy_down`.
    `checkpoint_tokens`: how often a long prompt keeps a local window on the device. `measure_attention`: keep measured
    attention mass for the policy. `slab_pages`: see `KVLayout`."""

    prefix_cache: bool = True
    checkpoint_tokens: int = 4096
    write_policy: WritePolicy = "through"
    measure_attention: bool = False
    slab_pages: Mapping[str, int] | None = None


class KVCacheManager:
    """Device pages of all layer groups of one engine. Global layers keep every page of a sequence. Local
    (sliding-window) layers hold only pages that the next token sees. Pages that slide out stay cached only around
    resume points, where a later request can start: end of prompt, branch points, every `checkpoint_tokens`.

    `num_pages` maps "global" and "local" to pool sizes, without a group that the model lacks. With `options.slab_pages`
    the groups share one memory, in which each could have so many pages: see `KVLayout`. `policy` orders evictions of
    the group that carries the chains; `events` gets every page that comes or goes; `retention` knows what clients want
    to keep. Full pages are copied down to `tiers`; `prefix/loader` brings them back."""

    def __init__(
        self,
        num_pages: dict[str, int],
        window: int,
        chain: KeyChain,
        *,
        options: CacheOptions | None = None,
        policy: ChainPolicy | None = None,
        tiers: LowerTiers | None = None,
        events: KVEventLog | None = None,
        retention: Retention | None = None,
    ) -> None:
        options = options or CacheOptions()
        self.chain_group = GLOBAL if GLOBAL in num_pages else LOCAL
        slabs = None
        if options.slab_pages is not None:
            slabs = Slabs(num_pages[GLOBAL] // options.slab_pages[GLOBAL], options.slab_pages)
            policy = policy if policy is not None else LRUPolicy(num_pages[GLOBAL])
        self.pools = {
            group: PagePool(
                count,
                chain.page_tokens,
                policy if group == GLOBAL else None,
                partial(self._on_evict, group),
                slabs=slabs,
                group=group,
            )
            for group, count in num_pages.items()
        }
        self.tiers = tiers
        self.events = events if events is not None else KVEventLog()
        self.events.snapshot_source = self.list_pages
        self.hit_tokens = 0
        self.retention = retention if retention is not None else Retention(600.0, time.monotonic)
        self.attention = AttentionSignals() if options.measure_attention else None
        self._policy = policy
        self.copies = CopyDown(self.pools, tiers, options.write_policy)
        self.window = window
        self.page_tokens = chain.page_tokens
        self.chain = chain
        first_of_window = cache(lambda n: self.first_visible_page(n * self.page_tokens))
        self.memory = Memory(self.pools)
        if slabs is not None and policy is not None:
            self.memory = SharedMemory(slabs, self.pools, policy, first_of_window)
        self._prefix_cache = options.prefix_cache
        checkpoint = max(1, options.checkpoint_tokens // chain.page_tokens)
        self._windows = Windows(first_of_window, checkpoint)
        self._computing: dict[bytes, SequencePages] = {}
        self._expected: dict[bytes, int] = {}  # pages that sequences wait for, and how many wait
        self.failures = 0
        """Failed steps so far. Each may have condemned pages that a sequence shares with others or loads."""

    def first_visible_page(self, position: int) -> int:
        """Index of the first local page that a query at `position` looks at (keys position-window+1..position)."""
        return first_visible_page(position, self.window, self.page_tokens)

    def count_pages(self, tokens: int) -> int:
        return div_ceil(tokens, self.page_tokens)

    def can_run(self, tokens: int, chunk: int) -> bool:
        """Say whether a lone sequence of `tokens`, in chunks of `chunk`, fits; with tiers, even beside a load."""
        loads = self.tiers is not None
        return self.memory.holds_alone(*count_lone_pages(tokens, self.window, chunk, self.page_tokens, loads=loads))

    def find_prefix(self, pages: SequencePages, tokens: Sequence[int]) -> PrefixHit:
        """Find the longest cached prefix that leaves a token of `tokens` to compute. Changes only `pages.keys`."""
        if not self._prefix_cache:
            return PrefixHit(0, 0, in_flight=False)
        pages.name_pages(tokens)
        limit = min(len(pages.keys), (len(tokens) - 1) // self.page_tokens)
        reachable, found = limit, list[int | None]()
        if GLOBAL in self.pools:
            slots = enumerate(map(self.pools[GLOBAL].find_slot, pages.keys[:limit]))
            reachable = next((i for i, slot in slots if slot is None), limit)
        if LOCAL in self.pools:
            found = list(map(self.pools[LOCAL].find_slot, pages.keys[:reachable]))
        best = self.find_longest_window(pages, reachable, found)
        following = best + 1  # the first start behind the hit
        while following in pages.barred:
            following += 1
        in_flight = following <= limit and pages.keys[following - 1] in self._computing
        return PrefixHit(best * self.page_tokens, reachable, in_flight)

    def find_longest_window(self, pages: SequencePages, reachable: int, found: Sequence[object]) -> int:
        """Find the largest start n <= reachable with all local pages of the window before it. `found[i]` is None where
        local page i is not to be had."""
        n = pages.find_start(reachable)
        while n > 0 and LOCAL in self.pools:
            first = self.first_visible_page(n * self.page_tokens)
            gap = next((i for i in range(n - 1, first - 1, -1) if found[i] is None), None)
            if gap is None:
                break
            n = gap  # every longer window has this gap too
            while n > 0 and found[n - 1] is None:
                n -= 1
            n = pages.find_start(n)
        return n

    def attach_prefix(self, pages: SequencePages, hit: PrefixHit, prompt_tokens: int) -> None:
        """Take references on the pages of a hit found just before, as the start of an empty sequence."""
        count = hit.tokens // self.page_tokens
        first = self.first_visible_page(hit.tokens)
        for group, pool in self.pools.items():
            start = first if group == LOCAL else 0
            slots = [slot for slot in map(pool.find_slot, pages.keys[start:count]) if slot is not None]
            assert len(slots) == max(0, count - start), "a hit was attached after its pages left (I2)"
            pool.acquire_slots(slots)
            pages.extend_table(group, [-1] * start + slots)
        pages.first_local = first
        pages.published = pages.attached = count
        pages.failures = self.failures
        # The next request with this prompt, and one that leaves it where this one did, start at these points.
        ends = {prompt_tokens // self.page_tokens, (prompt_tokens - 1) // self.page_tokens}
        pages.resume_points.update(map(pages.find_start, ends | {hit.reachable}))

    def touch_chain(self, pages: SequencePages, hit_tokens: int) -> None:
        """Tell the policies of all tiers, once per request, that it looked up this chain; count its device hit."""
        self.hit_tokens += hit_tokens
        self.memory.revive_chain(pages.keys)
        signal = self.attention.take_signal(pages.keys) if self.attention is not None else None
        if self._policy is not None:
            self._policy.touch_chain(pages.keys, signal)
        if self.tiers is not None:
            self.tiers.touch_chain(pages.keys, signal)
        self.retention.renew_ends(pages.keys, pages.hints, pages.names.scope)

    def close(self, timeout_s: float) -> None:
        """Close the tiers, giving pages on their way at most `timeout_s` seconds to arrive."""
        if self.tiers is not None:
            self.copies.begin_copies(all_due=True)
            self.tiers.close(timeout_s)

    def prepare_step(self) -> None:
        """Do the housekeeping that the next step needs, as the device waits: apply what came up, drop expired pages."""
        if self.tiers is not None:
            self.tiers.poll_up()
        for key in self.retention.take_due(self.retention.clock(), self._in_use):
            self.drop_page(key, "expired")

    def work_beside_step(self, tokens: int) -> None:
        """Do the rest of the housekeeping, beside a step of `tokens`: apply what went down, copy pages down."""
        if self.tiers is not None:
            self.tiers.poll_down(tokens)
            self.copies.begin_copies(tokens)

    def _in_use(self, key: bytes) -> bool:
        """Say whether a page cannot be dropped now: a sequence holds or expects it, or it moves to a tier."""
        return (
            key in self._expected
            or any(pool.in_use(key) for pool in self.pools.values())
            or (self.tiers is not None and any(self.tiers.is_writing(group, key) for group in self.pools))
        )

    def _shares_pages(self, pages: SequencePages) -> bool:
        """Say whether others may find the pages that a sequence makes."""
        return self._prefix_cache and pages.hints.store is not CacheStore.NEVER

    def announce_pages(self, pages: SequencePages) -> None:
        """Announce that a sequence computes its unpublished prompt pages, so that equal requests wait for them."""
        for key in pages.keys[pages.published :] if self._shares_pages(pages) else ():
            self._computing.setdefault(key, pages)

    def expect_pages(self, keys: Iterable[bytes]) -> None:
        """Note that a sequence waits for these pages: their TTL does not end before `stop_expecting`."""
        for key in keys:
            self._expected[key] = self._expected.get(key, 0) + 1

    def stop_expecting(self, keys: Iterable[bytes]) -> None:
        """Undo one `expect_pages` of the same keys."""
        for key in keys:
            count = self._expected.pop(key, 0) - 1
            if count:
                self._expected[key] = count

    def reserve_pages(self, pages: SequencePages, tokens: int, *, total: int = 0, spare: int = 0) -> bool:
        """Extend the tables to hold positions below `tokens`; the global one below `total` if that is more. False, and
        no change, when a pool would have fewer than `spare` available slots left."""
        count, whole, tables = self.count_pages(tokens), self.count_pages(max(tokens, total)), pages.tables
        if len(tables[LOCAL]) >= count and len(tables[GLOBAL]) >= whole:
            return True
        need = {GLOBAL: whole, LOCAL: count}
        return self.extend_tables([(pages, need)], spare)

    def extend_tables(self, wanted: Sequence[tuple[SequencePages, Mapping[str, int]]], spare: int = 0) -> bool:
        """Extend several sequences' tables to so many pages by group. False, changing nothing, unless all and `spare`
        fit."""
        need: dict[str, int] = {}
        for group in self.pools:
            for pages, counts in wanted:
                if (lacking := counts[group] - len(pages.tables[group])) > 0:
                    need[group] = need.get(group, 0) + lacking
        if spare and not self.memory.can_allocate({group: count + spare for group, count in need.items()}):
            return False
        found = self.memory.allocate_slots(need)
        for group, slots in (found or {}).items():
            left = iter(slots)
            for pages, counts in wanted:
                if (lacking := counts[group] - len(pages.tables[group])) > 0:
                    pages.extend_table(group, islice(left, lacking))
        return found is not None

    def commit_tokens(self, pages: SequencePages, tokens: Sequence[int], begin: int, end: int, *, finite: bool) -> None:
        """Record that a step wrote positions [begin, end): publish full pages, let local pages slide out. `finite`
        logits vouch for all pages that it read. Raises UnwrittenPageError when positions before `begin` were never
        written."""
        size, tables, full = self.page_tokens, pages.tables, end // self.page_tokens
        index, start, left = begin // size, begin % size, end - begin
        while left > 0:
            stop = start + left if start + left < size else size
            for group, pool in self.pools.items():
                if (slot := tables[group][index]) >= 0:
                    pool.write_tokens(slot, start, stop)
            index, start, left = index + 1, 0, left - stop + start
        if finite:
            pages.failures = self.failures
        # after another sequence's failed step, these pages may derive from a page condemned then
        if full > pages.published and self._shares_pages(pages) and pages.failures == self.failures:
            pages.name_pages(tokens)
            # without local pages that slide out now
            gone = self._windows.unwanted_pages(pages.published, full, pages.resume_points)
            for group, pool in self.pools.items():
                table, places = tables[group], range(pages.published, full)
                passing = gone if group == LOCAL != self.chain_group else ()
                for i in passing:
                    if i < full and table[i] >= 0:
                        pool.check_full(table[i], i)
                self.publish_pages(pages, group, [i for i in places if table[i] >= 0 and i not in passing])
            self.retention.begin_ends(pages.keys[pages.published : full], pages.hints)
            self.stop_computing(pages, pages.keys[pages.published : full])
            pages.published = full
        if pages.load is not None:
            pages.load.floor = self.count_pages(end)
        if finite and (pages.trusted != pages.published or pages.left):
            self._trust_pages(pages)
        if full > begin // size:  # keep the window of a request that starts at the last full page, too
            self.slide_window(pages, full * size)

    def publish_pages(self, pages: SequencePages, group: str, places: Sequence[int], *, saved: bool = False) -> None:
        """Publish full pages that no other slot holds; `saved` if a lower tier has them. Raises UnwrittenPageError."""
        table, pool = pages.tables[group], self.pools[group]
        found = pool.publish_slots([table[i] for i in places], pages.make_pages(group, places))
        if self.tiers is not None and not saved:
            (self.copies.kept if pages.hints.stays_on_device else self.copies.unsaved)[group].update(found)
        self.events.append_stored("device", *found.values())

    def _trust_pages(self, pages: SequencePages) -> None:
        """Trust the pages of a sequence that a step with finite logits has read: they may be copied down."""
        stays = pages.hints.stays_on_device
        for group, pool in self.pools.items():
            table = pages.tables[group]
            for i in range(pages.trusted, pages.published):
                slot = table[i]
                if slot < 0 or not pool.trust_page(slot) or stays:
                    continue
                if i < pages.attached:
                    self.copies.release_kept(group, slot)
                    self.copies.request_copy(group, slot, "selective")
                if group == self.chain_group and slot in self.copies.unsaved[group]:
                    self.copies.request_copy(group, slot, "through")
        durable = self._windows.pages_before(pages.resume_points) if pages.left else ()
        for i, slot in pages.left.items():
            page = self.pools[LOCAL].page_of[slot]
            if page is not None and page.key == pages.keys[i]:
                self.pools[LOCAL].trust_page(slot)
                if not stays and i in durable:
                    self.copies.request_copy(LOCAL, slot, "through")
        pages.left.clear()
        pages.trusted = pages.published

    def _on_evict(self, group: str, page: Page, slot: int) -> None:
        self.copies.copy_evicted(group, page, slot)
        self.events.append_removed("device", group, page.key, "capacity")

    def slide_window(self, pages: SequencePages, position: int) -> bool:
        """Drop the local pages that no token from `position` on looks at; return whether there were any."""
        first = min(self.first_visible_page(position), len(pages.tables[LOCAL]))
        if LOCAL not in self.pools or first <= pages.first_local:
            return False
        self._drop_local_pages(pages, pages.first_local, first)
        pages.first_local = first
        return True

    def _drop_local_pages(self, pages: SequencePages, start: int, stop: int) -> None:
        """Take the local pages [start, stop) out of the table, last one first."""
        table, pool, windows = pages.tables[LOCAL], self.pools[LOCAL], self._windows
        durable = windows.pages_before(pages.resume_points, start, stop)
        checkpoints = windows.checkpoint_pages(start, stop)
        gone: dict[int, int] = {}
        for i in range(stop - 1, start - 1, -1):
            if table[i] < 0:
                continue
            slot = gone[i] = table[i]
            if i not in durable and i not in checkpoints:
                self._release_slots(LOCAL, [slot], keep=False)
                continue
            if i < pages.published:
                if not pool.trusted[slot]:
                    pages.left[i] = slot
                elif i in durable and not pages.hints.stays_on_device:
                    self.copies.request_copy(LOCAL, slot, "through")
            # spare, as few requests start at a checkpoint: those windows must not crowd out the windows at ends
            self._release_slots(LOCAL, [slot], keep=True, spare=i not in durable)
        pages.replace_slots(LOCAL, dict.fromkeys(gone, -1))

    def replace_window(self, pages: SequencePages, first: int, slots: Sequence[int]) -> None:
        """Replace all that the local table holds by `slots`, as pages first, first + 1, ..."""
        self._drop_local_pages(pages, pages.first_local, len(pages.tables[LOCAL]))
        pages.set_window(first, slots)
        pages.trusted = min(pages.trusted, first)

    def _release_slots(self, group: str, slots: list[int], *, keep: bool, spare: bool = False) -> None:
        pool = self.pools[group]
        before = [] if keep else [pool.page_of[slot] for slot in slots]
        pool.release_slots(slots, keep=keep, spare=spare)
        if keep:
            self.memory.spare_orphans(group, slots)
        else:
            for slot, page in zip(slots, before, strict=True):
                if page is not None and pool.page_of[slot] is None:
                    self.copies.forget_slot(group, slot)
                    self.events.append_removed("device", group, page.key, "released")

    def free_pages(self, pages: SequencePages) -> None:
        """Release all slots of a sequence and empty its tables; published pages stay cached."""
        self.stop_computing(pages, pages.keys[pages.published :])
        for group in self.pools:
            self._release_slots(group, [slot for slot in reversed(pages.tables[group]) if slot >= 0], keep=True)
        pages.clear_tables()
        pages.published = pages.trusted = pages.attached = pages.first_local = 0
        pages.left.clear()

    def condemn_pages(self, pages: SequencePages) -> None:
        """Forget the pages of a sequence whose step had logits that are not finite: any page that it read may be why.
        No tier keeps them, nor the device a page that no other step has vouched for, which may be computed from them.
        Sequences that share them publish nothing until a step of theirs has finite logits, and give up their loads."""
        self.failures += 1
        for group, pool in self.pools.items():
            doubtful = {p.key for p, trusted in zip(pool.page_of, pool.trusted, strict=True) if p and not trusted}
            for key in doubtful.union(pages.keys[: pages.published]):
                slot = pool.condemn_page(key)
                if slot is not None:
                    self.copies.forget_slot(group, slot)
                    self.events.append_removed("device", group, key, "failed")
        if self.tiers is not None:
            for key in pages.keys[: pages.published]:
                self.tiers.condemn_page(key, "failed")

    def end_request(self, pages: SequencePages, prompt_tokens: int, found_tokens: int) -> None:
        """Note that a request ended, its pages still held: the next starts there. `found_tokens` had been cached."""
        indexes = [] if self.tiers is None else list(self.tiers.indexes.values())
        keys, found = pages.keys[: pages.published], found_tokens // self.page_tokens
        self.retention.end_request(keys, pages.hints, pages.names.scope, indexes, found=found)
        answer = max(0, pages.published * self.page_tokens - prompt_tokens)  # known to the page
        if self._policy is not None:
            self._policy.note_answer(keys, answer)
        for index in indexes:
            index.policy.note_answer(keys, answer)
        if LOCAL not in self.pools or pages.load:
            return
        # Windows of earlier turns are behind us, except where other conversations branch off.
        ends = set(map(pages.find_start, (pages.published, (prompt_tokens - 1) // self.page_tokens)))
        self.memory.spare_windows(keys, self._windows.pages_before(ends))
        if self.tiers is None or pages.hints.stays_on_device:
            return
        for i in range(pages.first_local, min(pages.published, len(pages.tables[LOCAL]))):
            self.copies.request_copy(LOCAL, pages.tables[LOCAL][i], "through")
        if self.chain_group == GLOBAL:
            for index in indexes:
                ends.update(i + 1 for i in index.policy.find_branches(keys))
            self.tiers.spare_windows(LOCAL, keys, self._windows.pages_before(ends))

    def drop_page(self, key: bytes, cause: str) -> None:
        """Drop a page in every tier; on the device, unless it is in use."""
        for group, pool in self.pools.items():
            slot = pool.find_slot(key)
            pool.drop_page(key)
            if slot is not None and pool.find_slot(key) is None:
                self.copies.forget_slot(group, slot)
                self.events.append_removed("device", group, key, cause)
        if self.tiers is not None:
            self.tiers.drop_page(key, cause)

    def list_pages(self) -> Iterable[Entry]:
        """Yield every page that can be found, with its tier."""
        for pool in self.pools.values():
            yield from (("device", page) for page in pool.list_pages())
        if self.tiers is not None:
            for name, index in self.tiers.indexes.items():
                yield from ((name, copy.page) for copy in index.iterate_copies() if copy.ready and copy.found)

    def stop_computing(self, pages: SequencePages, keys: Iterable[bytes]) -> None:
        """Undo `announce_pages` for some keys of a sequence."""
        computing = self._computing
        for key in keys:
            if computing.get(key) is pages:
                del computing[key]

    def check_integrity(self) -> None:
        self.memory.check_integrity()
        self.copies.check_integrity()
        assert all(count > 0 for count in self._expected.values()), "pages are waited for less than not at all"
        if self.tiers is not None:
            self.tiers.check_integrity()
