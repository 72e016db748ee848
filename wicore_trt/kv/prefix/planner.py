"""Planner of compute or load: which part of a prefix to fetch from lower tiers, and which to compute meanwhile.

Pages are loaded from back to front, windows first, while the device computes from the front. Where both meet, the
sequence jumps to the resume point. Wrong rates move the meeting point and break nothing. Must not know clocks or
threads. Invariant (I18): a load delays the first token by at most wait_s and one step of others (`decide_move`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from wicore_trt.kv.prefix.rates import ComputeRate, TierRate

DEVICE, HOST, READING, DISK = "device", "host", "reading", "disk"
"""Where a page is. READING: the disk was asked for it, so that its bytes are among those queued there."""

MARGIN = 0.05
"""A load must be predicted to save this share of the recompute time; less is not worth the reads."""
SPLIT_MARGIN = 0.1
"""Share of a load from host memory that computing a part must save: other sequences need the device too."""
FAST_LOAD = 0.2
"""Share of the time to compute below which a load from disk is awaited, while no other sequence computes."""
BAND = 0.35
"""How much faster than predicted a load may be: a split requests more pages than it expects to need."""
CAUTION = 1.1
"""In the choice among resume points loads count as this much slower: of two that are as good, the surer one."""
SLOWER = 1.15
"""Where steps beside a load from disk take so many times as long as without, the load must be worth that."""
NEVER = 1 << 30
"""A meeting point behind every prompt: never reached."""
WAIT_SHARE = 0.24
"""Part of the predicted saving that may be lost by waiting, one slice at most, for a load that should be there."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Resume point in the lower tiers: the first `tokens` tokens can be had without computing. `global_pages[i]` is the
    tier of the page with tokens [first + i * page_tokens, ...) of all global layers, `first` being the choice's start
    rounded down to a page. Entries past `tokens` are ignored, so candidates can share a list. `page_bytes` counts all
    global layers, `window_bytes` the windows before `tokens` by tier. Pages on the device are free."""

    tokens: int
    global_pages: Sequence[str]
    page_tokens: int
    page_bytes: int
    window_bytes: Mapping[str, int] = field(default_factory=dict)

    def reads_disk(self) -> bool:
        return any(tier in self.global_pages or tier in self.window_bytes for tier in (READING, DISK))

    @property
    def bytes_from_disk(self) -> int:
        """Bytes on disk that nobody asked for."""
        return self.page_bytes * self.global_pages.count(DISK) + self.window_bytes.get(DISK, 0)


Decision = Literal["compute", "load", "split"]


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """Choice between computing and loading. Without a load `stop` is 0. Times are seconds from now to the first token.

    - `start`: pages [start, stop) of the global layers and the windows of `stop` are requested
    - `meet`: token up to which the device should compute meanwhile; load-only: meet = start = what is on the device
    - `early`: the same, if the load is faster than expected by BAND
    - `load_seconds`: the load alone, from `meet`
    - `wait_s`: the longest that the sequence may idle
    - `longest_s`: the longest that idling and computing may take until `stop`, while that spares others
    - `arrives_s`: expected time until a load arrives that is awaited to spare others
    - `slice_tokens`: as in ComputeRate"""

    stop: int
    start: int
    seconds: float
    compute_seconds: float
    decision: Decision
    meet: int = 0
    load_seconds: float = 0.0
    wait_s: float = 0.0
    slice_tokens: int = 256
    early: int = 0
    longest_s: float = 0.0
    arrives_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NextMove:
    """Next move of a sequence with a load. "jump": computed = choice.stop. "drop": the load is useless now."""

    action: Literal["jump", "drop", "compute", "wait"]
    max_tokens: int = 0
    """For "compute": tokens to compute at most before asking again; they may pass choice.stop."""


def choose_load(
    total: int, start: int, candidates: Sequence[Candidate], compute: ComputeRate, tiers: Mapping[str, TierRate]
) -> LoadChoice:
    """Choose the fastest way to the first token of a prompt of `total` tokens, of which `start` are on the device. A
    candidate with pages in a tier that `tiers` lacks is passed over. A load that saves less than MARGIN of recomputing
    is not made. O(pages) for each distinct page list."""
    step = compute.seconds_alone(start, start + compute.slice_tokens)  # the one with the first token, at least
    recompute = max(compute.delay_s + compute.shared_seconds(start, total), step)

    def seconds_of(load: _Load, meet: int, caution: float = 1.0) -> float:
        tail = compute.shared_seconds(load.candidate.tokens, total)
        return max(load.front_seconds(meet) + tail, caution * load.load_seconds(meet) + max(tail, step))

    best: tuple[float, _Load, int] | None = None
    sums: dict[int, dict[str, list[int]]] = {}
    for candidate in candidates:
        assert start < candidate.tokens < total and candidate.tokens % candidate.page_tokens == 0
        where = candidate.global_pages
        if id(where) not in sums:  # how many of the first i pages are in each tier, for every i
            sums[id(where)] = {
                name: list(accumulate(map(name.__eq__, where), initial=0)) for name in (HOST, READING, DISK)
            }
        pages = sums[id(where)]
        load = _Load(candidate, start, pages, compute, tiers)
        meet, alone = load.meeting_token(1.0), load.load_seconds(start)
        least = (1 - SPLIT_MARGIN * (not load.reads_disk(start))) * max(compute.delay_s, alone)
        fast = compute.share == 1 and alone <= FAST_LOAD * recompute and load.reads_disk(start)
        if (
            fast
            or meet - start < compute.slice_tokens
            or max(load.front_seconds(meet), load.load_seconds(meet)) > least
        ):
            meet = start
        for begin in (start, meet) if compute.others and meet > start else (meet,):
            score = seconds_of(load, begin, CAUTION) - compute.seconds_spared(begin, candidate.tokens)
            if best is None or score < best[0]:
                best = (score, load, begin)
    if best is None:
        return LoadChoice(0, start, recompute, recompute, "compute")
    _, load, meet = best
    load_s, seconds = load.load_seconds(meet), seconds_of(load, meet)
    spared = compute.seconds_spared(meet, load.candidate.tokens)
    if seconds - spared > (1 - MARGIN) * recompute:
        return LoadChoice(0, start, recompute, recompute, "compute")
    one_slice = compute.shared_seconds(start, start + compute.slice_tokens)
    allowed_wait = min(WAIT_SHARE * max(0.0, recompute - seconds), one_slice)
    # with a share, a step takes its time for the others in any case, so computing costs nothing
    wait_s = 0.0 if compute.share < 1 else allowed_wait
    stop, slices = load.candidate.tokens, compute.slice_tokens
    if meet == start:
        load_only = max(0.0, load_s - compute.delay_s) if load.reads_disk(start) else load_s
        tail = compute.shared_seconds(stop, total)
        wait_s, longest_s = wait_s + load_only, (recompute - tail + spared) * (compute.others > 0)
        return LoadChoice(stop, start, seconds, recompute, "load", meet, load_s, wait_s, slices, start, longest_s)
    # `decide_move` may wait from there on
    early = min(load.meeting_token(1 - BAND), meet - slices // 2)
    early = max(start, early - early % load.candidate.page_tokens)
    first = start if load.reads_disk(start) else early  # a disk may be any number of times faster than it was
    return LoadChoice(stop, first, seconds, recompute, "split", meet, load_s, wait_s, slices, early)


def decide_load(
    total: int,
    start: int,
    candidates: Sequence[Candidate],
    compute: ComputeRate,
    tiers: Mapping[str, TierRate],
    drag: float = 1.0,
    *,
    hope: float = 1.0,
) -> LoadChoice:
    """Choose as `choose_load`, where a load from disk makes steps take `drag` times as long. If that computes all, try
    a load that would pay if the disk were `hope` times as fast as it seems. It runs beside computing all
    (`aim_meeting`) and costs reads that nobody else waits for, and slower steps."""
    made = choose_load(total, start, candidates, compute, tiers)
    if drag > SLOWER and made.stop and any(map(Candidate.reads_disk, candidates)):
        beside = choose_load(total, start, candidates, compute.slow_down(drag), tiers)
        spared = compute.seconds_spared(beside.meet, beside.stop)
        worth = beside.stop and beside.seconds - spared < made.compute_seconds
        made = beside if worth else choose_load(total, start, [], compute, tiers)
    disk = tiers.get(DISK)
    if hope > 1.0 and not made.stop and drag <= SLOWER and disk is not None:
        fast = replace(disk, bytes_per_s=hope * disk.bytes_per_s, latency_s=disk.latency_s / hope)
        tried = choose_load(total, start, candidates, compute, {**tiers, DISK: fast})
        if tried.stop:
            return replace(tried, start=start, early=NEVER, meet=NEVER, seconds=tried.compute_seconds, decision="split")
    return made


def aim_meeting(
    choice: LoadChoice,
    computed: int,
    page_tokens: int,
    compute: ComputeRate,
    arrival: Callable[[int], float],
    *,
    ready_from: int = NEVER,
    idle_s: float = 0.0,
) -> LoadChoice:
    """Aim a choice whose load is under way at the meeting point expected now. In `arrival(token)` seconds the windows
    and all pages from there on are here; it grows the earlier the token is.

    A load that arrives after all of it is computed shortens no step. `ready_from` and `idle_s` as in `decide_move`. A
    load that spares others is awaited while it, or else computing the rest, should end in time.

    A load from disk is requested whole, so that it is as fast as loading all, however fast the disk turns out. At every
    step the meeting point follows what came so far. `choice` is the one that the load began with: unless idling spares
    others, it never takes longer than this wait_s."""
    first, last = computed // page_tokens, choice.stop // page_tokens

    def boundary(page: int) -> int:
        return max(computed, page * page_tokens)

    def meeting(factor: float) -> int:
        page = _find_meeting(
            first,
            last,
            lambda page: compute.shared_seconds(computed, boundary(page)),
            lambda page: factor * arrival(boundary(page)),
        )
        return boundary(page) if page < last else NEVER

    meet, here = meeting(1.0), arrival(computed)
    slice_s = compute.shared_seconds(computed, computed + choice.slice_tokens)
    if choice.longest_s and compute.others:
        end = min(meet, choice.stop)
        worth = compute.shared_seconds(computed, end) + compute.seconds_spared(computed, end)
        in_time = choice.longest_s - compute.shared_seconds(choice.start, computed) - idle_s
        longest_s = choice.longest_s - compute.shared_seconds(choice.start, max(computed, min(ready_from, choice.stop)))
        if here <= min(worth, in_time) and idle_s < longest_s:
            return replace(choice, meet=computed, early=computed, wait_s=longest_s, arrives_s=here)
    alone = choice.decision == "load" and compute.share == 1 and idle_s + here <= choice.wait_s
    if alone and here <= max(slice_s, FAST_LOAD * compute.shared_seconds(computed, choice.stop)):
        return replace(choice, meet=computed, early=computed)
    rest_s = compute.shared_seconds(min(meet, choice.stop), choice.stop)
    wait_s = 0.0 if compute.share < 1 else min(choice.wait_s, WAIT_SHARE * rest_s, slice_s)
    return replace(choice, meet=meet, early=meeting(1 - BAND), wait_s=wait_s, arrives_s=0.0)


def _find_meeting(first: int, last: int, front: Callable[[int], float], load: Callable[[int], float]) -> int:
    """Find the page in [first, last] where computing up to it and loading from it end soonest. `front(page)` grows and
    `load(page)` shrinks, so it is next to where they cross."""
    page = first + bisect_left(range(first, last), True, key=lambda page: front(page) >= load(page))
    return page - 1 if page > first and load(page - 1) <= front(page) else page


def decide_move(choice: LoadChoice, computed: int, ready_from: int, idle_s: float) -> NextMove:
    """Decide what a sequence whose load is under way does at a step boundary, or when its load is done.

    `computed` tokens are on the device. `ready_from`: smallest token such that the windows of choice.stop and all pages
    [ready_from, choice.stop) are there; above choice.stop while not even the windows are. `idle_s`: seconds waited so
    far after "wait". When the load fails the caller drops it and computes on.

    Invariant (I18): a sequence with a load idles at most `wait_s`, as seen between steps; else it computes from the
    front. So time to first token <= recompute + wait_s and one step of others, which began while it waited. Only copies
    to the device that hold up the engine's thread add more. Proof: slices have `slice_tokens` or more, so computing all
    tokens costs what recompute costs; a jump only removes work; what is added is idle time.

    wait_s is at most a slice and a quarter of what the load should save. A load-only choice adds the load's own time,
    which is less than computing. Beside sequences that decode, a load from disk may idle longer. But idling and
    computing together take at most 1 + `others` times what computing takes, even if nothing more comes, as it computes
    no further than to what is there."""
    if computed >= choice.stop:
        return NextMove("drop")
    if ready_from <= computed:
        return NextMove("jump")
    left = choice.meet - computed
    if left < choice.slice_tokens / 2:
        if idle_s < choice.wait_s:
            return NextMove("wait")
        left = -left // 2  # the load is late: slices that grow, as short ones may be less efficient
    elif computed >= choice.early:
        left //= 2  # the load may be there any time: slices that get smaller
    else:
        left = choice.early - computed
    if ready_from <= choice.stop:
        left = min(left, ready_from - computed)  # then it jumps; `aim_meeting` keeps no time for more
    return NextMove("compute", max(left, choice.slice_tokens))


@dataclass(slots=True)
class _Load:
    """Times of loading one candidate from any page boundary on. Boundaries are numbered from 0, the choice's start;
    `sums[tier][i]` counts the first i pages that are in a tier."""

    candidate: Candidate
    start: int
    sums: dict[str, list[int]]
    compute: ComputeRate
    tiers: Mapping[str, TierRate]

    def load_seconds(self, begin: int) -> float:
        """Estimate the seconds until the windows and pages from token `begin` to the end are on the device."""
        host, reading, disk = (self._bytes_from(tier, begin) for tier in (HOST, READING, DISK))
        read = reading or disk
        if HOST not in self.tiers or (read and DISK not in self.tiers):
            return float("inf") if host or read else 0.0
        link = self.tiers[HOST]
        seconds = link.read_seconds(host + reading + disk)
        if read:  # pages pass one after the other, so the slower of disk and link counts, and one page more
            last = link.latency_s + self.candidate.page_bytes / link.bytes_per_s
            # of what is asked for, the last to come: it goes from back to front
            page = self._find_page(begin)
            behind = self.sums[READING][page] * self.candidate.page_bytes
            seconds = max(seconds, self.tiers[DISK].read_seconds(disk - behind, queued=bool(reading)) + last)
        return seconds

    def reads_disk(self, begin: int) -> bool:
        return bool(self._bytes_from(READING, begin) or self._bytes_from(DISK, begin))

    def _bytes_from(self, tier: str, begin: int) -> int:
        """Count bytes in a tier from token `begin` on, windows included."""
        sums = self.sums[tier]
        pages = sums[self._find_page(self.candidate.tokens)] - sums[self._find_page(begin)]
        return pages * self.candidate.page_bytes + self.candidate.window_bytes.get(tier, 0)

    def meeting_token(self, factor: float) -> int:
        """Find the boundary to compute to meanwhile, if loads take `factor` times their estimate (`_find_meeting`)."""
        page = _find_meeting(
            0,
            self._find_page(self.candidate.tokens) - 1,
            lambda page: self.front_seconds(self._boundary_token(page)),
            lambda page: factor * self.load_seconds(self._boundary_token(page)),
        )
        return self._boundary_token(page)

    def front_seconds(self, token: int) -> float:
        """Estimate the seconds until all before `token` is computed."""
        return self.compute.delay_s + self.compute.shared_seconds(self.start, token)

    def _find_page(self, token: int) -> int:
        """Number the boundary at `token`."""
        return token // self.candidate.page_tokens - self.start // self.candidate.page_tokens

    def _boundary_token(self, page: int) -> int:
        size = self.candidate.page_tokens
        return max(self.start, (self.start // size + page) * size)
