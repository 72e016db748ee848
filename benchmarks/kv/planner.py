"""Compute-or-load planner against the best split and against recomputing, over the whole grid: a table on stdout.

`python -m benchmarks.kv.planner [--noise 0.08] [--seed 0]`. Times are those of `planner_simulation.py`, no
clock is read, so the same seed gives the same table anywhere. Exit code 1 when a cell misses a goal.
"""

from __future__ import annotations

import argparse
import datetime
import random
import statistics
import sys
from collections.abc import Sequence

from benchmarks.kv.planner_simulation import CellResult, Noise, grid, run_cell, run_stalls
from wicore_trt.bench.report import describe_machine

ORACLE_GOAL, RECOMPUTE_GOAL = 1.10, 1.03


def cell_row(outcome: CellResult) -> str:
    """One cell: times in seconds, and the planner's over the oracle's and over recomputing."""
    cell = outcome.cell
    disk = "-" if cell.placement == "host" else f"{cell.disk_rate / 1e9:g}"
    return (
        f"{cell.profile.name:<27}{cell.tokens // 1024:>4}K  {cell.placement:<5}{disk:>5}  {cell.load.name:<11}"
        f"{outcome.choice.decision:<8}{outcome.oracle:>9.3f}{outcome.planner:>9.3f}{outcome.recompute:>10.3f}"
        f"{outcome.over_oracle:>8.3f}{outcome.over_recompute:>8.3f}"
    )


HEADER = (
    f"{'model and device':<27}{'prefix':>5}  {'tier':<5}{'GB/s':>5}  {'load':<11}{'decision':<8}{'oracle':>9}"
    f"{'planner':>9}{'recompute':>10}{'/oracle':>8}{'/recomp':>8}"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the grid, the worst cells and the worst stall."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.planner", description=__doc__.splitlines()[0])
    parser.add_argument("--noise", type=float, default=0.08, help="spread of the estimates, cut at 2.5 times it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=131_072, help="longest prefix in tokens")
    parser.add_argument("--worst", type=int, default=0, help="print only this many worst cells; 0 prints all")
    options = parser.parse_args(arguments)
    noise, rng = Noise(options.noise, 2.5 * options.noise), random.Random(options.seed)
    host = describe_machine()
    print(f"{datetime.date.today()}, simulated on {host['cpu']}; noise {noise.spread:g}, seed {options.seed}")
    outcomes = [run_cell(cell, noise, rng) for cell in grid(longest=options.longest)]
    stalls = [outcome for cell in grid(longest=options.longest) for outcome in run_stalls(cell, noise, rng)]
    print(HEADER)
    ranked = sorted(outcomes, key=lambda outcome: -outcome.over_oracle)
    for outcome in ranked[: options.worst] if options.worst else outcomes:
        print(cell_row(outcome))
    late = max(outcomes, key=lambda outcome: outcome.over_recompute)
    stuck = max(stalls, key=lambda outcome: outcome.over_recompute)
    for title, outcome in (("oracle", ranked[0]), ("recompute", late), ("recompute, disk stalls for ever", stuck)):
        print(f"worst over {title}:\n{cell_row(outcome)}")
    median = statistics.median(outcome.recompute / outcome.planner for outcome in outcomes)
    missed = [o for o in outcomes if o.over_oracle > ORACLE_GOAL or o.over_recompute > RECOMPUTE_GOAL]
    print(f"{len(outcomes)} cells, {len(missed)} miss a goal; median {median:.2f} times as fast as recomputing")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
