"""Compute or load: which part of a prefix to fetch from the host and disk tiers, and which to compute meanwhile.

Plain data; it must not know clocks, tensors, threads or how rates are measured (`kv/rates.py`). A plan names a resume
point `stop` and a page boundary `start`: pages [start, stop) of the global layers and the windows of `stop` are loaded,
windows first and then pages from back to front, while the device computes from the front. Where both meet the sequence
jumps to `stop`. Loading back to front makes the meeting point adapt by itself: wrong rates move it and break nothing.

Invariant (`advance`): a sequence with a load waits idle only in a load-only plan, and only until `deadline_s`; else it
computes from the front as if there were no load. So whatever the load does, time to first token <= recompute +
deadline_s. Proof: prefill seconds add up, so computing [start of the prompt, total) in any slices costs what recompute
costs; a jump only removes work; all that is added is idle time, which ends at deadline_s. A load-only plan is made only
if its load ends within a slice (`slice_tokens`) and a page after the sequence could begin; it idles WAIT longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

DEVICE, HOST, DISK = "device", "host", "disk"

MARGIN = 0.05
"""A load must be predicted to save this share of the recompute time; less is within the noise of the rates."""
BAND = 0.2
"""Relative error of a load's time that a split allows for: pages that far before the expected meeting point are
requested as well, and up to that far behind it the device computes in small slices."""
WAIT = 0.5
"""How much longer than predicted a load-only plan waits before computing begins: this share of its load or, if that is
less, of one slice."""


@dataclass(frozen=True, slots=True)
class TierRate:
    """What a tier gives now. `latency_s` is per batch of operations, `queued_bytes` is work ahead of ours there.

    The rate of HOST is that of the link from host to device, which the pages from disk pass as well.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    queued_bytes: int = 0

    def seconds(self, count: int) -> float:
        """Until `count` more bytes have arrived; nothing takes no time."""
        return self.latency_s + (self.queued_bytes + count) / self.bytes_per_s if count else 0.0


@dataclass(frozen=True, slots=True)
class ComputeRate:
    """Prefill time of one sequence: `per_token_s` (c0) for each token, `per_key_s` (c1) more per key it attends to.

    `share` in (0, 1] is the part of the step budget that the sequence gets under the present load, `delay_s` the time
    until its first step (it waits in the queue; loads go on meanwhile). `slice_tokens` is the smallest number of tokens
    that is worth a step.
    """

    per_token_s: float
    per_key_s: float = 0.0
    share: float = 1.0
    delay_s: float = 0.0
    slice_tokens: int = 256

    def alone(self, begin: int, end: int) -> float:
        """Seconds to compute tokens [begin, end) with the whole device: c0 (b - a) + c1 (b^2 - a^2) / 2."""
        return (end - begin) * (self.per_token_s + self.per_key_s * (begin + end) / 2)

    def seconds(self, begin: int, end: int) -> float:
        """The same with this sequence's share of the device."""
        return self.alone(begin, end) / self.share


@dataclass(frozen=True, slots=True)
class Candidate:
    """A resume point in the lower tiers: the first `tokens` tokens can be had without computing.

    `global_pages[i]` is the tier of the page with tokens [first + i * page_tokens, ...) of all global layers together,
    `first` being the plan's start rounded down to a page; entries past `tokens` are ignored, so that candidates can
    share one list. `page_bytes` counts all global layers. `window_bytes` says per tier what the windows before `tokens`
    need. What is on the device already costs nothing.
    """

    tokens: int
    global_pages: Sequence[str]
    page_tokens: int
    page_bytes: int
    window_bytes: Mapping[str, int] = field(default_factory=dict)


Decision = Literal["compute", "load", "split"]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to do. Without a load `stop` is 0. Times are seconds from now to the first token.

    `start`: pages [start, stop) are loaded; tokens up to `start` are computed meanwhile. `late`: by then the load
    should have met the computation. `load_seconds`: the load alone, from the expected meeting point.
    `slice_tokens` as in ComputeRate.
    """

    stop: int
    start: int
    seconds: float
    compute_seconds: float
    decision: Decision
    late: int = 0
    load_seconds: float = 0.0
    deadline_s: float = 0.0
    slice_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Step:
    """What a sequence with a load does next. "jump": computed = plan.stop. "drop": the load is useless now."""

    action: Literal["jump", "drop", "compute", "wait"]
    max_tokens: int = 0
    """For "compute": tokens to compute at most before asking again."""


def plan(
    total: int,
    start: int,
    candidates: Sequence[Candidate],
    compute: ComputeRate,
    tiers: Mapping[str, TierRate],
) -> LoadPlan:
    """The fastest way to the first token of a prompt of `total` tokens, of which `start` are on the device.

    A candidate with pages in a tier that `tiers` lacks is passed over. A load that saves less than MARGIN of
    recomputing is not made. O(pages) for the sums over each distinct page list, then O(log pages) per candidate.
    """
    recompute = compute.delay_s + compute.seconds(start, total)
    best: tuple[float, _Load, int] | None = None
    sums: dict[int, _Sums] = {}
    for candidate in candidates:
        assert start < candidate.tokens < total and candidate.tokens % candidate.page_tokens == 0
        pages = sums.setdefault(id(candidate.global_pages), _page_sums(candidate.global_pages))
        load = _Load(candidate, start, pages, compute, tiers)
        meeting = load.meeting(1.0)
        if meeting - start < compute.slice_tokens:
            meeting = start
        front = compute.delay_s + compute.seconds(start, meeting)
        seconds = max(front, load.seconds(meeting)) + compute.seconds(candidate.tokens, total)
        if best is None or seconds < best[0]:
            best = (seconds, load, meeting)
    if best is None or best[0] > (1 - MARGIN) * recompute:
        return LoadPlan(0, start, recompute, recompute, "compute")
    seconds, load, meeting = best
    stop = load.candidate.tokens
    load_s = load.seconds(meeting)
    if meeting == start:
        deadline = load_s + WAIT * min(load_s, compute.seconds(start, start + compute.slice_tokens))
        return LoadPlan(stop, start, seconds, recompute, "load", start, load_s, deadline, compute.slice_tokens)
    first, late = load.meeting(1 - BAND), load.meeting(1 + BAND)
    return LoadPlan(stop, first, seconds, recompute, "split", late, load_s, 0.0, compute.slice_tokens)


def advance(plan: LoadPlan, computed: int, ready_from: int, elapsed_s: float) -> Step:
    """What a sequence does at a step boundary, `elapsed_s` after its load was requested and not failed.

    `computed` tokens are on the device. `ready_from`: smallest token such that the windows of plan.stop and all pages
    [ready_from, plan.stop) are there; anything above plan.stop while not even the windows are. After a failed load the
    caller drops it and computes on.
    """
    if computed >= plan.stop:
        return Step("drop")
    if ready_from <= computed:
        return Step("jump")
    if computed < plan.start:
        return Step("compute", plan.start - computed)
    if plan.decision == "load" and elapsed_s < plan.deadline_s:
        return Step("wait")
    if computed < plan.late:
        return Step("compute", min(plan.slice_tokens, plan.late - computed))
    return Step("compute", plan.stop - computed)


_Sums = tuple[list[int], list[int]]


def _page_sums(pages: Sequence[str]) -> _Sums:
    """Numbers of host and of disk pages among the first i, for every i."""
    return (
        list(accumulate((tier == HOST for tier in pages), initial=0)),
        list(accumulate((tier == DISK for tier in pages), initial=0)),
    )


class _Load:
    """Times of loading one candidate from any page boundary on. Boundaries are numbered from 0, the plan's start."""

    def __init__(
        self,
        candidate: Candidate,
        start: int,
        sums: _Sums,
        compute: ComputeRate,
        tiers: Mapping[str, TierRate],
    ) -> None:
        self.candidate = candidate
        self._start = start
        self._first = start - start % candidate.page_tokens
        self._pages = (candidate.tokens - self._first) // candidate.page_tokens
        self._sums = sums
        self._compute = compute
        self._tiers = tiers

    def seconds(self, begin: int) -> float:
        """Until the windows and pages from token `begin` to the end are on the device."""
        candidate = self.candidate
        page = (begin - self._first) // candidate.page_tokens
        host = (self._sums[0][self._pages] - self._sums[0][page]) * candidate.page_bytes
        disk = (self._sums[1][self._pages] - self._sums[1][page]) * candidate.page_bytes
        host += candidate.window_bytes.get(HOST, 0)
        disk += candidate.window_bytes.get(DISK, 0)
        if HOST not in self._tiers or (disk and DISK not in self._tiers):
            return float("inf") if host or disk else 0.0
        link = self._tiers[HOST]
        seconds = link.seconds(host + disk)
        if disk:  # pages pass one after the other, so the slower of disk and link counts, and one page more
            last = link.latency_s + candidate.page_bytes / link.bytes_per_s
            seconds = max(seconds, self._tiers[DISK].seconds(disk) + last)
        return seconds

    def meeting(self, factor: float) -> int:
        """The boundary with the soonest end of computing up to it and loading from it, if loads take `factor` times
        their estimate. Computing grows with the boundary and loading shrinks, so it is next to where they cross."""
        low, high = 0, self._pages - 1
        while low < high:
            middle = (low + high) // 2
            if self._front(middle) >= factor * self.seconds(self._boundary(middle)):
                high = middle
            else:
                low = middle + 1
        if low and factor * self.seconds(self._boundary(low - 1)) <= self._front(low):
            low -= 1
        return self._boundary(low)

    def _front(self, page: int) -> float:
        return self._compute.delay_s + self._compute.seconds(self._start, self._boundary(page))

    def _boundary(self, page: int) -> int:
        return max(self._start, self._first + page * self.candidate.page_tokens)
