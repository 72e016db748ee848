"""Planner against oracle: an event simulation of one request that computes in steps while pages arrive from tiers.

It must not know how the planner decides: it runs choices through `planner.advance` only. The world uses true rates, the
planner sees estimates that are off by noise. Invariant: planner, oracle and recompute run in the same world, with the
same step times, arrivals and rounding to step boundaries.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from wicore_trt.kv.prefix.planner import DISK, HOST, Candidate, LoadChoice, choose_load, decide_move
from wicore_trt.kv.prefix.rates import ComputeRate, TierRate

PAGE_TOKENS = 32
SUFFIX_TOKENS = 512
"""New tokens behind the cached prefix."""
BUDGET_TOKENS = 512
"""Token budget of a step."""


Rates = tuple[ComputeRate, Mapping[str, TierRate]]


@dataclass(frozen=True, slots=True)
class Profile:
    """A model on a device: prefill cost, shortest step (reading the weights), bytes, host link, longest prompt."""

    name: str
    per_token_s: float
    per_key_s: float
    step_floor_s: float
    token_bytes: int
    window_tokens: int
    window_token_bytes: int
    link_bytes_per_s: float
    max_tokens: int

    def candidate(self, tokens: int, tier: str, pages: Sequence[str]) -> Candidate:
        window = {tier: min(tokens, self.window_tokens) * self.window_token_bytes}
        return Candidate(tokens, pages, PAGE_TOKENS, PAGE_TOKENS * self.token_bytes, window)


_FLOPS = 5e14  # half of an H100's dense bf16 rate
PROFILES = (
    # 2 FLOP per weight outside embeddings, and attention: 4 x 4,096 per key and layer, 52 windows of 1,024, 10 full.
    Profile(
        "27B bf16, H100",
        (51.2e9 + 52 * 16_384 * 1024) / _FLOPS,
        10 * 16_384 / _FLOPS,
        0.018,
        81_920,
        1024,
        425_984,
        55e9,
        131_072,
    ),
    Profile("270M, CPU at 2000 tokens/s", 1 / 2000, 3e-8, 0.02, 3072, 512, 15_360, 5e9, 32_768),
    Profile("270M, CPU at 600 tokens/s", 1 / 600, 1e-7, 0.06, 3072, 512, 15_360, 5e9, 32_768),
)
DISK_RATES = (0.25e9, 0.5e9, 1e9, 2e9, 4e9, 7e9)


@dataclass(frozen=True, slots=True)
class Load:
    """Load beside the request: our share of the step budget, seconds in the queue, the disk's backlog in seconds, and
    the swing of its rate (background traffic: faster and slower by this share, in turns of 0.1 s)."""

    name: str
    share: float = 1.0
    delay_s: float = 0.0
    backlog_s: float = 0.0
    swing: float = 0.0


LOADS = (
    Load("idle"),
    Load("half", share=0.5, swing=0.3),
    Load("full", share=0.125, swing=0.5),
    Load("queue", share=0.5, delay_s=0.4),
    Load("disk queue", backlog_s=0.3, swing=0.3),
)
Placement = Literal["disk", "host", "half"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid. Placement "half": the first half of the prefix is on the host, the rest on disk."""

    profile: Profile
    tokens: int
    disk_rate: float
    load: Load
    placement: Placement = "disk"


@dataclass(frozen=True, slots=True)
class CellResult:
    """Seconds to the first token."""

    cell: Cell
    choice: LoadChoice
    planner: float
    oracle: float
    recompute: float

    @property
    def over_oracle(self) -> float:
        return self.planner / self.oracle

    @property
    def over_recompute(self) -> float:
        return self.planner / self.recompute


class World:
    """The truth of one cell. Times count from the request's arrival; a stalled disk gives nothing in [stall[0],
    stall[1])."""

    def __init__(self, cell: Cell, stall: tuple[float, float] = (math.inf, math.inf)) -> None:
        profile, load = cell.profile, cell.load
        self.cell = cell
        self.total = cell.tokens + SUFFIX_TOKENS
        self.tiers = {
            HOST: TierRate(profile.link_bytes_per_s, 2e-4),
            DISK: TierRate(cell.disk_rate, 2e-3, int(load.backlog_s * cell.disk_rate)),
        }
        self.candidates = self._candidates()
        self._stall = stall
        self.step_tokens = max(1, int(BUDGET_TOKENS * load.share))
        busy = load.share < 1  # then others fill the step
        full_s = BUDGET_TOKENS * profile.per_token_s
        self.step_s = max(profile.step_floor_s, full_s if busy else 0.0)
        self._grid_s = self.step_s if busy else 0.0
        slices = math.ceil(self.step_s * load.share / profile.per_token_s)
        self.compute = ComputeRate(profile.per_token_s, profile.per_key_s, load.share, load.delay_s, slices)

    def _candidates(self) -> list[Candidate]:
        """The whole prefix, and window checkpoints at its half and quarter."""
        cell, count = self.cell, self.cell.tokens // PAGE_TOKENS
        far = HOST if cell.placement == "host" else DISK
        near = DISK if cell.placement == "disk" else HOST
        pages = [near] * (count // 2) + [far] * (count - count // 2)
        found = [cell.profile.candidate(cell.tokens, far, pages)]
        return found + [cell.profile.candidate(cell.tokens // part, near, pages) for part in (2, 4)]

    def step_seconds(self, begin: int, end: int) -> float:
        """One step in which this sequence computes [begin, end)."""
        return max(self.compute.shared_seconds(begin, end), self.step_s)

    def prefill(self, begin: int, end: int) -> float:
        """Seconds of all steps from `begin` to `end`."""
        edges = [*range(begin, end, self.step_tokens), end]
        return sum(self.step_seconds(a, b) for a, b in zip(edges, edges[1:], strict=False))

    def boundary(self, now: float, event: float) -> float:
        """First step boundary not before `event`, for a sequence that waits from the boundary `now` on."""
        if not self._grid_s or event <= now:
            return max(now, event)
        return now + math.ceil((event - now) / self._grid_s) * self._grid_s

    def arrival(self, candidate: Candidate, begin: int) -> float:
        """When the windows and all pages [begin, candidate.tokens) are on the device."""
        first, last = begin // PAGE_TOKENS, candidate.tokens // PAGE_TOKENS
        half = len(candidate.global_pages) // 2
        near, far = max(0, min(half, last) - first), max(0, last - max(first, half))
        count = {HOST: candidate.window_bytes.get(HOST, 0), DISK: candidate.window_bytes.get(DISK, 0)}
        count[candidate.global_pages[0]] += near * candidate.page_bytes
        count[candidate.global_pages[-1]] += far * candidate.page_bytes
        link = self.tiers[HOST]
        arrived = link.read_seconds(count[HOST] + count[DISK])
        if count[DISK]:
            tail = link.latency_s + candidate.page_bytes / link.bytes_per_s
            arrived = max(arrived, self._disk(self.tiers[DISK].read_seconds(count[DISK])) + tail)
        return arrived

    def _disk(self, seconds: float) -> float:
        """When the disk has done the work of `seconds` at its mean rate: it swings, and it may stall."""
        swing, half = self.cell.load.swing, 0.1
        turns, rest = divmod(seconds, 2 * half)
        slow = half * (1 - swing)
        now = turns * 2 * half + (rest / (1 - swing) if rest < slow else half + (rest - slow) / (1 + swing))
        begin, end = self._stall
        return now if now <= begin else now + (end - begin)

    def ready_from(self, made: LoadChoice, candidate: Candidate, now: float) -> int:
        """The smallest boundary from which everything has arrived."""
        pages = range(made.start // PAGE_TOKENS, candidate.tokens // PAGE_TOKENS)
        found = bisect_left(pages, True, key=lambda page: self.arrival(candidate, page * PAGE_TOKENS) <= now)
        if found == len(pages):
            return candidate.tokens + 1
        return pages[found] * PAGE_TOKENS


def run_choice(world: World, made: LoadChoice, rates: Rates) -> float:
    """Seconds to the first token when `made` is executed by the rule in `planner.advance`. After a jump the rest is
    chosen again with the same `rates`, because what lies behind may be worth loading now."""
    now, computed = world.cell.load.delay_s, 0
    asked = 0.0  # when the present load was requested
    while made.stop:
        candidate = next(c for c in world.candidates if c.tokens == made.stop)
        now, computed, jumped = _run_load(world, made, candidate, now, computed, asked)
        if not jumped:
            break
        asked, (compute, tiers) = now, rates
        rest = [replace(c, global_pages=c.global_pages[computed // PAGE_TOKENS :]) for c in world.candidates]
        rest = [c for c in rest if c.tokens > computed]
        made = choose_load(world.total, computed, rest, replace(compute, delay_s=0.0), tiers)
    return now + world.prefill(computed, world.total)


def _run_load(
    world: World, made: LoadChoice, candidate: Candidate, now: float, computed: int, asked: float
) -> tuple[float, int, bool]:
    """One load until the sequence jumps or drops it: time, computed tokens, whether it jumped."""
    idle = 0.0
    while True:
        step = decide_move(made, computed, world.ready_from(made, candidate, now - asked), idle)
        if step.action == "jump":
            return now, made.stop, True
        if step.action == "drop" or computed >= world.total:
            return now, computed, False
        if step.action == "wait":
            arrival = asked + world.arrival(candidate, max(made.start, computed - computed % PAGE_TOKENS))
            limit = now + made.wait_s - idle
            until = world.boundary(now, min(limit, arrival + 1e-9))
            idle, now = made.wait_s if until >= limit else idle + until - now, until
        else:
            end = min(computed + min(step.max_tokens, world.step_tokens), world.total)
            now += world.step_seconds(computed, end)
            computed = end


def oracle(world: World) -> float:
    """The soonest first token over all (k, n), k at every page boundary, and over computing alone."""
    delay = world.cell.load.delay_s
    best = delay + world.prefill(0, world.total)
    for candidate in world.candidates:
        tail = world.prefill(candidate.tokens, world.total)
        begun, edge = delay, 0  # time and token of the last full step before k
        for k in range(0, candidate.tokens, PAGE_TOKENS):
            while k - edge > world.step_tokens:
                begun += world.step_seconds(edge, edge + world.step_tokens)
                edge += world.step_tokens
            front = begun + world.step_seconds(edge, k) if k else delay
            if front + tail >= best:
                break
            best = min(best, world.boundary(front, world.arrival(candidate, k)) + tail)
    return best


@dataclass(frozen=True, slots=True)
class Noise:
    """Errors of estimates: log-normal with this spread, cut at `limit`. A meter (`kv/prefix/rates.py`) whose
    observations scatter by 20 % is off by 20 % x sqrt(0.25 / 1.75) = 8 %."""

    spread: float = 0.08
    limit: float = 0.2

    def factor(self, rng: random.Random) -> float:
        return math.exp(max(-self.limit, min(self.limit, rng.gauss(0.0, self.spread))))


def estimate(world: World, noise: Noise, rng: random.Random) -> Rates:
    """Make the planner's estimates of this world."""
    true = world.compute
    compute = replace(
        true,
        per_token_s=true.per_token_s * noise.factor(rng),
        per_key_s=true.per_key_s * noise.factor(rng),
        delay_s=true.delay_s * noise.factor(rng),
    )
    tiers = {
        name: TierRate(
            rate.bytes_per_s * noise.factor(rng),
            rate.latency_s * noise.factor(rng),
            int(rate.queued_bytes * noise.factor(rng)),
        )
        for name, rate in world.tiers.items()
    }
    return compute, tiers


def run_cell(cell: Cell, noise: Noise, rng: random.Random) -> CellResult:
    """Choose with noisy rates, run in the true world, and compare."""
    world = World(cell)
    rates = estimate(world, noise, rng)
    made = choose_load(world.total, 0, world.candidates, *rates)
    recompute = cell.load.delay_s + world.prefill(0, world.total)
    return CellResult(cell, made, run_choice(world, made, rates), oracle(world), recompute)


def grid(profiles: Sequence[Profile] = PROFILES, longest: int = 131_072) -> Iterator[Cell]:
    """Prefix length x disk rate x load x placement; cells that do not use the disk are there once per load."""
    for profile in profiles:
        tokens = 1024
        while tokens <= min(longest, profile.max_tokens):
            for load in LOADS:
                yield Cell(profile, tokens, DISK_RATES[0], load, "host")
                for rate in DISK_RATES:
                    yield Cell(profile, tokens, rate, load, "disk")
                    yield Cell(profile, tokens, rate, load, "half")
            tokens *= 2


def run_stalls(cell: Cell, noise: Noise, rng: random.Random) -> Iterator[CellResult]:
    """Run the request on a disk that stops at ten points of the chosen load and never comes back."""
    world = World(cell)
    rates = estimate(world, noise, rng)
    made = choose_load(world.total, 0, world.candidates, *rates)
    if made.decision == "compute":
        return
    recompute = cell.load.delay_s + world.prefill(0, world.total)
    for part in range(10):
        stalled = World(cell, (made.load_seconds * part / 10, math.inf))
        yield CellResult(cell, made, run_choice(stalled, made, rates), recompute, recompute)
