"""Runs cases against the product and judges each: refused in one line, built right, or one of three failures.

Cases run in a forked child per batch, in process, under limits of memory and CPU time; a share runs through the real
command line. Limits are CPU seconds, so a busy machine fails nothing. Invariant: the case of a number depends on the
seed and that number alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import numpy as np

from .mutations import KINDS, Case
from .reader import differences, read_gguf, read_hf, tokenizer_differences

REFUSED, BUILT, TRACEBACK, HANG, DIFFERENT = "refused", "built right", "traceback", "hang", "accepted and different"
FAILURES = (TRACEBACK, HANG, DIFFERENT)
CPU_SECONDS = 2.0
MEMORY = 500 << 20
COMMAND_SHARE = 200  # one of so many cases goes through the command line as well
_BATCH = 250
_BATCH_SECONDS = 900.0  # wall clock; only a child stuck in C code takes that long


@dataclass
class Report:
    """How many cases of each kind ended how, and the failures as (number, kind, result, detail)."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[tuple[int, str, str, str]] = field(default_factory=list)

    def add(self, number: int, kind: str, result: str, detail: str) -> None:
        self.counts[kind, result] += 1
        if result in FAILURES:
            self.failures.append((number, kind, result, detail))

    def table(self) -> str:
        """Counts per kind as lines of text."""
        results = (REFUSED, BUILT, *FAILURES)
        lines = [f"{'':12}" + "".join(f"{r:>24}" for r in results)]
        for kind in KINDS:
            lines.append(f"{kind:12}" + "".join(f"{self.counts[kind, r]:>24}" for r in results))
        return "\n".join(lines)


class _OutOfTime(BaseException):
    """The case used up its CPU time."""


def case_of(seed: int, number: int) -> tuple[str, Case]:
    """Kind and case of a number."""
    rng = np.random.default_rng([seed, number])
    kind = list(KINDS)[number % len(KINDS)] if number % 60 else "whole"
    if kind == "whole" and number % 60:  # most of what is whole would only repeat itself
        kind = "gguf"
    return kind, KINDS[kind](rng)


def run_command(seed: int, numbers: range, jobs: int = 1) -> Report:
    """Run the cases and report."""
    import wicore_trt.checkpoint.convert
    import wicore_trt.checkpoint.gguf
    import wicore_trt.checkpoint.tokenizer_check
    import wicore_trt.cli.convert  # noqa: F401 -- imported before the forks

    report = Report()
    batches = [numbers[i : i + _BATCH] for i in range(0, len(numbers), _BATCH)]
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda batch: _batch(seed, batch), batches):
            for row in found:
                report.add(*row)
    return report


def _batch(seed: int, numbers: range) -> list[tuple[int, str, str, str]]:
    """The results of a batch; a child that dies or stands still is a failure of the case that it was at."""
    found: list[tuple[int, str, str, str]] = []
    while len(found) < len(numbers):
        rest = numbers[len(found) :]
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _child(seed, rest, writer)
        os.close(writer)
        fired: list[bool] = []
        timer = threading.Timer(_BATCH_SECONDS, _kill, (child, fired))
        timer.start()
        with os.fdopen(reader, "r", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                number, kind, result, detail = line.rstrip("\n").split("\t", 3)
                found.append((int(number), kind, result, detail))
        timer.cancel()
        os.waitpid(child, 0)
        if len(found) < len(numbers):
            number = numbers[len(found)]
            found.append((number, case_of(seed, number)[0], HANG if fired else TRACEBACK, "the process died"))
    return found


def _kill(child: int, fired: list[bool]) -> None:
    fired.append(True)
    os.kill(child, signal.SIGKILL)


def _child(seed: int, numbers: range, pipe: int) -> None:
    """Never returns."""
    status = 1
    try:
        signal.signal(signal.SIGPROF, _expire)
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # as memory of threads counts below
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        scratch = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        with os.fdopen(pipe, "w", encoding="utf-8", errors="replace") as out:
            for number in numbers:
                kind, case = case_of(seed, number)
                result, detail = judge(case, scratch, command=number % COMMAND_SHARE == 7)
                flat = " ".join(detail.split())[:2000]
                out.write(f"{number}\t{kind}\t{result}\t{flat}\n")
                out.flush()
        shutil.rmtree(scratch, ignore_errors=True)
        status = 0
    finally:
        os._exit(status)


def _expire(signum: int, frame: FrameType | None) -> None:
    raise _OutOfTime


def judge(case: Case, scratch: Path, *, command: bool = False) -> tuple[str, str]:
    """Convert the case's files and say how that ended."""
    model, output = scratch / "model", scratch / "out"
    for path in (model, output):
        shutil.rmtree(path, ignore_errors=True)
    model.mkdir()
    for name, data in case.files.items():
        (model / name).write_bytes(data)
    source = model / case.given
    arguments = ["convert", str(source), str(output), "--dtype", case.target]
    code, out, err = _in_process(arguments)
    result = _verdict(code, err, str(model)) or _compared(source, output, case)
    if command and result[0] not in FAILURES:
        shutil.rmtree(output, ignore_errors=True)
        through = _command(arguments)
        again = _verdict(through.returncode, through.stderr, str(model)) or _compared(source, output, case)
        if again[0] != result[0]:
            return DIFFERENT, f"in process {result}, through the command line {again}"
        return again
    return result


def _in_process(arguments: list[str]) -> tuple[int | None, str, str]:
    from wicore_trt.cli.main import run_command as wicore

    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            try:
                code = wicore(arguments)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    except _OutOfTime:
        return None, out.getvalue(), err.getvalue()
    except BaseException:
        return 1, out.getvalue(), traceback.format_exc()
    return code, out.getvalue(), err.getvalue()


def _command(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The same through a process of its own, with a start-up's time on top."""
    return subprocess.run(
        [sys.executable, "-m", "wicore_trt.cli.main", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (20, 20)),
    )


def _verdict(code: int | None, err: str, place: str) -> tuple[str, str] | None:
    """How a run ended, or None when it accepted its input."""
    if code is None or code < 0:
        return HANG, err
    if "Traceback" in err or "bug in wicore" in err:
        return TRACEBACK, err
    if code == 0:
        return None
    lines = [line for line in err.splitlines() if line.strip() and line != "convert ..."]
    if len(lines) != 1 or len(lines[0]) > 1500 or not lines[0].isprintable():
        return TRACEBACK, f"not one line of text: {err!r}"
    if place not in lines[0]:
        return TRACEBACK, f"names no file: {err}"
    return REFUSED, lines[0]


def _compared(source: Path, output: Path, case: Case) -> tuple[str, str]:
    try:
        model = read_gguf(source) if case.given else read_hf(source)
        wrong = differences(model, output, case.target) or tokenizer_differences(source, output)
    except Exception as error:
        return DIFFERENT, f"accepted, but cannot be read: {type(error).__name__}: {error}"
    return (DIFFERENT, wrong) if wrong else (BUILT, "")
