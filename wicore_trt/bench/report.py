"""Report of a benchmark: figures beside their bounds, as table rows and as one JSON document.

Measures nothing itself. Invariant: a report names everything that its figures depend on: machine, versions, model,
parameters, measured rates, date.

The JSON document (`SCHEMA` 1): kind, schema, command, date, machine, versions, target, model, parameters, rates (null
without a model spec), results. A figure is {value, unit, bound, percent}: `bound` is the best that the measured rates
allow (null when unknown), `percent` how near to it the value is, 100 being the bound itself. In a result of `serve`,
`good_share` is of all planned requests, `tier_hit_tokens` what each tier saved meanwhile, `uncounted` the answers
without a usage. `client` is its own lag: `send`, `loop` and `place` as in `bench.measure.ClientLag`.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wicore_trt.bench.bound import MachineRates, ModelCost, decode_bound_s, prefill_bound_s, request_bound_s
from wicore_trt.bench.measure import Distributions, Load, Summary, Throughput
from wicore_trt.errors import list_installed
from wicore_trt.plugins.cpu_library import library_name, open_library

if TYPE_CHECKING:
    from wicore_trt.bench.runs import LatencyPoint, ThroughputCase

KIND = "wicore-bench"
SCHEMA = 1
PACKAGES = ("wicore-trt", "torch", "numpy", "grpcio", "transformers", "aiohttp", "uvloop")
ABSENT = "absent"
GPU_FIELDS = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.mem", "power.limit")

Figure = dict[str, Any]
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Roof:
    """Inputs of bounds: a model's cost and a machine's rates."""

    cost: ModelCost
    rates: MachineRates


def time_figure(seconds: float | None, bound_s: float | None = None) -> Figure | None:
    """Make a figure in milliseconds; the bound is the shortest time."""
    if seconds is None:
        return None
    return _make_figure(seconds * 1e3, "ms", None if bound_s is None else bound_s * 1e3, larger_is_better=False)


def rate_figure(value: float, unit: str, bound: float | None = None) -> Figure:
    """Make a figure per second; the bound is the highest rate."""
    return _make_figure(value, unit, bound, larger_is_better=True)


def _make_figure(value: float, unit: str, bound: float | None, *, larger_is_better: bool) -> Figure:
    percent = None
    if bound is not None:
        percent = 100 * (value / bound if larger_is_better else bound / value)
    return {"value": value, "unit": unit, "bound": bound, "percent": percent}


def latency_result(point: LatencyPoint, roof: Roof | None) -> dict[str, Any]:
    """Report one case of the latency benchmark. Bounds of a decode step are means over the steps' context lengths."""
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
        **_report_distributions(point.latencies),
    }


def throughput_result(result: Throughput, case: ThroughputCase, roof: Roof | None) -> dict[str, Any]:
    bound = None
    if roof is not None:
        lengths = (case.concurrency, case.input_tokens, case.output_tokens)
        bound = 1 / request_bound_s(roof.cost, roof.rates, *lengths, cached_tokens=case.shared_prefix)
    output_bound = None if bound is None else bound * case.output_tokens
    return {"errors": result.errors, **_report_rates(result, bound, output_bound)}


def _report_rates(result: Throughput, bound: float | None, output_bound: float | None) -> dict[str, Any]:
    return {
        "duration_s": result.duration_s,
        "completed": result.completed,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "output_tokens": result.output_tokens,
        "requests": rate_figure(result.requests_per_s, "requests/s", bound),
        "output": rate_figure(result.output_tokens_per_s, "tokens/s", output_bound),
        "total": rate_figure(result.total_tokens_per_s, "tokens/s"),
        **_report_distributions(result.latencies),
    }


def load_result(load: Load, *, target: str, rate: float | None, tier_hits: Mapping[str, int]) -> dict[str, Any]:
    """Report one run of a load test. `rate` None: a trace at its own times."""
    finite = load.offered_per_s if math.isfinite(load.offered_per_s) else None
    answered = _report_rates(load.throughput, None, None)
    goodput = None
    if load.good is not None:
        goodput = rate_figure(load.good / load.throughput.duration_s, "requests/s")
    return {
        "target": target,
        "rate": "inf" if rate is not None and math.isinf(rate) else rate,
        "offered_per_s": finite,
        **{name: getattr(load, name) for name in ("planned", "unsent", "refused", "failed", "statuses", "examples")},
        "refusal": _in_ms(load.refusal),
        "good": load.good,
        "good_share": None if load.good is None else load.good / load.planned,
        "goodput": goodput,
        **answered,
        "cached_tokens": answered["cached_tokens"] if load.tells_cached else None,
        "tier_hit_tokens": dict(tier_hits),
        "uncounted": load.uncounted,
        "client": {
            "late": load.lag.is_late,
            "most_open": load.lag.most_open,
            **{name: _in_ms(getattr(load.lag, name)) for name in ("send", "loop", "place")},
        },
    }


def _in_ms(summary: Summary | None) -> dict[str, Any] | None:
    if summary is None:
        return None
    values = {name: value * 1e3 for name, value in asdict(summary).items() if name != "count"}
    return {"unit": "ms", "count": summary.count, **values}


def _report_distributions(latencies: Distributions) -> dict[str, Any]:
    """Report ttft, tpot, itl, e2e: {unit: "ms", count, mean, p50, p90, p99} or null."""
    return {name: _in_ms(getattr(latencies, name)) for name in ("ttft", "tpot", "itl", "e2e")}


def make_report(
    command: str,
    *,
    target: str,
    model: Mapping[str, Any],
    parameters: Mapping[str, Any],
    rates: MachineRates | None,
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": list_versions(),
        "target": target,
        "model": dict(model),
        "parameters": dict(parameters),
        "rates": None if rates is None else asdict(rates),
        "results": [dict(result) for result in results],
    }


def describe_machine() -> dict[str, Any]:
    """Describe this machine: CPU, cores that the process may use, memory, load, GPUs with their clocks."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1m": os.getloadavg()[0],
        "system": platform.platform(),
        "gpus": _list_gpus(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _list_gpus() -> list[dict[str, str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        dict(zip(GPU_FIELDS, (format_cell.strip() for format_cell in line.split(",")), strict=False)) for line in lines
    ]


def list_versions() -> dict[str, str]:
    """List commit, native library (or ABSENT), Python and the packages that figures depend on."""
    library = open_library()
    found = {"commit": _find_commit(), "native": ABSENT if library is None else library_name(library)}
    return {**found, "python": platform.python_version(), **list_installed(PACKAGES)}


def _find_commit() -> str:
    """Find the commit of the running sources, "+" behind it where they were changed. BENCH_COMMIT takes precedence:
    copies of a checkout may lack their history."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        said = subprocess.run(git, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        said = ""
    return said or "unknown"


LATENCY_COLUMNS = (
    "batch", "input", "output", "prefill ms", "bound %", "step ms", "bound ms", "bound %", "decode tok/s",
    "TTFT p50", "TPOT p50", "ITL p99",
)  # fmt: skip


def latency_row(result: Mapping[str, Any]) -> Row:
    """Format a latency result under LATENCY_COLUMNS; times in ms."""
    prefill, step, rate = result["prefill"], result["decode_step"], result["decode_rate"]
    return (
        *(str(result[name]) for name in ("batch", "input_tokens", "output_tokens")),
        *(format_cell(prefill, key) for key in ("value", "percent")),
        *(format_cell(step, key) for key in ("value", "bound", "percent")),
        format_cell(rate, "value"),
        *(format_cell(result[name], key) for name, key in (("ttft", "p50"), ("tpot", "p50"), ("itl", "p99"))),
    )


THROUGHPUT_COLUMNS = ("figure", "value", "bound", "bound %")
SUMMARY_COLUMNS = ("ms", "mean", "p50", "p90", "p99")


def throughput_rows(result: Mapping[str, Any]) -> list[Row]:
    names = {"requests": "requests/s", "output": "output tokens/s", "total": "total tokens/s"}
    return [
        (label, *(format_cell(result[name], key) for key in ("value", "bound", "percent")))
        for name, label in names.items()
    ]


def summary_rows(result: Mapping[str, Any]) -> list[Row]:
    return [
        (name.upper(), *(format_cell(result[name], key) for key in ("mean", "p50", "p90", "p99")))
        for name in ("ttft", "tpot", "itl", "e2e")
    ]


LOAD_COLUMNS = (
    "rate", "planned", "good %", "goodput/s", "answered", "refused", "failed", "requests/s", "tokens/s", "cached %",
    "open", "lag p99 ms",
)  # fmt: skip
LOAD_SUMMARY_COLUMNS = ("rate", "ms", "count", *SUMMARY_COLUMNS[1:])


def load_row(result: Mapping[str, Any], *, several: bool) -> Row:
    """Format a result of a load test under LOAD_COLUMNS; the first cell names the target where there are `several`."""
    share, cached = result["good_share"], result["cached_tokens"]
    client = result["client"]
    return (
        _load_name(result, several=several),
        str(result["planned"]),
        "-" if share is None else f"{100 * share:.1f}",
        format_cell(result["goodput"], "value"),
        *(str(result[name]) for name in ("completed", "refused", "failed")),
        *(format_cell(result[name], "value") for name in ("requests", "output")),
        "-" if cached is None else f"{100 * cached / max(1, result['prompt_tokens']):.1f}",
        str(client["most_open"]),
        format_cell(client["send"], "p99"),
    )


def load_summary_rows(result: Mapping[str, Any], *, several: bool) -> list[Row]:
    """Format a load test's latencies under LOAD_SUMMARY_COLUMNS, and the time to a refusal where there was one."""
    names = [name for name in ("ttft", "tpot", "itl", "e2e", "refusal") if result[name] is not None]
    keys = LOAD_SUMMARY_COLUMNS[3:]
    return [
        (
            "" if at else _load_name(result, several=several),
            name.upper(),
            str(result[name]["count"]),
            *(format_cell(result[name], key) for key in keys),
        )
        for at, name in enumerate(names)
    ]


def _load_name(result: Mapping[str, Any], *, several: bool) -> str:
    rate = "trace" if result["rate"] is None else f"{float(result['rate']):g}"
    return f"{rate} {result['target']}" if several else rate


def load_warnings(result: Mapping[str, Any]) -> list[str]:
    """List warnings of a result: failures by status with an example each, and what the client did not see."""
    found = []
    for status, count in result["statuses"].items():
        if status != "OK":
            found.append(f"{count} requests {status}: {result['examples'][status].partition(': ')[2]}")
    if result["unsent"]:
        found.append(f"{result['unsent']} turns were not sent, because one before them failed.")
    if result["uncounted"]:
        found.append(f"{result['uncounted']} answers came without usage: their tokens are the number of their chunks.")
    itl, tpot = result["itl"], result["tpot"]
    counted = 0 if itl is None else itl["count"]
    if tpot is not None and counted < result["output_tokens"] - result["completed"]:
        found.append("Chunks of some answers had an unknown number of tokens: these have a TPOT, and no ITL.")
    if result["client"]["late"]:
        send, loop = (format_cell(result["client"][name], "p99") for name in ("send", "loop"))
        found.append(
            f"This client was late itself (p99: sending {send} ms, event loop {loop} ms), so latencies are its own "
            "too. Use a faster or an idle machine, or a lower rate."
        )
    return found


def format_cell(figure: Mapping[str, Any] | None, key: str) -> str:
    """Format a number with at least three significant digits, or "-"."""
    value = None if figure is None else figure[key]
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}"
