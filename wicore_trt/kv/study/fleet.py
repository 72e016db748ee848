"""Replay a trace over several workers, each with its own tiers, and a router that gives each request to one.

The router knows the workers' caches, as from KV events without delay, and how long each is busy. A prompt takes its
uncached tokens over a rate, one prompt after another. It must not know policies. Invariant: a request is served once,
by one worker.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from wicore_trt.errors import ConfigError
from wicore_trt.kv.policy.by_name import make_policy
from wicore_trt.kv.study.simulate import KVBytes, Tiers
from wicore_trt.kv.study.trace import BLOCK_TOKENS, TraceRequest

LEAST_SHARE = 0.3  # of a prompt, that a worker has for affinity to send it there; as routers have it


@dataclass(slots=True)
class FleetReport:
    """Report of a replay. `busy_share`: computed tokens of the busiest worker over the mean. `wait_s`: mean and 99th
    percentile of the seconds that prompts waited for others at their worker."""

    routing: str
    workers: int
    policy: str
    capacity: dict[str, int]
    tokens_per_second: float
    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    busy_share: float = 0.0
    wait_s: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.tokens)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "hit_rate": self.hit_rate}


@dataclass(slots=True)
class _Worker:
    tiers: Tiers
    free_at: float = 0.0
    computed: int = 0

    def wait(self, now: float) -> float:
        return max(0.0, self.free_at - now)


@dataclass(slots=True)
class _Router:
    """Router. `hits` are the blocks of the request that each worker has."""

    workers: list[_Worker]
    tokens_per_second: float
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    turn: int = 0

    def random(self, request: TraceRequest, hits: list[int]) -> int:
        return self.rng.randrange(len(self.workers))

    def round_robin(self, request: TraceRequest, hits: list[int]) -> int:
        self.turn += 1
        return self.turn % len(self.workers)

    def affinity(self, request: TraceRequest, hits: list[int]) -> int:
        """Choose any worker with the longest prefix, if that is LEAST_SHARE of the prompt; else a random one."""
        best = max(hits)
        if best < LEAST_SHARE * len(request.blocks):
            return self.random(request, hits)
        return self.rng.choice([i for i, hit in enumerate(hits) if hit == best])

    def affinity_load(self, request: TraceRequest, hits: list[int]) -> int:
        """Choose the soonest first token: the work ahead of the request, and its tokens to compute."""

        def ready(i: int) -> tuple[float, float]:
            missing = (len(request.blocks) - hits[i]) * BLOCK_TOKENS
            return self.workers[i].wait(request.at_s) + missing / self.tokens_per_second, self.rng.random()

        return min(range(len(hits)), key=ready)


ROUTINGS: dict[str, Callable[[_Router, TraceRequest, list[int]], int]] = {
    "random": _Router.random,
    "round-robin": _Router.round_robin,
    "affinity": _Router.affinity,
    "affinity-load": _Router.affinity_load,
}


def simulate_fleet(
    requests: Sequence[TraceRequest],
    routing: str,
    workers: int,
    policy: str,
    capacity: dict[str, int],
    *,
    tokens_per_second: float,
    progress: Callable[[int, int], None] | None = None,
) -> FleetReport:
    """Replay `requests` over `workers`, each with tiers of `capacity` pages, from the nearest to the farthest.
    `routing` is a name of ROUTINGS. Raises ConfigError for another one or an unknown policy."""
    if routing not in ROUTINGS:
        raise ConfigError(f"No routing is called {routing!r}.", fix=f"Take one of {', '.join(ROUTINGS)}.")
    names, choose, start, fleet = list(capacity), ROUTINGS[routing], time.perf_counter(), list[_Worker]()
    for _ in range(workers):
        policies = [make_policy(policy, capacity[name], victim_cache=i > 0) for i, name in enumerate(names)]
        fleet.append(_Worker(Tiers(names, policies, KVBytes(), inclusive=False)))
    router, waits = _Router(fleet, tokens_per_second), []
    report = FleetReport(routing, workers, policy, dict(capacity), tokens_per_second, requests=len(requests))
    for i, request in enumerate(requests):
        worker = fleet[choose(router, request, [len(each.tiers.look_up(request.blocks)) for each in fleet])]
        hit = len(worker.tiers.serve(request)) * BLOCK_TOKENS
        tokens = len(request.blocks) * BLOCK_TOKENS
        waits.append(worker.wait(request.at_s))
        worker.free_at = max(worker.free_at, request.at_s) + (tokens - hit) / tokens_per_second
        worker.computed += tokens - hit
        report.tokens += tokens
        report.hit_tokens += hit
        if progress is not None and (i % 64 == 0 or i + 1 == len(requests)):
            progress(i + 1, len(requests))
    waits.sort()
    report.wait_s = sum(waits) / len(waits), waits[int(len(waits) * 0.99)]
    total = sum(worker.computed for worker in fleet)
    report.busy_share = max(worker.computed for worker in fleet) * workers / max(1, total)
    report.seconds = time.perf_counter() - start
    return report
