"""Is the default eviction policy ever worse than LRU? Synthetic traffic that no policy was tuned on, many cache sizes.

`python -m benchmarks.kv.policies` prints the table of docs/kv-policies.md and returns 1 when the default falls more
than the tolerance below LRU. Nothing here is a model of real users: each workload is a shape that breaks some policy.
Invariant: a workload is a function of its name, the capacity and the seed; all policies replay the same requests.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

from wicore_trt.kv.policy.by_name import DEFAULT_POLICY
from wicore_trt.kv.study.simulate import simulate
from wicore_trt.kv.study.trace import BLOCK_TOKENS, TraceRequest

Chain = tuple[int, ...]
Workload = Callable[[random.Random, int], Iterator[Chain]]
"""workload(rng, capacity): endless requests; scales are relative to the capacity in pages."""

RELATIVE, ABSOLUTE = 0.01, 0.001
"""Tolerance: 1 % of LRU's hit rate, or 0.1 percentage points where that is more."""
CAPACITIES = (1, 2, 7, 50, 400, 4000)
CACHE_FULLS, MIN_TOUCHES = 40, 60_000
"""Touched pages of a replay, in cache-fulls and at least."""


class _Pages:
    """Hands out new page ids."""

    def __init__(self) -> None:
        self._next = count()

    def chain(self, length: int) -> Chain:
        return tuple(islice(self._next, length))


def _length(rng: random.Random, capacity: int) -> int:
    """Pages of a request: log-uniform up to an eighth of the cache, at most 64."""
    return int(min(64, max(1, capacity / 8)) ** rng.random())


def _catalogue(rng: random.Random, pages: _Pages, capacity: int, total: float) -> list[Chain]:
    """Chains of `total` cache-fulls of pages, at least two."""
    chains: list[Chain] = []
    while len(chains) < 2 or sum(map(len, chains)) < total * capacity:
        chains.append(pages.chain(_length(rng, capacity)))
    return chains


def scan_trace(rng: random.Random, capacity: int) -> Iterator[Chain]:
    """Nothing is ever used again."""
    pages = _Pages()
    while True:
        yield pages.chain(_length(rng, capacity))


def loop(size: float) -> Workload:
    """Repeat requests in one order for ever; `size` cache-fulls of them."""

    def requests(rng: random.Random, capacity: int) -> Iterator[Chain]:
        chains = _catalogue(rng, _Pages(), capacity, size)
        while True:
            yield from chains

    return requests


def zipf(exponent: float) -> Workload:
    """Independent draws from ten cache-fulls of fixed popularity."""

    def requests(rng: random.Random, capacity: int) -> Iterator[Chain]:
        chains = _catalogue(rng, _Pages(), capacity, 10)
        weights = [(i + 1) ** -exponent for i in range(len(chains))]
        while True:
            yield from rng.choices(chains, weights, k=256)

    return requests


def shifting(rng: random.Random, capacity: int) -> Iterator[Chain]:
    """Uniform draws from a working set of 0.7 cache-fulls of which one chain is replaced every few requests."""
    pages = _Pages()
    chains = _catalogue(rng, pages, capacity, 0.7)
    while True:
        for _ in range(6):
            yield rng.choice(chains)
        chains[rng.randrange(len(chains))] = pages.chain(_length(rng, capacity))


def one_hit_wonders(rng: random.Random, capacity: int) -> Iterator[Chain]:
    """A hot set of half the cache; three of four requests are new and never come back."""
    pages = _Pages()
    hot = _catalogue(rng, pages, capacity, 0.5)
    while True:
        yield rng.choice(hot) if rng.random() < 0.25 else pages.chain(_length(rng, capacity))


def sessions(rng: random.Random, capacity: int) -> Iterator[Chain]:
    """Conversations that grow by a few pages a turn, with log-normal think times; many at once, a few turns each."""
    pages = _Pages()
    open_sessions: list[tuple[float, Chain]] = []
    clock = 0.0
    mean = max(2.0, capacity / 16)
    while True:
        clock += 1
        due = [s for s in open_sessions if s[0] <= clock]
        if due:
            session = min(due)
            open_sessions.remove(session)
            chain = session[1] + pages.chain(rng.randint(1, 3))
        else:
            chain = pages.chain(_length(rng, capacity))
        yield chain
        if rng.random() < 0.7:
            open_sessions.append((clock + mean * rng.lognormvariate(0, 1.2), chain))


def stack(rng: random.Random, capacity: int) -> Iterator[Chain]:
    """What was used last is used next: reuse by depth in the LRU stack, geometric, mean a third of the cache."""
    pages = _Pages()
    recent = _catalogue(rng, pages, capacity, 2)
    depth = max(1.0, len(recent) / 6)
    while True:
        at = len(recent) - 1 - int(rng.expovariate(1 / depth))
        if at < 0 or rng.random() < 0.05:
            recent.append(pages.chain(_length(rng, capacity)))
            del recent[0]
        else:
            recent.append(recent.pop(at))
        yield recent[-1]


def shared_prefixes(rng: random.Random, capacity: int) -> Iterator[Chain]:
    """A few system prompts with Zipf popularity, each followed by a body of its own."""
    pages = _Pages()
    prompts = _catalogue(rng, pages, capacity, 1.5)
    weights = [(i + 1) ** -0.9 for i in range(len(prompts))]
    while True:
        for prompt in rng.choices(prompts, weights, k=64):
            yield prompt + pages.chain(_length(rng, capacity))


def traitor(rng: random.Random, capacity: int) -> Iterator[Chain]:
    """Whatever class of request was reused stops being reused: short and long requests change roles every three
    cache-fulls."""
    pages, longest = _Pages(), max(2, min(32, capacity // 8))
    for phase in count():
        good, bad = (1, longest) if phase % 2 else (longest, 1)
        chains = [pages.chain(good) for _ in range(max(2, capacity // (2 * good)))]
        touched = 0
        while touched < 3 * capacity:
            request = rng.choice(chains) if rng.random() < 0.5 else pages.chain(bad)
            touched += len(request)
            yield request


def phases(rng: random.Random, capacity: int) -> Iterator[Chain]:
    """Other shapes in turn, each for one to eight cache-fulls, with pages of its own."""
    for first_page in count(0, 1 << 40):
        shape = rng.choice((scan_trace, loop(1.2), loop(0.8), zipf(0.9), stack, one_hit_wonders, shifting, sessions))
        touched, limit = 0, rng.uniform(1, 8) * capacity
        for request in shape(random.Random(rng.random()), capacity):
            yield tuple(page + first_page for page in request)
            touched += len(request)
            if touched > limit:
                break


WORKLOADS: dict[str, Workload] = {
    "scan": scan_trace,
    "loop, 0.8 of the cache": loop(0.8),
    "loop, 1.1 of the cache": loop(1.1),
    "loop, twice the cache": loop(2.0),
    "Zipf 0.6": zipf(0.6),
    "Zipf 0.9": zipf(0.9),
    "Zipf 1.2": zipf(1.2),
    "shifting working set": shifting,
    "hot set and one-hit wonders": one_hit_wonders,
    "sessions with think times": sessions,
    "LRU stack": stack,
    "shared prefixes": shared_prefixes,
    "roles that change": traitor,
    "phases": phases,
}


def trace(name: str, capacity: int, seed: int) -> list[TraceRequest]:
    """The requests of one replay."""
    requests, touched = [], 0
    for chain in WORKLOADS[name](random.Random(f"{name}/{capacity}/{seed}"), capacity):
        requests.append(TraceRequest(chain, len(chain) * BLOCK_TOKENS))
        touched += len(chain)
        if touched >= max(MIN_TOUCHES, CACHE_FULLS * capacity):
            break
    return requests


def shortfall(lru: float, other: float) -> float:
    """By how many tolerances a hit rate is below LRU's; above 1 is too much."""
    return (lru - other) / max(RELATIVE * lru, ABSOLUTE)


def compare_policies(name: str, capacity: int, seeds: int, policy: str) -> tuple[float, float, float]:
    """Mean hit rates of LRU and of `policy` over the seeds, and the largest shortfall of one seed."""
    lru_sum = other_sum = 0.0
    worst = -float("inf")
    for seed in range(seeds):
        requests = trace(name, capacity, seed)
        lru, other = (simulate(requests, p, {"device": capacity}).hit_rate for p in ("lru", policy))
        lru_sum, other_sum = lru_sum + lru, other_sum + other
        worst = max(worst, shortfall(lru, other))
    return lru_sum / seeds, other_sum / seeds, worst


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 when a replay is out of tolerance."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.policies", description=__doc__)
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--capacities", default=",".join(map(str, CAPACITIES)))
    parser.add_argument("--workload", action="append", choices=sorted(WORKLOADS), help="may be given again")
    args = parser.parse_args(argv)
    capacities = [int(text) for text in args.capacities.split(",")]
    print(f"| workload (LRU > {args.policy}) | " + " | ".join(f"{c} pages" for c in capacities) + " |")
    print("|---" * (len(capacities) + 1) + "|", flush=True)
    broken = []
    for name in args.workload or WORKLOADS:
        cells = []
        for capacity in capacities:
            lru, other, worst = compare_policies(name, capacity, args.seeds, args.policy)
            cells.append(f"{lru:.4f} > {other:.4f}" + (" (!)" if worst > 1 else ""))
            if worst > 1:
                broken.append(f"{name}, {capacity} pages: {worst:.1f} tolerances below LRU in the worst seed")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print()
    print("\n".join(broken) or "Within tolerance everywhere.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
