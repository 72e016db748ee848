"""What was measured: one request as its client saw it, and the statistics over many.

Plain data and arithmetic; it must not know targets or clocks. Invariants: token counts come from the server's
`usage`, never from the number of messages; the gaps of a request add up to the time from its first to its last token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times are seconds of one monotonic clock. `arrivals` are (time, tokens) of the messages that carried tokens.

    `started` is when the request was due, which is when it was sent unless the sender was late. `error` is set, and
    the counts are zero, when the request did not give the tokens it was asked for.
    """

    started: float
    finished: float
    arrivals: tuple[tuple[float, int], ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.arrivals[0][0] - self.started

    @property
    def e2e_s(self) -> float:
        return self.finished - self.started

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, (e2e - ttft) / (n - 1); None for one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def gaps_s(self) -> list[float]:
        """Inter-token latencies, n - 1 of them. Tokens of one message came together: their gaps are 0."""
        gaps: list[float] = []
        before = self.arrivals[0][0] if self.arrivals else 0.0
        for moment, tokens in self.arrivals:
            gaps += [moment - before, *([0.0] * (tokens - 1))]
            before = moment
        return gaps[1:]


@dataclass(frozen=True, slots=True)
class Summary:
    """Distribution of `count` values; percentiles interpolate linearly between neighbours."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary | None:
        """None for no values."""
        array = np.fromiter(values, np.float64)
        if not array.size:
            return None
        p50, p90, p99 = np.percentile(array, (50, 90, 99)).tolist()
        return cls(array.size, float(array.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Distributions:
    """Seconds. None where no request has the quantity."""

    ttft: Summary | None
    tpot: Summary | None
    itl: Summary | None
    e2e: Summary | None

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Distributions:
        """Over the records without an error."""
        good = [r for r in records if r.error is None]
        return cls(
            ttft=Summary.of(r.ttft_s for r in good),
            tpot=Summary.of(t for r in good if (t := r.tpot_s) is not None),
            itl=Summary.of(gap for r in good for gap in r.gaps_s()),
            e2e=Summary.of(r.e2e_s for r in good),
        )


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates over the time from the first request's start to the last one's end.

    `goodput_per_s` counts the requests that met both limits of `Slo`; None when no limit was given.
    """

    duration_s: float
    completed: int
    errors: dict[str, int]
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    goodput_per_s: float | None
    latencies: Distributions

    @classmethod
    def of(cls, records: Sequence[RequestRecord], slo: Slo | None = None) -> Throughput:
        """`records` of one run, at least one."""
        duration = max(r.finished for r in records) - min(r.started for r in records)
        good = [r for r in records if r.error is None]
        prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
        met = None if slo is None else sum(slo.met_by(r) for r in good)
        return cls(
            duration_s=duration,
            completed=len(good),
            errors=dict(Counter(r.error for r in records if r.error is not None)),
            requests_per_s=len(good) / duration,
            output_tokens_per_s=output / duration,
            total_tokens_per_s=(prompt + output) / duration,
            prompt_tokens=prompt,
            cached_tokens=sum(r.cached_tokens for r in good),
            output_tokens=output,
            goodput_per_s=None if met is None else met / duration,
            latencies=Distributions.of(records),
        )


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level limits of one request, seconds; None means no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        tpot = record.tpot_s
        return (self.ttft_s is None or record.ttft_s <= self.ttft_s) and (
            self.tpot_s is None or tpot is None or tpot <= self.tpot_s
        )
