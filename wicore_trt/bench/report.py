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
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wicore_trt.bench.bound import MachineRates, ModelCost, decode_bound_s, prefill_bound_s
from wicore_trt.bench.measure import LATENCIES, LatencyPoint, Load, Summary
from wicore_trt.cores import count_cores
from wicore_trt.errors import list_installed
from wicore_trt.plugins.cpu_library import library_name, open_library

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
    value, bound = seconds * 1e3, None if bound_s is None else bound_s * 1e3
    return {"value": value, "unit": "ms", "bound": bound, "percent": None if bound is None else 100 * bound / value}


def rate_figure(value: float, unit: str, bound: float | None = None) -> Figure:
    """Make a figure per second; the bound is the highest rate."""
    return {"value": value, "unit": unit, "bound": bound, "percent": None if bound is None else 100 * value / bound}


def latency_result(point: LatencyPoint, roof: Roof | None) -> dict[str, Any]:
    """Report one case of the latency benchmark. Bounds of a decode step are means over the steps' context lengths."""
    case = point.case
    lengths = (case.batch, case.input_tokens, case.output_tokens)
    prefill_bound = step_bound = decode = None
    if roof is not None:
        prefill_bound = prefill_bound_s(roof.cost, roof.rates, case.batch, case.input_tokens)
        if case.output_tokens > 1:
            step_bound = decode_bound_s(roof.cost, roof.rates, *lengths)
    if point.step_s is not None:
        bound = None if step_bound is None else case.batch / step_bound
        decode = rate_figure(case.batch / point.step_s, "tokens/s", bound)
    return {
        **asdict(case), "prefill": time_figure(point.prefill_s, prefill_bound),
        "decode_step": time_figure(point.step_s, step_bound), "decode_rate": decode,
        "total": time_figure(point.total_s), **{name: _in_ms(summary) for name, summary in point.latencies.items()},
    }  # fmt: skip


def load_result(load: Load, *, target: str, rate: float | None, tier_hits: Mapping[str, int]) -> dict[str, Any]:
    """Report one run of a load test. `rate` None: a trace at its own times."""
    answered, good = load.throughput, load.good
    lags = {name: _in_ms(getattr(load.lag, name)) for name in ("send", "loop", "place")}
    return {
        "target": target, "rate": "inf" if rate is not None and math.isinf(rate) else rate,
        "offered_per_s": load.offered_per_s if math.isfinite(load.offered_per_s) else None,
        **{name: getattr(load, name) for name in ("planned", "unsent", "refused", "failed", "statuses", "examples")},
        "refusal": _in_ms(load.refusal), "good": good, "good_share": None if good is None else good / load.planned,
        "goodput": None if good is None else rate_figure(good / answered.duration_s, "requests/s"),
        **{name: getattr(answered, name) for name in ("duration_s", "completed", "prompt_tokens", "output_tokens")},
        "requests": rate_figure(answered.requests_per_s, "requests/s"),
        "output": rate_figure(answered.output_tokens_per_s, "tokens/s"),
        "total": rate_figure(answered.total_tokens_per_s, "tokens/s"),
        **{name: _in_ms(summary) for name, summary in answered.latencies.items()},
        "cached_tokens": answered.cached_tokens if load.tells_cached else None, "tier_hit_tokens": dict(tier_hits),
        "uncounted": load.uncounted,
        "client": {"late": load.lag.is_late, "most_open": load.lag.most_open, **lags},
    }  # fmt: skip


def _in_ms(summary: Summary | None) -> dict[str, Any] | None:
    """Report {unit: "ms", count, mean, p50, p90, p99}."""
    if summary is None:
        return None
    values = {name: value * 1e3 for name, value in asdict(summary).items() if name != "count"}
    return {"unit": "ms", "count": summary.count, **values}


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
        "kind": KIND, "schema": SCHEMA, "command": command, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(), "versions": list_versions(), "target": target, "model": dict(model),
        "parameters": dict(parameters), "rates": None if rates is None else asdict(rates),
        "results": [dict(result) for result in results],
    }  # fmt: skip


def describe_machine() -> dict[str, Any]:
    """Describe this machine: CPU, cores that the process may use, memory, load, GPUs with their clocks."""
    cpu = platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": cpu, "cores": count_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "load_1m": os.getloadavg()[0],
        "system": platform.platform(), "gpus": _list_gpus(),
    }  # fmt: skip


def _list_gpus() -> list[dict[str, str]]:
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(GPU_FIELDS, map(str.strip, line.split(",")), strict=False)) for line in lines]


def list_versions() -> dict[str, str]:
    """List commit ("+" behind it where sources were changed), native library (or ABSENT), Python and the packages that
    figures depend on."""
    library, commit = open_library(), os.environ.get("BENCH_COMMIT")  # copies of a checkout may lack their history
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    with suppress(OSError, subprocess.SubprocessError):
        commit = commit or subprocess.run(git, capture_output=True, text=True, timeout=20).stdout.strip()
    native = ABSENT if library is None else library_name(library)
    found = {"commit": commit or "unknown", "native": native, "python": platform.python_version()}
    return found | list_installed(PACKAGES)


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


LATENCY_KEYS = ("mean", "p50", "p90", "p99")


def list_cells(result: Mapping[str, Any], names: Mapping[str, str], keys: Sequence[str]) -> list[Row]:
    """Format the figures `names` (to their labels) of a result, a row each with the values of `keys`."""
    return [(label, *(format_cell(result[name], key) for key in keys)) for name, label in names.items()]


LOAD_COLUMNS = (
    "rate", "planned", "good %", "goodput/s", "answered", "refused", "failed", "requests/s", "tokens/s", "cached %",
    "open", "lag p99 ms",
)  # fmt: skip
LOAD_SUMMARY_COLUMNS = ("rate", "ms", "count", *LATENCY_KEYS)


def load_row(result: Mapping[str, Any], *, several: bool) -> Row:
    """Format a result of a load test under LOAD_COLUMNS; the first cell names the target where there are `several`."""
    share, cached = result["good_share"], result["cached_tokens"]
    client = result["client"]
    return (
        _load_name(result, several=several), str(result["planned"]), "-" if share is None else f"{100 * share:.1f}",
        format_cell(result["goodput"], "value"), *(str(result[name]) for name in ("completed", "refused", "failed")),
        *(format_cell(result[name], "value") for name in ("requests", "output")),
        "-" if cached is None else f"{100 * cached / max(1, result['prompt_tokens']):.1f}", str(client["most_open"]),
        format_cell(client["send"], "p99"),
    )  # fmt: skip


def load_summary_rows(result: Mapping[str, Any], *, several: bool) -> list[Row]:
    """Format a load test's latencies under LOAD_SUMMARY_COLUMNS, and the time to a refusal where there was one."""
    names = {name: name.upper() for name in (*LATENCIES, "refusal") if result[name] is not None}
    first = [_load_name(result, several=several), *[""] * len(names)]
    rows = zip(first, names, list_cells(result, names, LATENCY_KEYS), strict=False)
    return [(at, name, str(result[key]["count"]), *cells) for at, key, (name, *cells) in rows]


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
