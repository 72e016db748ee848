"""Online estimates for the planner: prefill seconds per token, and each tier's rate and latency.

Must not read clocks (callers pass seconds and `now`) nor know what is measured. Invariant: estimates are positive and
finite whatever is observed; two or three observations bring a tier that changed tenfold within a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul


@dataclass(frozen=True, slots=True)
class TierRate:
    """Rate of a tier now. `latency_s` is per batch of operations; `queued_bytes` is the work ahead there. The rate of
    HOST is that of the link from host to device, which the pages from disk pass as well."""

    bytes_per_s: float
    latency_s: float = 0.0
    queued_bytes: int = 0

    def read_seconds(self, count: int, *, queued: bool = False) -> float:
        """Estimate the seconds until `count` bytes arrived behind the queued ones; 0 for none, unless `queued`."""
        return self.latency_s + (self.queued_bytes + count) / self.bytes_per_s if count or queued else 0.0


@dataclass(frozen=True, slots=True)
class ComputeRate:
    """Prefill time of one sequence: `per_token_s` (c0) for each token, `per_key_s` (c1) more per key it attends to.
    `share` in (0, 1] is its part of the step budget under the present load. `delay_s` is the time until its first step;
    loads go on meanwhile. With fewer than `slice_tokens` of it a step gets no shorter, as weights are read or other
    sequences fill it. `others`: seconds to its first token that are worth a second of the device to other sequences."""

    per_token_s: float
    per_key_s: float = 0.0
    share: float = 1.0
    delay_s: float = 0.0
    slice_tokens: int = 256
    others: float = 0.0

    def seconds_alone(self, begin: int, end: int) -> float:
        """Seconds to compute tokens [begin, end) with the whole device: c0 (b - a) + c1 (b^2 - a^2) / 2."""
        return (end - begin) * (self.per_token_s + self.per_key_s * (begin + end) / 2)

    def shared_seconds(self, begin: int, end: int) -> float:
        return self.seconds_alone(begin, end) / self.share

    def seconds_spared(self, begin: int, end: int) -> float:
        """Seconds of this sequence that others gain when tokens [begin, end) are loaded, not computed."""
        return self.others * self.seconds_alone(begin, end)

    def slow_down(self, factor: float) -> ComputeRate:
        """Return the rate where computing takes `factor` times as long."""
        return replace(self, per_token_s=factor * self.per_token_s, per_key_s=factor * self.per_key_s)


CLIP = 4.0
"""Largest factor by which one observation counts as slower or faster than expected."""
RATE, FAST_RATE = 0.25, 0.8
"""Step sizes: in noise, and when two observations in a row are off by more than SHIFT on the same side."""
SHIFT = 1.5
LIMIT = 1e5
"""Largest factor between a parameter and its prior."""

PREFILL_PRIOR = (1e-4, 3e-10)
"""Seconds a token, and a key it attends to, before the first step: 10,000 tokens/s, faster than most devices, so that
in doubt the engine computes. Attention of Gemma 3 27B costs 3.2e-6 of a token's other work per key; 270M is near."""
HOST_PRIOR = TierRate(10e9, 2e-4)
"""Before the first copy from the host: PCIe 4 x16 at half its rate; host hits are loaded."""
DISK_PRIOR = TierRate(0.5e9, 5e-3)
"""Before the first read: SATA. Large models compute at first, small ones (few bytes per token) load."""
MIN_TOKENS = 32
"""Steps with fewer prefill tokens say nothing about prefill: reading the weights is most of them."""
FADING_S = 30.0
"""After so long half of what loads slowed steps down by is believed still."""
DOUBLING_S = 10.0
"""A slow tier that nobody reads is expected to double its rate each so many seconds, up to the best it showed."""

HOPE = 10.0
"""How many times as fast as it seems a disk may be of which nothing is known, as one that seems slow is not read."""
STRETCH, STRETCH_S = 64 << 20, 0.05
"""Of reads without a rest so many bytes, or so many seconds, are one observation."""
KNOWN, KNOWN_MOST = 64 << 20, 256 << 20
"""Bytes read for requests with which a rate is known. They fade by half each DOUBLING_S, as many at most."""


_SHIFT, _LIMIT = math.log(SHIFT), math.log(LIMIT)


class PositiveSum:
    """Sum seconds = sum p_i x_i with p_i > 0, learnt online. The first observation scales the prior as a whole. It
    learns by normalised gradient steps on the logarithm of the error. So errors are relative, p_i stays positive, a
    term learns in proportion to its part of the time, and an outlier counts as `clip` times at most. `rate` is the step
    size in noise. p_i stays within a factor of LIMIT of its prior, so that nothing overflows."""

    def __init__(self, prior: Sequence[float], *, rate: float = RATE, clip: float = CLIP) -> None:
        self._bounds = [(a / LIMIT, a * LIMIT) for a in prior]
        self._rate, self._clip = rate, math.log(clip)
        self.p = list(prior)
        self.observed = 0
        self._last_error = 0.0

    def predict(self, x: Sequence[float]) -> float:
        return float(sum(map(mul, self.p, x)))

    def update(self, x: Sequence[float], seconds: float) -> None:
        expected = self.predict(x)
        error = math.log(max(seconds, 1e-9) / expected)
        self.observed += 1
        if self.observed == 1:
            self._scale_terms([error] * len(self.p))
            return
        error = max(-self._clip, min(self._clip, error))
        again = error * self._last_error > 0 and min(abs(error), abs(self._last_error)) > _SHIFT
        rate = FAST_RATE if again else max(self._rate, 1 / self.observed)
        self._last_error = error
        parts = [value / expected for value in map(mul, self.p, x)]
        norm = sum(map(mul, parts, parts))
        self._scale_terms([rate * error * part / norm for part in parts])

    def _scale_terms(self, logs: Sequence[float]) -> None:
        exp = math.exp
        scaled = [p * exp(min(log, _LIMIT)) for p, log in zip(self.p, logs, strict=True)]
        self.p = [max(low, min(high, p)) for (low, high), p in zip(self._bounds, scaled, strict=True)]


class PrefillMeter:
    """Seconds per prefill token and per key attended to, of this engine with whatever else its steps do."""

    def __init__(self) -> None:
        self._fit, self._whole = PositiveSum(PREFILL_PRIOR), False

    @property
    def observed(self) -> int:
        return self._fit.observed

    def observe_step(self, slices: Sequence[tuple[int, int]], seconds: float, whole: int = 0) -> None:
        """Learn from a step: (start, count) of each sequence, and its wall time. Steps without prefill are ignored. So
        are those with fewer than `whole` prefill tokens, which take as long with more, once there was a larger one."""
        prefill = sum([count for _, count in slices if count > 1])
        if prefill < MIN_TOKENS or not 0 < seconds < math.inf or (self._whole and prefill < whole):
            return
        if prefill >= whole and not self._whole:  # what the others taught is no rate
            self._fit, self._whole = PositiveSum(PREFILL_PRIOR), True
        tokens = sum(count for _, count in slices)
        keys = sum(count * (start + count / 2) for start, count in slices)
        self._fit.update((tokens, keys), seconds)

    def expected_seconds(self, slices: Sequence[tuple[int, int]]) -> float:
        return self._fit.predict((sum(n for _, n in slices), sum(n * (start + n / 2) for start, n in slices)))

    def compute_rate(self, *, share: float = 1.0, slice_tokens: int = 256) -> ComputeRate:
        """Return the present estimate; the caller knows the load (see ComputeRate)."""
        return ComputeRate(self._fit.p[0], self._fit.p[1], share, slice_tokens=slice_tokens)


class Drag:
    """Factor by which steps take longer while pages come from disk, as threads that check pages and copies may
    interfere. It fades by half each FADING_S, so that loads are tried again."""

    def __init__(self) -> None:
        self._more, self._at = 0.0, 0.0

    def observe_step(self, expected: float, seconds: float, *, now: float) -> None:
        """Learn from a step beside such a load: `seconds`, instead of the `expected` ones without."""
        if expected > 0 and 0 < seconds < math.inf:
            more = min(CLIP, max(1.0, seconds / expected)) - 1.0
            self._more, self._at = 0.2 * (self.slowdown(now) - 1.0) + 0.8 * more, now

    def slowdown(self, now: float) -> float:
        return 1.0 + self._more * math.exp(-max(0.0, now - self._at) * math.log(2) / FADING_S)


class TierMeter:
    """Rate and latency of reads from one tier. A tier that became slow is no longer read and would seem slow for ever.
    So its estimate doubles each DOUBLING_S without reads, up to the best rate seen (or the prior). A tier f times too
    slow to be worth reading is tried again after DOUBLING_S * log2(f) seconds. The trial costs at most the idle time of
    its choice (`planner.decide_move`)."""

    def __init__(self, prior: TierRate) -> None:
        self._fit = PositiveSum((max(prior.latency_s, 1e-6), 1.0 / prior.bytes_per_s))
        self._best = prior.bytes_per_s
        self._read_at = 0.0
        self._known = 0.0, 0.0  # bytes that were read for requests, fading since then
        self._since, self._end, self._count = 0.0, -math.inf, 0  # reads without a rest between them

    @property
    def observed(self) -> int:
        return self._fit.observed

    def observe_read(self, count: int, seconds: float, *, now: float) -> None:
        """Learn from a batch of `count` bytes, which took `seconds` from submission to completion."""
        if count <= 0 or not 0 < seconds < math.inf:
            return
        self._read_at = now
        self._fit.update((1.0, count), seconds)
        self._best = max(self._best, 1.0 / self._fit.p[1])

    def observe_requested_read(self, count: int, asked: float, seconds: float, *, rests: bool, now: float) -> None:
        """Learn from a read for a request (no probe), `seconds` from when it was asked for to its end. `rests`: there
        is nothing more to read. Reads without a rest between them count as one: each waits for those before it."""
        if count <= 0 or not 0 < seconds < math.inf:
            return
        self._known = min(KNOWN_MOST, self._known_bytes(now) + count), now
        if asked >= self._end:
            self._since, self._count = asked, 0
        self._end, self._count = max(self._end, asked + seconds), self._count + count
        took = self._end - self._since
        if rests or self._count >= STRETCH or took >= STRETCH_S:
            self.observe_read(self._count, took, now=now)
            self._since, self._count = self._end, 0

    def hoped_factor(self, now: float) -> float:
        """Factor by which the tier may be faster than it seems: HOPE when long unread, 1 while its rate is known."""
        return math.pow(HOPE, 1.0 - min(1.0, self._known_bytes(now) / KNOWN))

    def _known_bytes(self, now: float) -> float:
        known, at = self._known
        return known * math.pow(0.5, max(0.0, now - at) / DOUBLING_S)

    def observe_overdue(self, count: int, seconds: float, *, now: float) -> None:
        """Learn that a batch is not done after `seconds`, or failed then: it counts only if it is later than expected.
        Call it once when a load passes its deadline, so that the next choices do not wait for a disk that hangs."""
        if seconds > self._fit.predict((1.0, count)):
            self.observe_read(count, seconds, now=now)

    def tier_rate(self, *, queued: int = 0, now: float) -> TierRate:
        measured = 1.0 / self._fit.p[1]
        idle = max(0.0, now - self._read_at) if self._fit.observed else 0.0
        faster = min(2.0 ** min(idle / DOUBLING_S, 60.0), max(1.0, self._best / measured))
        return TierRate(measured * faster, self._fit.p[0] / faster, queued)
