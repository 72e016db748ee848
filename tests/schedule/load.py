"""Requests on a simulated device, and what users see of it, with the graphs of the triton backend and without:

    python -m tests.schedule.load [--rates 8,12] [--launch-ms 0,28,40,55] [--largest 0,384,576,768] [--seeds 1,2,3,4]

27B on an H200 as a formula, 30 s of Poisson arrivals, 0.65 s to the first token as the target and 38 ms for a step.
Prints the mean share of requests with a first token within 0.45 s and 40 ms a token after it, gaps between tokens
(p99, the worst seed's) and the tokens of all seeds, by the size of the largest graph; 0: none. Any machine prints the
same table.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (1, 2)]

from schedule.simulated import H200, Seen, Simulated, ask, make_simulated, note, p99

from wicore_trt.backends.triton.rows import PROMPT_BUCKETS
from wicore_trt.core.engine import EngineCore
from wicore_trt.core.limits import Limits
from wicore_trt.errors import QueueFullError
from wicore_trt.types import FinishReason, GenerateRequest

TTFT_S, TPOT_S = 0.45, 0.04


@dataclass
class Run:
    """Requests that arrive at their times, and what became of them. `refused`: by name, after which time to retry."""

    core: EngineCore
    executor: Simulated
    seen: dict[str, Seen] = field(default_factory=dict)
    refused: dict[str, float] = field(default_factory=dict)

    def add(self, request: GenerateRequest, at: float | None = None) -> None:
        name = request.request_key
        try:
            self.core.add(request)
        except QueueFullError as error:
            self.refused[name] = error.retry_after_s
        else:
            self.seen[name] = Seen(self.executor.now if at is None else at)

    def step(self) -> None:
        note(self.seen, self.core.step(), self.executor.now)

    def play(self, arrivals: list[tuple[float, GenerateRequest]]) -> None:
        left = sorted(arrivals, key=lambda pair: pair[0])
        while left or self.core.has_work:
            if not self.core.has_work:
                self.executor.now = max(self.executor.now, left[0][0])
            while left and left[0][0] <= self.executor.now:
                self.add(left[0][1], left[0][0])
                left.pop(0)
            if self.core.has_work:
                self.step()


def run_on(device, *, seed: int = 0, limits: Limits | None = None, launches: tuple = (), **kwargs) -> Run:
    executor = Simulated(device, noise=0.03, seed=seed)
    if launches:
        executor.graph_sizes, executor.launch_s = launches
    core = make_simulated(executor, **kwargs)
    run = Run(core, executor)
    for i in range(8):  # the model has seen prompts and tokens
        run.core.add(ask(f"warm{i}", 1000, 30))
        run.seen[f"warm{i}"] = Seen(0.0)
    while core.has_work:
        run.step()
    core.limits = limits or Limits()
    return run


def poisson(rate: float, seconds: float, seed: int) -> list[tuple[float, GenerateRequest]]:
    """Prompts of 256 to 2,048 tokens, replies of 64 to 256."""
    rng, at, made = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        made.append((at, ask(f"r{len(made)}", rng.choice((256, 1024, 1024, 2048)), rng.choice((64, 128, 256)))))
    return [(at + 10.0, request) for at, request in made]


def good(run: Run, asked: int) -> tuple[float, float]:
    """Share of the requests that were good, and of those that were begun."""
    served = [one for name, one in run.seen.items() if name[0] == "r" and one.last.finish_reason is FinishReason.LENGTH]
    count = sum(one.ttft <= TTFT_S and one.tpot <= TPOT_S for one in served)
    return count / asked, count / max(1, len(served))


def graphs_of(largest: int) -> dict[int, tuple[int, ...]]:
    """`Executor.graph_sizes` of the triton backend without graphs of more tokens than `largest`; 0: one of a token, so
    that all steps with prompts are launched."""
    sizes = [(rows, tokens - rows) for rows, found in PROMPT_BUCKETS.items() for tokens in found if tokens <= largest]
    rows = sorted({n for n, _ in sizes})
    return {n: tuple(sorted({tokens for more, tokens in sizes if more >= n})) for n in rows} or {64: (1,)}


def measure(rate: float, launch_s: float, largest: int, seeds: list[int]) -> str:
    shares, gaps, tokens = [], [], 0
    for seed in seeds:
        arrivals = poisson(rate, 30.0, seed)
        launches = (graphs_of(largest), launch_s)
        run = run_on(H200, limits=Limits(60.0, 0.65), target_s=0.95 * TPOT_S, launches=launches)
        run.play(arrivals)
        asked = [one for name, one in run.seen.items() if name[0] == "r"]
        shares.append(good(run, len(arrivals))[0])
        gaps.append(p99([gap for one in asked for gap in one.gaps]))
        tokens += sum(len(one.tokens) for one in asked)
    share, gap = statistics.mean(shares), 1e3 * max(gaps)
    return f"{rate:4.0f}/s {1e3 * launch_s:3.0f} ms {largest:4}: {share:.3f} good, gaps {gap:.0f} ms, {tokens} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.schedule.load", description=__doc__)
    for name, given in (
        ("rates", "8,12"),
        ("launch-ms", "0,28,40,55"),
        ("largest", "0,384,576,768"),
        ("seeds", "1,2,3,4"),
    ):
        parser.add_argument(f"--{name}", default=given, type=lambda text: [float(n) for n in text.split(",")])
    options = parser.parse_args()
    for rate in options.rates:
        for launch_ms in options.launch_ms:
            for largest in options.largest:
                print(measure(rate, launch_ms / 1e3, int(largest), [*map(int, options.seeds)]), flush=True)


if __name__ == "__main__":
    main()
