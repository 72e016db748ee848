"""Builds one plan in a process of its own: `python -m wicore_trt.backends.tensorrt.plan_worker`.

TensorRT keeps state per process: of two builds at once one loses its kernel listing, and a compiler crash ends the
caller. Must not know engine directories. Protocol: one JSON object on stdin (`job`). Lines on stdout that begin with
MARK hold one JSON object each: {"fraction"} during the build, then {"tensors", "facts"} or {"error"}. Invariant: the
plan's file is whole when the process reports it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from wicore_trt.backends.tensorrt.api import find_tensorrt
from wicore_trt.backends.tensorrt.plan_build import Plan, build_plan
from wicore_trt.backends.tensorrt.plan_io import PlanRequest, TensorSpec
from wicore_trt.errors import EnvironmentUnfitError, WicoreError

MARK = "wicore-plan "
LAST_LINES = 5


def start(request: PlanRequest, plan: Path, cache: Path | None) -> subprocess.Popen[str]:
    """Start a worker that builds `request` into the file `plan`; it reads and renews the timing cache `cache`."""
    command = [sys.executable, "-m", "wicore_trt.backends.tensorrt.plan_worker"]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    job = {"request": request, "plan": str(plan), "cache": str(cache) if cache else None}
    assert worker.stdin is not None
    try:
        worker.stdin.write(msgspec.json.encode(job).decode())
        worker.stdin.close()
    except BrokenPipeError:
        pass  # it died at once; `finish` tells why
    return worker


def finish(worker: subprocess.Popen[str], request: PlanRequest, report: Callable[[float], None]) -> Plan:
    """Follow the worker to its end. Raises EnvironmentUnfitError with its reason, or with its last words."""
    result: dict[str, Any] = {}
    words: deque[str] = deque(maxlen=LAST_LINES)
    assert worker.stdout is not None
    with worker.stdout:
        for line in worker.stdout:
            if not line.startswith(MARK):
                words.append(line.strip())
                continue
            message = json.loads(line.removeprefix(MARK))
            if "fraction" in message:
                report(message["fraction"])
            else:
                result = message
    code = worker.wait()
    if "error" in result:
        raise EnvironmentUnfitError(result["error"], fix=result["fix"])
    if "facts" not in result:
        what = f"building {request.phase} for {request.target} ended with exit code {code}"
        raise EnvironmentUnfitError(f"{what}: {' | '.join(words) or 'no output'}")
    return Plan(msgspec.convert(result["tensors"], list[TensorSpec]), result["facts"])


def _send_message(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message), flush=True)


def _write_file(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{id(data)}")
    partial.write_bytes(data)
    partial.replace(path)


def main() -> int:
    job = json.load(sys.stdin)
    cache = Path(job["cache"]) if job["cache"] else None
    try:
        request = msgspec.convert(job["request"], PlanRequest)
        earlier = cache.read_bytes() if cache and cache.is_file() else None
        report: Callable[[float], None] = lambda fraction: _send_message({"fraction": fraction})  # noqa: E731
        plan = build_plan(find_tensorrt(), request, timing_cache=earlier, report=report)
        _write_file(Path(job["plan"]), plan.data)
    except WicoreError as error:
        _send_message({"error": error.message, "fix": error.fix})
        return error.exit_code
    if cache and plan.timing_cache is not None:
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            _write_file(cache, plan.timing_cache)
        except OSError as error:  # the next build takes longer, and no more
            print(f"the timing cache {cache} was not kept: {error}")
    _send_message({"tensors": msgspec.to_builtins(plan.tensors), "facts": plan.facts})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
