"""The promise of loads from disk, held against random worlds: never slower than computing all or loading all.

`python -m benchmarks.kv.disk_worlds [--worlds 200] [--longest 131072] [--seed 0] [--worst 10]`. Each world has a disk
that gives from a tenth to ten times of what it was rated, may change while it is read and may be slow now and then,
and some requests. Each is run by the product, by one that computes everything, and by one that loads all there is.
Times are virtual (`disk_simulation.py`): one seed gives the same table anywhere. Exit code 1 where the promise breaks.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.kv.disk_simulation import Case
from benchmarks.kv.virtual_disk import PAGE_TOKENS, World

FACTOR, GRACE_S = 1.10, 0.03
"""No slower than this factor of the better pure choice, and the time of two of the shortest steps."""


def random_case(seed: int, longest: int = 131_072) -> Case:
    """A world and its requests."""
    rng = random.Random(seed)

    def near(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    rate = near(0.1e9, 7e9)
    disk, when = [(0.0, rate)], 0.0
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        when += near(0.05, 1.5)
        disk.append((when, min(8e9, max(0.05e9, disk[-1][1] * near(0.1, 10)))))
    rated = None if rng.random() < 0.2 else rate * near(0.1, 10)
    world = World(
        tuple(disk),
        latency_s=near(1e-4, 5e-3),
        slow_in=rng.choice((0, 0, 0, 30, 200)),
        slow_s=near(0.05, 0.5),
        speed=near(0.5, 2.0),
    )
    prompts = []
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        size = int(near(1024, longest)) // PAGE_TOKENS * PAGE_TOKENS
        host = rng.choice((0, 0, 0, 0, 0, -1, rng.randrange(size // PAGE_TOKENS)))
        prompts.append((rng.choice((0.0, rng.uniform(0.0, 1.0))), size, host))
    return Case(world, tuple(prompts), rated, rng.random() < 0.8, seed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Mean seconds to the first token of a world's requests, by who decides."""

    case: Case
    product: float
    compute: float
    load: float

    @property
    def over(self) -> float:
        """Over the better of both, which an allowance for two short steps is added to."""
        return self.product / (min(self.compute, self.load) + GRACE_S / self.case.world.speed)

    @property
    def holds(self) -> bool:
        return self.product <= FACTOR * min(self.compute, self.load) + GRACE_S / self.case.world.speed

    @property
    def below_both(self) -> bool:
        return self.product < 0.99 * min(self.compute, self.load)

    def __str__(self) -> str:
        case = self.case
        disk = " ".join(f"{when:.2f}:{rate / 1e9:.2f}" for when, rate in case.world.disk)
        rated = "-" if case.rated is None else f"{case.rated / 1e9:.2f}"
        asked = " ".join(f"{when:.2f}:{size}" + f"/{host}" * bool(host) for when, size, host in case.prompts)
        return (
            f"{case.seed:>6} {self.product:8.3f}{self.compute:8.3f}{self.load:8.3f}{self.over:7.2f}  "
            f"[{disk}] rated {rated} speed {case.world.speed:.2f} slow {case.world.slow_in} [{asked}]"
        )


def judge(case: Case) -> Verdict:
    """Run a world three times."""
    times = {arm: statistics.mean(case.run(arm)[0]) for arm in ("product", "compute", "load")}
    return Verdict(case, **times)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.disk_worlds", description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--longest", type=int, default=131_072, help="longest prefix in tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the first world; the others follow")
    parser.add_argument("--worst", type=int, default=10, help="print so many")
    parser.add_argument("--launch-ms", type=float, default=0.0, help="`World.launch_s`")
    options = parser.parse_args(arguments)
    cases = [random_case(options.seed + n, options.longest) for n in range(options.worlds)]
    launched = [replace(case, world=replace(case.world, launch_s=options.launch_ms / 1e3)) for case in cases]
    found = [judge(case) for case in launched]
    found.sort(key=lambda verdict: -verdict.over)
    print("  seed  product compute    load   over  disk, GB/s from a second on; requests: second, tokens/in host")
    for verdict in found[: options.worst]:
        print(verdict)
    broken = sum(not verdict.holds for verdict in found)
    below, gain = sum(v.below_both for v in found), statistics.geometric_mean(v.over for v in found)
    print(f"{len(found)} worlds: {broken} break the promise, {below} are below both, mean {gain:.3f} of the better")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
