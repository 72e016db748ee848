"""What `benchmarks.kv.sessions` says: medians per arm, the cost without reuse, and whether each requirement held.

Arithmetic and text; it must not know engines or settings. Invariants: an arm is judged against the unlimited arm of
its own round; an answer without a counterpart in the unlimited arm counts as different.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

from benchmarks.kv.workload import FinishedRequest, Turn
from wicore_trt.bench.measure import Throughput
from wicore_trt.types import EngineStats

DEVICE, HOST, DISK, UNLIMITED = "device only", "+ host", "+ host + disk", "unlimited device"
RESTART, NEXT = "restart, warm disk", "unlimited, next turn"
BASELINES = {DEVICE: UNLIMITED, HOST: UNLIMITED, DISK: UNLIMITED, UNLIMITED: UNLIMITED, RESTART: NEXT, NEXT: NEXT}
"""The arm that does the same work with every page on the device."""
TIERS = ("device", "host", "disk")
EXPECTED = {HOST: ("host",), DISK: ("host", "disk"), RESTART: ("host", "disk")}

SHARE_GOAL_PERCENT = 80.0
RESTART_GOAL_PERCENT = 80.0
COST_GOAL_PERCENT = 1.0


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One arm in one round. `hits` are prompt tokens by the tier that saved them; `tiers` is what the engine said of
    its tiers at the end."""

    arm: str
    round: int
    served: Sequence[FinishedRequest]
    hits: Mapping[str, int]
    tiers: Sequence[Mapping[str, Any]]

    @property
    def throughput(self) -> Throughput:
        return Throughput.from_records([s.record for s in self.served])


def tier_hits(before: EngineStats, after: EngineStats) -> dict[str, int]:
    """Prompt tokens that each tier saved between two readings; an engine without tiers has the device alone."""

    def of(stats: EngineStats) -> dict[str, int]:
        tiers = {tier.tier: tier.hit_tokens for tier in stats.kv.tiers}
        return tiers or {"device": stats.cached_prompt_tokens}

    start = of(before)
    return {tier: count - start.get(tier, 0) for tier, count in of(after).items()}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers held against those of the unlimited arm. `differing` names (arm, round, turn)."""

    requests: int
    tokens: int
    differing: Sequence[tuple[str, int, Turn]]


def compare_answers(runs: Sequence[ArmRun]) -> Comparison:
    """Every answer of every arm against the first round's unlimited arm, later rounds of that arm included."""
    reference = {s.turn: s.token_ids for r in runs if r.round == 0 and r.arm in (UNLIMITED, NEXT) for s in r.served}
    requests = tokens = 0
    differing = []
    for run in runs:
        if run.round == 0 and run.arm in (UNLIMITED, NEXT):
            continue
        for served in run.served:
            requests += 1
            tokens += len(served.token_ids)
            if served.token_ids != reference.get(served.turn):
                differing.append((run.arm, run.round, served.turn))
    return Comparison(requests, tokens, differing)


@dataclass(frozen=True, slots=True)
class NoReuse:
    """Traffic without reuse. `ratios` are throughputs with tiers / without, one per group of turns A B B A;
    `drain_s` is how long each turn's copies went on after its last token. `differing` counts answers that differ."""

    requests: int
    tokens: int
    differing: int
    ratios: Sequence[float]
    drain_s: Sequence[float]
    tiers: Sequence[str]
    arm: str = DISK

    def summary(self) -> dict[str, Any]:
        """Median, quartiles and a 95 % interval of the median (order statistics), as percent of throughput lost."""
        costs = sorted(100 * (1 - ratio) for ratio in self.ratios)
        low, high = median_interval(costs)
        quarters = statistics.quantiles(costs, n=4) if len(costs) > 1 else [costs[0]] * 3
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "differing": self.differing,
            "groups": len(costs),
            "cost_percent": {"p50": quarters[1], "p25": quarters[0], "p75": quarters[2], "low": low, "high": high},
            "drain_ms": 1e3 * statistics.median(self.drain_s),
            "ratios": list(self.ratios),
        }


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """At least 95 % confidence interval of the median of an ascending sample, between its order statistics: the
    number of values below the median is binomial. The whole range for fewer than six values, which give less."""
    n, rank = len(ordered), 0
    while sum(comb(n, k) for k in range(rank + 2)) <= 0.025 * 2**n:
        rank += 1
    return ordered[rank], ordered[n - 1 - rank]


def arm_results(runs: Sequence[ArmRun]) -> list[dict[str, Any]]:
    """Medians over the rounds, one result per arm in the order of BASELINES; times in ms."""
    by_round = {(run.arm, run.round): run for run in runs}
    results = []
    for arm, baseline in BASELINES.items():
        own = [run for run in runs if run.arm == arm]
        if not own:
            continue

        def median(value: Callable[[Throughput], float], own: list[ArmRun] = own) -> float:
            return statistics.median(value(run.throughput) for run in own)

        shares = [
            by_round[baseline, run.round].throughput.duration_s / run.throughput.duration_s
            for run in own
            if (baseline, run.round) in by_round
        ]
        results.append(
            {
                "arm": arm,
                "rounds": len(own),
                "requests": own[0].throughput.completed,
                "prompt_tokens": own[0].throughput.prompt_tokens,
                "output_tokens_per_s": median(lambda t: t.output_tokens_per_s),
                "prompt_tokens_per_s": median(lambda t: t.prompt_tokens / t.duration_s),
                "share_percent": 100 * statistics.median(shares) if shares else None,
                "shares_percent": [100 * share for share in shares],
                "ttft_p50_ms": median(lambda t: 1e3 * t.latencies["ttft"].p50 if t.latencies["ttft"] else float("nan")),
                "ttft_p99_ms": median(lambda t: 1e3 * t.latencies["ttft"].p99 if t.latencies["ttft"] else float("nan")),
                "hit_tokens": {
                    tier: statistics.median(run.hits[tier] for run in own) for tier in TIERS if tier in own[0].hits
                },
                "tiers": [dict(tier) for tier in own[-1].tiers],
            }
        )
    return results


@dataclass(frozen=True, slots=True)
class Requirement:
    """`held` is None when it was not judged."""

    name: str
    figure: str
    held: bool | None

    def line(self) -> str:
        verdict = {True: "held", False: "NOT held", None: "not judged"}[self.held]
        return f"{verdict}: {self.name}: {self.figure}"


def requirements(
    results: Sequence[Mapping[str, Any]], comparison: Comparison, no_reuse: NoReuse | None, *, judge_speed: bool
) -> list[Requirement]:
    """One entry per requirement. Speed is judged only where the run was long enough for it."""
    by_arm = {result["arm"]: result for result in results}
    differing = len(comparison.differing) + (no_reuse.differing if no_reuse else 0)
    figure = f"{comparison.requests:,} requests and {comparison.tokens:,} tokens compared, {differing} requests differ"
    if comparison.differing:
        arm, number, (session, turn) = comparison.differing[0]
        figure += f"; the first: {arm}, round {number}, session {session}, turn {turn}"
    if no_reuse:
        figure += f" (and {no_reuse.requests:,} without reuse, with and without tiers)"
    found = [Requirement("token ids as with an unlimited device pool", figure, not differing)]
    absent = [
        f"{arm}: no {tier}" for arm, tiers in EXPECTED.items() if arm in by_arm for tier in tiers
        if tier not in by_arm[arm]["hit_tokens"]
    ]  # fmt: skip
    absent += (
        [f"without reuse: no {tier}" for tier in EXPECTED[no_reuse.arm] if tier not in no_reuse.tiers]
        if no_reuse
        else []
    )
    found.append(Requirement("tiers are reported", ", ".join(absent) or "all that the settings name", not absent))
    if (with_tiers := by_arm.get(DISK)) and with_tiers["share_percent"] is not None:
        share = with_tiers["share_percent"]
        text = f"{share:.1f} % of unlimited, at least {SHARE_GOAL_PERCENT:.0f} %"
        found.append(
            Requirement("throughput with all tiers", text, share >= SHARE_GOAL_PERCENT if judge_speed else None)
        )
    if RESTART in by_arm and NEXT in by_arm:
        saved, possible = (sum(by_arm[arm]["hit_tokens"].values()) for arm in (RESTART, NEXT))
        part = 100 * saved / possible if possible else 0.0
        text = f"{part:.1f} % of the tokens that an unlimited pool saves, at least {RESTART_GOAL_PERCENT:.0f} %"
        found.append(Requirement("restart with a warm disk", text, part >= RESTART_GOAL_PERCENT))
    if no_reuse:
        cost = no_reuse.summary()["cost_percent"]
        text = (
            f"{cost['p50']:+.2f} % (95 % interval {cost['low']:+.2f} to {cost['high']:+.2f}), "
            f"at most {COST_GOAL_PERCENT:.0f} %"
        )
        found.append(
            Requirement("cost of tiers without reuse", text, cost["p50"] <= COST_GOAL_PERCENT if judge_speed else None)
        )
    return found


def markdown(results: Sequence[Mapping[str, Any]], no_reuse: NoReuse | None) -> str:
    """The tables that a person reads."""
    columns = (
        "arm", "generated tokens/s", "prompt tokens/s", "of unlimited", "TTFT p50", "TTFT p99",
        *(f"hits {tier}" for tier in TIERS), "of prompt tokens",
    )  # fmt: skip
    lines = [_row(columns), _row(["---"] * len(columns))]
    for r in results:
        hits, share = r["hit_tokens"], r["share_percent"]
        cells = (
            r["arm"],
            f"{r['output_tokens_per_s']:.1f}",
            f"{r['prompt_tokens_per_s']:,.0f}",
            "-" if share is None else f"{share:.1f} %",
            *(f"{r[key]:,.0f} ms" for key in ("ttft_p50_ms", "ttft_p99_ms")),
            *(f"{hits[tier]:,.0f}" if tier in hits else "-" for tier in TIERS),
            f"{100 * sum(hits.values()) / r['prompt_tokens']:.1f} %",
        )
        lines.append(_row(cells))
    if no_reuse:
        summary = no_reuse.summary()
        cost = summary["cost_percent"]
        lines += [
            "",
            f"Without reuse, {summary['groups']} groups of turns A B B A: {no_reuse.arm} cost {cost['p50']:+.2f} % of "
            f"throughput (quartiles {cost['p25']:+.2f} and {cost['p75']:+.2f}); copies went on "
            f"{summary['drain_ms']:.1f} ms after a turn's last token.",
        ]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def as_json(results: Sequence[Mapping[str, Any]], no_reuse: NoReuse | None) -> list[dict[str, Any]]:
    """The results for the JSON document."""
    found = [dict(result) for result in results]
    return found if no_reuse is None else [*found, {"no_reuse": no_reuse.summary()}]


def requirement_json(found: Sequence[Requirement]) -> list[dict[str, Any]]:
    return [asdict(requirement) for requirement in found]
