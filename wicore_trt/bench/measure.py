"""Measurements: one request as its client saw it, and the statistics over many.

Plain data and arithmetic; must not know targets or clocks. Invariants: token counts come from the server's `usage`
where it gives one, and a record says where they do not. The gaps of a request add up to the time from its first to its
last token, or there are none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Record of one request. Times are seconds of one monotonic clock.

    `arrivals` are (time, tokens) of the messages that carried tokens. `started` is when the request was due, which is
    when it was sent (`sent`) unless the sender was late. `error` is set, and counts are zero, when the request did not
    give the tokens it was asked for; it begins with a status and a colon. `counted`: the numbers of tokens are the
    server's, not those of its messages. `cached_tokens` is 0 where the server does not tell (`tells_cached`). `answer`
    are token ids, or text where there are none."""

    started: float
    finished: float
    arrivals: tuple[tuple[float, int], ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    sent: float | None = None
    counted: bool = True
    tells_cached: bool = True
    answer: tuple[int, ...] | str = ()

    @property
    def status(self) -> str:
        """Status "OK", or the error's beginning: a status of HTTP or gRPC, or a word for what the client saw."""
        return "OK" if self.error is None else self.error.partition(":")[0]

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.started

    @property
    def e2e_s(self) -> float:
        return self.finished - self.started

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, (e2e - ttft) / (n - 1); None for one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def gaps_s(self) -> list[float]:
        """Inter-token latencies, n - 1 of them; none when the number of tokens in each message is unknown. Tokens of
        one message came together: their gaps are 0."""
        if sum(tokens for _, tokens in self.arrivals) != self.output_tokens:
            return []
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
    def from_values(cls, values: Iterable[float]) -> Summary | None:
        array = np.fromiter(values, np.float64)
        if not array.size:
            return None
        p50, p90, p99 = np.percentile(array, (50, 90, 99)).tolist()
        return cls(array.size, float(array.mean()), p50, p90, p99)


LATENCIES = ("ttft", "tpot", "itl", "e2e")


def summarize_latencies(records: Sequence[RequestRecord]) -> dict[str, Summary | None]:
    """Summarize LATENCIES in seconds by name, None where no request has the quantity."""
    good = [r for r in records if r.error is None]
    return {
        "ttft": Summary.from_values(r.ttft_s for r in good),
        "tpot": Summary.from_values(t for r in good if (t := r.tpot_s) is not None),
        "itl": Summary.from_values(gap for r in good for gap in r.gaps_s()),
        "e2e": Summary.from_values(r.e2e_s for r in good),
    }


@dataclass(frozen=True, slots=True)
class LatencyCase:
    """Point of a sweep: `batch` requests sent together."""

    batch: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LatencyPoint:
    """Medians over the repetitions of one case. `prefill_s` is the time until all requests of a run with one output
    token are done, `total_s` that of a run with all of them; `step_s` = (total - prefill) / (output_tokens - 1) is one
    decode step, None for one output token."""

    case: LatencyCase
    prefill_s: float
    total_s: float
    step_s: float | None
    latencies: dict[str, Summary | None]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates over the time from the first request's start to the last one's end."""

    duration_s: float
    completed: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    latencies: dict[str, Summary | None]

    @classmethod
    def from_records(cls, records: Sequence[RequestRecord]) -> Throughput:
        """Compute rates from `records` of one run, at least one."""
        duration = max(r.finished for r in records) - min(r.started for r in records)
        good = [r for r in records if r.error is None]
        prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
        return cls(
            duration_s=duration, completed=len(good),
            requests_per_s=len(good) / duration, output_tokens_per_s=output / duration,
            total_tokens_per_s=(prompt + output) / duration, prompt_tokens=prompt,
            cached_tokens=sum(r.cached_tokens for r in good), output_tokens=output,
            latencies=summarize_latencies(records),
        )  # fmt: skip


REFUSALS = ("429", "503", "RESOURCE_EXHAUSTED")
"""Statuses of a server that has no room now, or takes nothing now."""
LATE_S = 0.010
"""A client whose lag has a 99th percentile beyond this measures itself."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objectives of one request, seconds; None means no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse_limits(cls, text: str) -> Slo:
        """Parse "ttft=450ms,tpot=40ms,e2e=20s". Raises ValueError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            found = re.fullmatch(r"(ttft|tpot|e2e)=([0-9.]+)(ms|s)", part.strip())
            if found is None or f"{found[1]}_s" in limits:
                raise ValueError(f"{part!r} is no limit")
            limits[f"{found[1]}_s"] = float(found[2]) * (1e-3 if found[3] == "ms" else 1.0)
        return cls(**limits)

    def is_met(self, record: RequestRecord) -> bool:
        """Tell whether a request without an error is good. A request of one token has no TPOT, so it meets any."""
        pairs = ((self.ttft_s, record.ttft_s), (self.tpot_s, record.tpot_s), (self.e2e_s, record.e2e_s))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True)
class ClientLag:
    """Lateness of the client itself, seconds. `send`: from when a request could go out to when it did. `loop`: how late
    its event loop ran a timer, and so may have seen a token. `place`: how long due requests waited for one of the
    places that `max_concurrency` allows, which latencies contain; None without that limit."""

    send: Summary | None
    loop: Summary | None
    place: Summary | None
    most_open: int

    @property
    def is_late(self) -> bool:
        return any(lag is not None and lag.p99 > LATE_S for lag in (self.send, self.loop))


@dataclass(frozen=True, slots=True)
class Load:
    """Results of one run of a load test. Of `planned` requests `unsent` were not sent, because a turn before them
    failed. `refused` are those that the server had no room for, `failed` all others without an answer. `refusal` is the
    time from sending to a refusal. `good` met the objectives; its share is of all planned ones."""

    offered_per_s: float
    planned: int
    unsent: int
    refused: int
    failed: int
    statuses: dict[str, int]
    examples: dict[str, str]
    refusal: Summary | None
    good: int | None
    uncounted: int
    tells_cached: bool
    throughput: Throughput
    lag: ClientLag

    @classmethod
    def from_records(
        cls, records: Sequence[RequestRecord], *, planned: int, offered_per_s: float, slo: Slo | None, lag: ClientLag
    ) -> Load:
        """Summarize `records` of one run, at least one."""
        done = [r for r in records if r.error is None]
        refused = [r for r in records if r.status in REFUSALS]
        return cls(
            offered_per_s=offered_per_s, planned=planned, unsent=planned - len(records), refused=len(refused),
            failed=len(records) - len(done) - len(refused), statuses=dict(Counter(r.status for r in records)),
            examples={r.status: r.error for r in reversed(records) if r.error is not None},
            refusal=Summary.from_values(r.finished - (r.started if r.sent is None else r.sent) for r in refused),
            good=None if slo is None else sum(slo.is_met(r) for r in done),
            uncounted=sum(not r.counted for r in done),
            tells_cached=bool(done) and all(r.tells_cached for r in done), throughput=Throughput.from_records(records),
            lag=lag,
        )  # fmt: skip
