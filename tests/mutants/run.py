"""Apply each mutant of `cases.py` to a copy of the package and see it caught: `make test-mutants`.

A mutant counts as caught when its command fails; the same command must pass on the code as it is, within CPU_S each.
Prints what caught it and when.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cases import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
CPU_S = 400  # of processor time: the campaign takes 60 s, and 110 s where another program shares the core
CAMPAIGN = ("tests.oracle", "--lives", "450", "--seed", "7", "--first")


def command(package: Path, caught_by: str) -> list[str]:
    under = [sys.executable, str(Path(__file__).with_name("under.py")), str(package)]
    if caught_by == "campaign":
        return [*under, *CAMPAIGN]
    return [*under, "pytest", "-q", "-x", "-p", "no:cacheprovider", *caught_by.split()]


def copy_package(target: Path) -> Path:
    shutil.copytree(ROOT / "wicore_trt", target / "wicore_trt", ignore=shutil.ignore_patterns("__pycache__"))
    return target


def attempt(package: Path, caught_by: str) -> tuple[int, float, str]:
    """Exit status (negative: killed, as when its time is up), seconds, and the output."""
    environ = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    begun = time.monotonic()
    done = subprocess.run(
        command(package, caught_by),
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S)),
    )
    return done.returncode, time.monotonic() - begun, done.stdout + done.stderr


def mutated(mutant: Mutant, target: Path) -> Path:
    package = copy_package(target)
    path = package / "wicore_trt" / mutant.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return package


def moved() -> list[str]:
    """Cases whose text the code does not have exactly once any more."""
    found = [(m, (ROOT / "wicore_trt" / m.file).read_text(encoding="utf-8").count(m.old)) for m in MUTANTS]
    return [
        f"wicore_trt/{m.file} has {count} times, and should have once:\n{m.old}" for m, count in found if count != 1
    ]


def judged(mutant: Mutant) -> tuple[bool, str]:
    """Whether a mutant was caught, and a line about it."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        status, seconds, output = attempt(mutated(mutant, Path(directory)), mutant.caught_by)
    name = f"{mutant.file}: {mutant.old.strip().splitlines()[-1].strip()[:70]}"
    if status <= 0:
        return False, f"SURVIVED ({'time is up' if status else 'passed'}, {seconds:.0f} s)  {name}"
    what = [
        line for line in output.splitlines() if "tests.oracle --life" in line or line.startswith(("FAILED", "ERROR"))
    ]
    return True, f"caught in {seconds:5.1f} s by {mutant.caught_by}: {what[0][:60] if what else output[-60:]!r}  {name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", help="mutants whose file or text has this in it")
    options = parser.parse_args()
    if gone := moved():
        print("These cases no longer fit the code; move them with it:", *gone, sep="\n")
        return 1
    chosen = [m for m in MUTANTS if options.only is None or options.only in m.file + m.old]
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        package = copy_package(Path(directory))
        for caught_by in sorted({mutant.caught_by for mutant in chosen}):
            status, seconds, output = attempt(package, caught_by)
            print(
                f"the code as it is, {caught_by}: {'passes' if not status else output[-3000:]} in {seconds:.0f} s",
                flush=True,
            )
            if status:
                return 1
    survivors = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for caught, line in pool.map(judged, chosen):
            survivors += not caught
            print(line, flush=True)
    print(f"{len(chosen)} mutants, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
