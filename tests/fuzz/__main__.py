"""`python -m tests.fuzz --inputs N --jobs J --seed S`: run broken models against the product and print what came of it.

Exits 1 when a case ended in a traceback, in a hang, or was accepted and is not what its files say. `--only NUMBER` runs
one case again and keeps its files in the directory that it prints.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .runner import case_of, judge, run_command


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="run this case alone")
    options = parser.parse_args()
    if options.only is not None:
        kind, case = case_of(options.seed, options.only)
        scratch = Path(tempfile.mkdtemp(prefix="fuzz-"))
        result, detail = judge(case, scratch, command=True)
        print(f"{kind}, {case.target}: {result}\n{detail}\n{scratch}")
        return 0
    report = run_command(options.seed, range(options.first, options.first + options.inputs), options.jobs)
    print(f"seed {options.seed}, cases {options.first} to {options.first + options.inputs - 1}\n{report.table()}")
    for number, kind, result, detail in report.failures[:40]:
        print(f"case {number} ({kind}): {result}: {detail[:400]}")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
