"""Plot of load tests: `python -m benchmarks.serve.plot REPORT... --out load.svg`, of what `bench serve --json` printed.

Draws the results of each rate with matplotlib, one line for each target. Equal results give equal bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from wicore_trt.bench.measure import Slo

SHARES = {"p50": ":", "p90": "--", "p99": "-"}


def write_load_plot(results: Sequence[Mapping[str, Any]], path: Path, limits_ms: Mapping[str, float]) -> None:
    """Write an SVG of `load_result`s over the offered rate. `limits_ms`: objectives by "ttft", "tpot", "e2e"."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2)
    names = list(dict.fromkeys(result["target"] for result in results))
    good, tokens, *latencies = axes.flat
    for at, name in enumerate(names):
        runs = sorted((r for r in results if r["target"] == name), key=_find_rate)
        rates = [_find_rate(run) for run in runs]
        style: dict[str, Any] = {"color": f"C{at}", "marker": "o", "markersize": 4}
        answered = [100 * (run["completed"] / run["planned"]) for run in runs]
        good.plot(rates, answered, ":", label=f"{name} answered", **style)
        if all(run["good_share"] is not None for run in runs):
            good.plot(rates, [100 * run["good_share"] for run in runs], label=f"{name} good", **style)
        tokens.plot(rates, [run["output"]["value"] for run in runs], label=name, **style)
        for plot, kind in zip(latencies, ("ttft", "tpot"), strict=True):
            for share, line in SHARES.items():
                values = [None if run[kind] is None else run[kind][share] for run in runs]
                plot.plot(rates, values, line, label=f"{name} {share}", **style)
    for plot, kind in zip(latencies, ("ttft", "tpot"), strict=True):
        if kind in limits_ms:
            plot.axhline(limits_ms[kind], color="black", linewidth=0.8, label="objective")
        plot.set(title=f"{kind.upper()}, ms", yscale="log")
        plot.yaxis.set_major_formatter("{x:g}")
        plot.yaxis.set_minor_formatter("{x:g}")
    good.set(title="share of all requests, %", ylim=(-2, 102))
    tokens.set(title="output tokens/s", ylim=(0, None))
    for plot in axes.flat:
        plot.set_xlabel("requests/s offered")
        plot.grid(alpha=0.3)
        plot.legend(fontsize="small")
    with rc_context({"svg.hashsalt": "wicore", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _find_rate(result: Mapping[str, Any]) -> float:
    """Find requests a second; a run of all at once counts what was answered."""
    return float(result["offered_per_s"] or result["requests"]["value"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path, help="JSON documents; the objectives are the first one's")
    parser.add_argument("--out", type=Path, required=True, help="SVG to write")
    options = parser.parse_args(arguments)
    reports = [json.loads(path.read_text()) for path in options.reports]
    slo = reports[0]["parameters"]["slo"]
    limits = {name: value for name, value in asdict(Slo.parse_limits(slo)).items() if value} if slo else {}
    limits_ms = {name.removesuffix("_s"): value * 1e3 for name, value in limits.items()}
    write_load_plot([result for report in reports for result in report["results"]], options.out, limits_ms)


if __name__ == "__main__":
    main()
