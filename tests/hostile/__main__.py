"""Hostile clients against `wicore serve`'s processes, beside honest ones: `python tests/hostile --surface http`.

Plays inputs that follow from the seed, and prints which answers they got, what the server holds afterwards, and how
long the longest pauses of honest streams were beside those of a second, undisturbed server on the same machine. Exits
with 1 for a crash, an answer of 5xx but 503 (and 504 where the input sets a time), gRPC's INTERNAL or UNKNOWN, a leak,
or a token that is wrong or lost. `--only NUMBER` plays one input again. HOSTILE_KIND=pictures plays inputs of one kind.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

from hostile_campaign import SURFACES, Honest, Server, input_of, judge, run  # noqa: E402


def campaign(surface: str, options: argparse.Namespace) -> bool:
    """Whether all went well."""
    server, control = Server(options.step_ms / 1e3), Server(options.step_ms / 1e3)
    first = options.first if options.only is None else options.only
    count = options.inputs if options.only is None else 1
    try:
        asyncio.run(run(server, surface, options.seed + 1, range(200), options.lanes))  # what is loaded and made once
        time.sleep(2)
        before, memory, pids = server.held(), server.memory(), (server.front, server.engine)
        honest, began = Honest({"attacked": server, "undisturbed": control}, options.streams), time.monotonic()
        time.sleep(2)
        numbers, half = range(first, first + count), first + count // 2
        report = asyncio.run(run(server, surface, options.seed, range(first, half), options.lanes))
        middle = server.memory()
        rest = asyncio.run(run(server, surface, options.seed, range(half, first + count), options.lanes))
        report.outcomes += rest.outcomes
        report.failures += rest.failures
        report.slowest = sorted([*report.slowest, *rest.slowest])[-8:]
        report.spans += rest.spans
        seconds, told = time.monotonic() - began, honest.end()
        after = judge(server, report, before, pids)
        print(f"{surface}: seed {options.seed}, inputs {numbers.start} to {numbers.stop - 1}, {seconds:.0f} s")
        print(report.table())
        for name, ways in told.items():
            for way, seen in ways.items():
                pauses = seen.pop("long")
                print(f"honest, {name}, {way}: {seen}")
                for pause in pauses[-2:] if name == "attacked" else ():
                    print(f"    {pause[0]} s beside the inputs {report.during(*pause)}")
                if name == "attacked" and set(seen["ends"]) - {"ok"}:
                    report.failures.append(f"honest streams over {way}: {seen['ends']}")
        print(f"memory of front and engine, MiB: {memory} before, {middle} in the middle, {server.memory()} after")
        print(f"held before: {before}\nheld after:  {after}")
        for failure in report.failures[:60]:
            print("FAILURE", failure)
        return not report.failures
    finally:
        server.stop()
        control.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/hostile", description=__doc__)
    parser.add_argument("--surface", choices=[*SURFACES, "all"], default="all")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", type=int, help="play this input alone")
    parser.add_argument("--lanes", type=int, default=12, help="hostile clients at a time")
    parser.add_argument("--streams", type=int, default=3, help="honest streams of each way into each server")
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args()
    if options.only is not None and options.surface != "all":
        print(*input_of(options.surface, options.seed, options.only))
    surfaces = list(SURFACES) if options.surface == "all" else [options.surface]
    clean = [campaign(surface, options) for surface in surfaces]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
