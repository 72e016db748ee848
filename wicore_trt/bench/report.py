"""What a benchmark says: figures beside their bounds, as table rows and as one JSON document.

Puts measurements and bounds together; it measures nothing itself. Invariant: a report names everything that its
figures depend on: machine, versions, model, parameters, measured rates, date.

The JSON document (`SCHEMA` 1): kind, schema, command, date, machine, versions, target, model, parameters, rates (null
without a model spec), results. A figure is {value, unit, bound, percent}: `bound` is the best that the measured rates
allow (null when unknown), `percent` how near to it the value is, 100 being the bound itself.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wicore_trt.bench.bound import MachineRates, ModelCost, decode_bound_s, prefill_bound_s, request_bound_s
from wicore_trt.bench.measure import Distributions, Summary, Throughput

if TYPE_CHECKING:
    from wicore_trt.bench.runs import LatencyPoint, ThroughputCase

KIND = "wicore-bench"
SCHEMA = 1
PACKAGES = ("wicore-trt", "torch", "numpy", "grpcio", "transformers")
GPU_FIELDS = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.mem", "power.limit")

Figure = dict[str, Any]
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Roof:
    """What bounds come from: a model's cost and a machine's rates."""

    cost: ModelCost
    rates: MachineRates


def time_figure(seconds: float | None, bound_s: float | None = None) -> Figure | None:
    """Milliseconds; the bound is the shortest time."""
    if seconds is None:
        return None
    return _figure(seconds * 1e3, "ms", None if bound_s is None else bound_s * 1e3, larger_is_better=False)


def rate_figure(value: float, unit: str, bound: float | None = None) -> Figure:
    """Something per second; the bound is the highest rate."""
    return _figure(value, unit, bound, larger_is_better=True)


def _figure(value: float, unit: str, bound: float | None, *, larger_is_better: bool) -> Figure:
    percent = None
    if bound is not None:
        percent = 100 * (value / bound if larger_is_better else bound / value)
    return {"value": value, "unit": unit, "bound": bound, "percent": percent}


def latency_result(point: LatencyPoint, roof: Roof | None) -> dict[str, Any]:
    """One case of the latency benchmark. Bounds of a decode step are means over the steps' context lengths."""
    case = point.case
    lengths = (case.batch, case.input_tokens, case.output_tokens)
    prefill_bound = step_bound = None
    if roof is not None:
        prefill_bound = prefill_bound_s(roof.cost, roof.rates, case.batch, case.input_tokens)
        if case.output_tokens > 1:
            step_bound = decode_bound_s(roof.cost, roof.rates, *lengths)
    decode = None
    if point.step_s is not None:
        decode = rate_figure(
            case.batch / point.step_s, "tokens/s", None if step_bound is None else case.batch / step_bound
        )
    return {
        **asdict(case),
        "prefill": time_figure(point.prefill_s, prefill_bound),
        "decode_step": time_figure(point.step_s, step_bound),
        "decode_rate": decode,
        "total": time_figure(point.total_s),
        **_distributions(point.latencies),
    }


def throughput_result(result: Throughput, case: ThroughputCase, roof: Roof | None) -> dict[str, Any]:
    """The throughput benchmark. With a fixed concurrency the bound is the machine's; with a rate of arrival it is
    what was offered."""
    bound = case.rate
    if bound is None and roof is not None and case.concurrency is not None:
        lengths = (case.concurrency, case.input_tokens, case.output_tokens)
        bound = 1 / request_bound_s(roof.cost, roof.rates, *lengths, cached_tokens=case.shared_prefix)
    output_bound = None if bound is None else bound * case.output_tokens
    return {
        "duration_s": result.duration_s,
        "completed": result.completed,
        "errors": result.errors,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "output_tokens": result.output_tokens,
        "requests": rate_figure(result.requests_per_s, "requests/s", bound),
        "output": rate_figure(result.output_tokens_per_s, "tokens/s", output_bound),
        "total": rate_figure(result.total_tokens_per_s, "tokens/s"),
        "goodput": None if result.goodput_per_s is None else rate_figure(result.goodput_per_s, "requests/s", bound),
        **_distributions(result.latencies),
    }


def _distributions(latencies: Distributions) -> dict[str, Any]:
    """ttft, tpot, itl, e2e: {unit: "ms", count, mean, p50, p90, p99} or null."""

    def in_ms(summary: Summary | None) -> dict[str, Any] | None:
        if summary is None:
            return None
        values = {name: value * 1e3 for name, value in asdict(summary).items() if name != "count"}
        return {"unit": "ms", "count": summary.count, **values}

    return {name: in_ms(getattr(latencies, name)) for name in ("ttft", "tpot", "itl", "e2e")}


def make_report(
    command: str,
    *,
    target: str,
    model: Mapping[str, Any],
    parameters: Mapping[str, Any],
    rates: MachineRates | None,
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The JSON document of the module's docstring, ready for json.dumps."""
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "target": target,
        "model": dict(model),
        "parameters": dict(parameters),
        "rates": None if rates is None else asdict(rates),
        "results": [dict(result) for result in results],
    }


def machine() -> dict[str, Any]:
    """This machine: CPU, cores that the process may use, memory, load, GPUs with their clocks."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1m": os.getloadavg()[0],
        "system": platform.platform(),
        "gpus": _gpus(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _gpus() -> list[dict[str, str]]:
    """What nvidia-smi says now; none without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(GPU_FIELDS, (cell.strip() for cell in line.split(",")), strict=False)) for line in lines]


def versions() -> dict[str, str]:
    """Python and the packages that figures depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


LATENCY_COLUMNS = (
    "batch", "input", "output", "prefill ms", "bound %", "step ms", "bound ms", "bound %", "decode tok/s",
    "TTFT p50", "TPOT p50", "ITL p99",
)  # fmt: skip


def latency_row(result: Mapping[str, Any]) -> Row:
    """A latency result under LATENCY_COLUMNS; times in ms."""
    prefill, step, rate = result["prefill"], result["decode_step"], result["decode_rate"]
    return (
        *(str(result[name]) for name in ("batch", "input_tokens", "output_tokens")),
        *(cell(prefill, key) for key in ("value", "percent")),
        *(cell(step, key) for key in ("value", "bound", "percent")),
        cell(rate, "value"),
        *(cell(result[name], key) for name, key in (("ttft", "p50"), ("tpot", "p50"), ("itl", "p99"))),
    )


THROUGHPUT_COLUMNS = ("figure", "value", "bound", "bound %")
SUMMARY_COLUMNS = ("ms", "mean", "p50", "p90", "p99")


def throughput_rows(result: Mapping[str, Any]) -> list[Row]:
    """Rates of a throughput result under THROUGHPUT_COLUMNS."""
    names = {"requests": "requests/s", "output": "output tokens/s", "total": "total tokens/s", "goodput": "goodput/s"}
    return [
        (label, *(cell(result[name], key) for key in ("value", "bound", "percent")))
        for name, label in names.items()
        if result[name] is not None
    ]


def summary_rows(result: Mapping[str, Any]) -> list[Row]:
    """Latencies of a throughput result under SUMMARY_COLUMNS."""
    return [
        (name.upper(), *(cell(result[name], key) for key in ("mean", "p50", "p90", "p99")))
        for name in ("ttft", "tpot", "itl", "e2e")
    ]


def cell(figure: Mapping[str, Any] | None, key: str) -> str:
    """A number with three significant digits at least, or "-"."""
    value = None if figure is None else figure[key]
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}"
