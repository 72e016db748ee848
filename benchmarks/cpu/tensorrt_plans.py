"""Building TensorRT plans at a model's true shapes, without its weights: time, peak memory and sizes.

`python -m benchmarks.cpu.tensorrt_plans [--models gemma3-27b] [--dtypes bfloat16,fp8] [--targets sm89] [--json FILE]`.
Plans take weights as inputs, so what is built here is what `wicore build --backend tensorrt` builds for a checkpoint of
these shapes. A row's peak is the memory of this process and its two workers together.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wicore_trt.backends.tensorrt.api import find_tensorrt
from wicore_trt.backends.tensorrt.build import build_plans
from wicore_trt.backends.tensorrt.plan_io import PHASES, PLANS, PlanLimits, PlanRequest, TensorSpec, plan_file
from wicore_trt.bench.report import KIND, SCHEMA, describe_machine
from wicore_trt.checkpoint.format import rank_entries
from wicore_trt.checkpoint.safetensors_io import TensorInfo
from wicore_trt.kv.sizing import MODELS, builtin_spec
from wicore_trt.progress import ignore_progress
from wicore_trt.runtime.weight_specs import find_weights
from wicore_trt.weight_format import PLAIN, QUANTIZED

GIB = 1 << 30
COLUMNS = (
    f"{'model':<12}{'dtype':<10}{'target':<8}{'layers':>7}{'define+build s':>15}{'peak GiB':>10}"
    f"{'prefill MB':>12}{'decode MB':>11}{'prefill act. MB':>17}{'decode act. MB':>16}"
)


def requests(model: str, dtype: str, target: str, limits: PlanLimits) -> list[PlanRequest]:
    """One request per phase for a published model; "fp8" has FP8 linears and bfloat16 elsewhere."""
    spec, base = builtin_spec(model), "bfloat16" if dtype == "fp8" else dtype
    entries = rank_entries(spec, base, QUANTIZED.get(dtype, PLAIN[base]), 0, 1)
    found = {name: TensorInfo(shape, tag) for name, tag, shape in entries}
    weights = [
        TensorSpec(weight.name, weight.dtype, weight.shape, "weight", weight.parts, weight.combine)
        for weight in find_weights(found, spec, base)
    ]
    return [PlanRequest(spec, limits, weights, base, base, target, phase) for phase in PHASES]


class PeakMemory:
    """Most memory of this process and its children together, `bytes`, sampled every quarter of a second; pages of
    files that several of them map count once (proportional set size)."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.25):
            pids = [os.getpid()]
            for task in Path("/proc/self/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
            self.bytes = max(self.bytes, sum(_memory(pid) for pid in set(pids)))


def _memory(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:")), 0)


def measure_plans(model: str, dtype: str, target: str, limits: PlanLimits) -> dict[str, Any]:
    """Build both plans, at the same time, as a build of an engine does."""
    with tempfile.TemporaryDirectory() as scratch, PeakMemory() as memory:
        directory, begun = Path(scratch), time.monotonic()
        (directory / PLANS).mkdir()
        plans = build_plans(requests(model, dtype, target, limits), directory, ignore_progress)
        seconds = time.monotonic() - begun
        sizes = [(directory / plan_file(target, phase)).stat().st_size for phase in PHASES]
    peak = memory.bytes
    row: dict[str, Any] = {"model": model, "dtype": dtype, "target": target, "seconds": seconds, "peak_bytes": peak}
    row["layers"] = builtin_spec(model).num_layers
    for phase, plan, size in zip(PHASES, plans, sizes, strict=True):
        row[phase] = {"bytes": size, **plan.facts}
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the table that COLUMNS heads."""
    sizes = [row[phase]["bytes"] / 1e6 for phase in PHASES]
    activations = [row[phase]["activation_bytes"] / 1e6 for phase in PHASES]
    return (
        f"{row['model']:<12}{row['dtype']:<10}{row['target']:<8}{row['layers']:>7}{row['seconds']:>15.1f}"
        f"{row['peak_bytes'] / GIB:>10.2f}{sizes[0]:>12.1f}{sizes[1]:>11.1f}"
        f"{activations[0]:>17.1f}{activations[1]:>16.1f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.tensorrt_plans", description=__doc__)
    parser.add_argument("--models", default="gemma3-27b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--dtypes", default="float16,bfloat16,fp8")
    parser.add_argument("--targets", default="sm89")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--max-chunk", type=int, default=512)
    parser.add_argument("--max-context", type=int, default=16_384)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    limits = PlanLimits(options.max_batch, options.max_chunk, options.max_context)
    api = find_tensorrt()
    print(f"{api.flavour} {api.version}, {limits}, {datetime.now(UTC):%Y-%m-%d}, {describe_machine()}\n{COLUMNS}")
    rows = []
    for model in options.models.split(","):
        for dtype in options.dtypes.split(","):
            for target in options.targets.split(","):
                rows.append(measure_plans(model, dtype, target, limits))
                print(line(rows[-1]), flush=True)
    if options.json:
        document = {
            "kind": KIND,
            "schema": SCHEMA,
            "command": "plans",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": {api.flavour: api.version},
            "parameters": {"max_batch": limits.max_batch, "max_chunk": limits.max_chunk}
            | {"max_context": limits.max_context},
            "results": rows,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
