"""Can traffic make a policy lose to LRU? Long runs that turn against whatever was learnt, at shares of their own pages.

`python -m benchmarks.kv.adversaries` prints the table of docs/kv-policies.md and returns 1 when the default loses more
than 1 % of LRU's hits (no other policy has a guard). Unlike in `benchmarks.kv.policies`, sizes do not follow the cache,
and one adversary watches a copy of the default policy and turns when its guard does. It must not reach into policies
beyond that verdict. Invariant: a run is a function of its name, the capacity and the seed; all policies replay the same
requests.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from benchmarks.kv.policies import Chain, _Pages
from wicore_trt.kv.policy.by_name import DEFAULT_POLICY
from wicore_trt.kv.policy.cost import CostPolicy
from wicore_trt.kv.study.simulate import simulate
from wicore_trt.kv.study.trace import BLOCK_TOKENS, TraceRequest, count_unique_blocks

REQUESTS = 20_000
SHARES = (0.01, 0.05, 0.2, 0.5)
POLICIES = ("cost", "a2cr")
RELATIVE, ABSOLUTE = 0.01, 0.0002
"""Tolerance: 1 % of LRU's hits, or 0.02 percentage points of all pages where LRU hits next to nothing."""
Prompt = tuple[Chain, int]
Adversary = Callable[[random.Random, int], Iterator[Prompt]]
"""adversary(rng, capacity): endless prompts, each with the length of its answer."""


def _recent(rng: random.Random, chains: Sequence[Chain]) -> int:
    """Draw how many were used since: log-uniform."""
    return int(len(chains) ** rng.random()) - 1


def _answer(rng: random.Random) -> int:
    return int(rng.lognormvariate(5, 1.3))


def chat(rng: random.Random, pages: _Pages) -> Iterator[Prompt]:
    """Conversations under five system prompts, up to 1,500 open; the longer one has been idle, the less likely it goes
    on, but any may: the distance is log-uniform."""
    systems = [pages.chain(3) for _ in range(5)]
    talks: list[Chain] = []
    while True:
        if talks and rng.random() < 0.6:
            chain = talks.pop(_recent(rng, talks)) + pages.chain(rng.randint(1, 2))
        else:
            chain = rng.choice(systems) + pages.chain(int(12 ** rng.random()))
        talks.insert(0, chain)
        del talks[1500:]
        yield chain, _answer(rng)


def scan(rng: random.Random, pages: _Pages, longest: int = 20) -> Iterator[Prompt]:
    while True:
        yield pages.chain(int(longest ** rng.random())), _answer(rng)


def zipf(rng: random.Random, pages: _Pages) -> Iterator[Prompt]:
    documents = [pages.chain(int(16 ** rng.random())) for _ in range(1000)]
    weights = [1 / (i + 1) for i in range(1000)]
    while True:
        yield from ((chain, _answer(rng)) for chain in rng.choices(documents, weights, k=100))


def round_robin(rng: random.Random, pages: _Pages) -> Iterator[Prompt]:
    documents = [pages.chain(int(16 ** rng.random())) for _ in range(rng.choice((50, 200, 800)))]
    while True:
        yield from ((chain, _answer(rng)) for chain in documents)


def turning(rng: random.Random, capacity: int) -> Iterator[Prompt]:
    """Conversations, scans, Zipf and round robin in turn, 300 to 3,000 requests each."""
    pages = _Pages()
    while True:
        for shape in (chat, scan, zipf, round_robin):
            yield from islice(shape(rng, pages), rng.randint(300, 3000))


def bursts(rng: random.Random, capacity: int) -> Iterator[Prompt]:
    """Conversations, and now and then a few hundred long prompts that nobody asks for again."""
    pages = _Pages()
    talks, junk = chat(rng, pages), scan(rng, pages, longest=60)
    while True:
        yield from islice(talks, rng.randint(200, 2000))
        yield from islice(junk, rng.randint(50, 400))


def scanning_tenant(rng: random.Random, capacity: int) -> Iterator[Prompt]:
    """One tenant reads its documents round and round, each time other ones; the others talk."""
    pages = _Pages()
    talks = chat(rng, pages)
    while True:
        documents = [pages.chain(rng.randint(5, 40)) for _ in range(rng.randint(20, 400))]
        for _ in range(rng.randint(1, 4)):
            for chain in documents:
                yield chain, 8
                yield from islice(talks, rng.randint(0, 3))


def long_and_short(rng: random.Random, capacity: int) -> Iterator[Prompt]:
    """Long prompts are used twice, short ones once, and after a while the other way round."""
    pages, again = _Pages(), list[Chain]()
    for phase in range(1 << 30):
        for _ in range(rng.randint(400, 4000)):
            long = rng.random() < 0.2
            chain = pages.chain(rng.randint(60, 120) if long else rng.randint(1, 4))
            if long == (phase % 2 == 0):
                again.insert(0, chain)
            yield chain, 300 if long else 20
            if again and rng.random() < 0.5:
                yield again.pop(_recent(rng, again)), 100
            del again[1500:]


def answers_that_lie(rng: random.Random, capacity: int) -> Iterator[Prompt]:
    """Only short answers are followed by another request, then only long ones."""
    pages, open_talks = _Pages(), list[Chain]()
    for phase in range(1 << 30):
        for _ in range(rng.randint(400, 4000)):
            known = bool(open_talks) and rng.random() < 0.5
            chain = open_talks.pop(_recent(rng, open_talks)) if known else ()
            chain += pages.chain(rng.randint(2, 10))
            short = rng.random() < 0.5
            if short == (phase % 2 == 0):
                open_talks.insert(0, chain)
            del open_talks[1500:]
            yield chain, 10 if short else 400


def after_the_trial(rng: random.Random, capacity: int) -> Iterator[Prompt]:
    """A hot set among scans, until the guard of a copy of `cost` believes; then new prompts return once, soon, and the
    hot set never does, until it believes no more."""
    pages = _Pages()
    twin = CostPolicy(capacity)
    hot, again = [pages.chain(4) for _ in range(max(2, capacity // 8))], list[Chain]()
    while True:
        if twin.lru_decides:
            again.clear()
            chain = rng.choice(hot) if rng.random() < 0.3 else pages.chain(4)
        elif len(again) > max(1, capacity // 16):
            chain = again.pop(0)
        else:
            chain = pages.chain(4)
            again.append(chain)
        _serve(twin, chain)
        yield chain, 100


def _serve(policy: CostPolicy, chain: Chain) -> None:
    policy.touch_chain(chain)
    policy.add_pages([page for page in chain if page not in policy])
    policy.note_answer(chain, 100)
    for page in policy.choose_victims(max(0, len(policy) - policy.capacity)) or ():
        policy.remove_page(page)


ADVERSARIES: dict[str, Adversary] = {
    "chat, scans, Zipf, round robin in turn": turning,
    "chat and bursts of junk": bursts,
    "one tenant scans": scanning_tenant,
    "long and short prompts change roles": long_and_short,
    "short and long answers change roles": answers_that_lie,
    "turns when a trial is won": after_the_trial,
}


def run_of(name: str, share: float, seed: int, count: int = REQUESTS) -> tuple[list[TraceRequest], int]:
    """The requests of a run, and the capacity: a share of its unique pages (of 25,000 for who must know it before)."""
    adversary = ADVERSARIES[name]
    capacity = max(1, int(share * 25_000))
    prompts = islice(adversary(random.Random(f"{name}/{seed}"), capacity), count)
    requests = [TraceRequest(chain, len(chain) * BLOCK_TOKENS, answer) for chain, answer in prompts]
    if adversary is not after_the_trial:
        capacity = max(1, int(share * count_unique_blocks(requests)))
    return requests, capacity


def difference(lru: float, other: float) -> float:
    """Hits over LRU's, as a share of LRU's, below which nothing is lost: (other - lru) / lru."""
    return (other - lru) / max(lru, ABSOLUTE / RELATIVE)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 when the default policy is out of tolerance."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.adversaries", description=__doc__)
    parser.add_argument("--policy", action="append", choices=POLICIES, help="may be given again")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--adversary", action="append", choices=sorted(ADVERSARIES), help="may be given again")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    args = parser.parse_args(argv)
    policies, shares = args.policy or POLICIES, [float(text) for text in args.shares.split(",")]
    title = f"traffic (LRU's hit rate; {', '.join(policies)} over LRU)"
    print(f"| {title} | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
    print("|---" * (len(shares) + 1) + "|", flush=True)
    worst = dict.fromkeys(policies, float("inf"))
    for name in args.adversary or ADVERSARIES:
        cells = []
        for share in shares:
            rates = dict.fromkeys(("lru", *policies), 0.0)
            lowest = dict.fromkeys(policies, float("inf"))
            for seed in range(args.seeds):
                requests, capacity = run_of(name, share, seed, args.requests)
                found = {p: simulate(requests, p, {"device": capacity}).hit_rate for p in rates}
                rates = {p: rates[p] + found[p] / args.seeds for p in rates}
                lowest = {p: min(lowest[p], difference(found["lru"], found[p])) for p in policies}
            worst = {p: min(worst[p], lowest[p]) for p in policies}
            changes = (f"{lowest[p]:+.1%}" + (" (!)" if lowest[p] < -RELATIVE else "") for p in policies)
            cells.append(f"{rates['lru']:.4f}; {', '.join(changes)}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\nWorst seed: " + ", ".join(f"{p} {change:+.2%}" for p, change in worst.items()) + " of LRU's hits.")
    return 1 if worst.get(DEFAULT_POLICY, 0.0) < -RELATIVE else 0


if __name__ == "__main__":
    sys.exit(main())
