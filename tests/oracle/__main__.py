"""The oracle campaign by hand: `python -m tests.oracle --lives 20000 --jobs 2 --seed 1`.

`--life SEED [--keep 0,3,7]` plays one life again and prints what happens in it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

if os.environ.get("PYTHONHASHSEED") != "0" and __name__ == "__main__":  # sets of bytes have an order of their own
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [*sys.orig_argv])
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oracle.device import Failure
from oracle.kill import kills
from oracle.life import Life, plan_of
from oracle.real import Real
from oracle.runner import campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--lives", type=int, default=0, help="lives in virtual time")
    parser.add_argument("--real-lives", type=int, default=0, help="lives with real threads")
    parser.add_argument("--kills", type=int, default=0, help="lives that end by kill -9")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--life", type=int, help="play the life of this seed again")
    parser.add_argument("--keep", type=lambda text: [int(n) for n in text.split(",")], help="only these happenings")
    parser.add_argument("--real", action="store_true", help="with --life: real threads")
    parser.add_argument("--first", action="store_true", help="end with the first failure; ask for no coverage")
    options = parser.parse_args()
    if options.life is not None:
        return again(options.life, options.keep, real=options.real)
    failed = False
    for lives, real in ((options.lives, False), (options.real_lives, True)):
        if lives:
            report = campaign(lives, seed=options.seed, jobs=options.jobs, real=real, first_only=options.first)
            print(report, flush=True)
            unreached = [] if real or options.first else report.unreached()
            for line in unreached:
                print(f"not reached often enough: {line}")
            failed |= bool(report.failed or unreached)
    if options.kills:
        killed = kills(options.kills, seed=options.seed, jobs=options.jobs)
        print(killed, flush=True)
        failed |= bool(killed.failed)
    return int(failed)


def again(seed: int, keep: list[int] | None, *, real: bool) -> int:
    setup, happenings = plan_of(seed, real=real)
    counts: Counter[str] = Counter()
    print(setup)
    with tempfile.TemporaryDirectory(prefix="oracle-") as path:
        chosen = happenings if keep is None else [happenings[i] for i in keep]
        life = Life(setup, chosen, Path(path), counts, Real(seed, replace(setup.speeds)) if real else None)
        try:
            life.run()
        except Failure as failure:
            return tell(life, str(failure), 1)
    print(dict(counts))
    return tell(life, "right", 0)


def tell(life: Life, end: str, status: int) -> int:
    print(*(f"{when:.6f} {happening}" for when, happening in life.trace), end, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
