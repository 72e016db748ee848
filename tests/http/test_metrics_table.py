"""docs/metrics.md names every metric with its labels.

`PYTHONPATH=tests python tests/http/test_metrics_table.py` writes its table.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from fakes import FAKE_INFO

from wicore_trt.access.admission import CallCounts
from wicore_trt.core.times import STEP_TOKENS, Histogram
from wicore_trt.metrics.exposition import GPU, MetricsSnapshot, collect_families, describe_processes
from wicore_trt.metrics.machine import GpuUse, ProcessUse
from wicore_trt.types import EngineStats, KVStats, PoolStats, TierStats

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = "| name{labels} | also named | meaning |\n|---|---|---|\n"
KINDS = {"counter": "Counters", "gauge": "Gauges", "histogram": "Histograms"}


def full() -> MetricsSnapshot:
    """A snapshot in which every family has a sample."""
    calls = CallCounts()
    calls.http["GET", "/health", "200"] += 1
    calls.grpc["Generate", "OK"] += 1
    tier = TierStats("device", 1, 1, 1, {"local": 1}, 1, evictions={"capacity": 1}, failures={"checksum": 1})
    pools = (PoolStats("local", 1, 1, 1, 1),)
    engine = EngineStats(1.0, 0, 0, {}, 0, 0, 0, pools=pools, kv=KVStats((tier,), {"load": 1}))
    engine = replace(engine, step_tokens=(0,) * (len(Histogram(STEP_TOKENS).counts) + 1))
    info = replace(FAKE_INFO, model_id="m", page_tokens=4)
    front = {"front": ProcessUse(1.0, 1, 1)}
    gpus = [GpuUse(0, "n", "u", dict.fromkeys(GPU, 1.0))]
    return MetricsSnapshot("1", "serving", calls, 0, info, [engine], processes=front, gpus=gpus)


def tables() -> str:
    """Tables of the page, one a kind; a family that repeats another under a second name stands in that one's row."""
    rows: dict[str, list[str]] = {}
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for family in (*collect_families(full()), *describe_processes({"front": (True, 0)})):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert family.samples, name
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le", "model_name"})
        if alias := re.match(r"As (wicore_\w+)", family.documentation):
            row = next(row for first, row in rows.items() if first.removesuffix("_total") == alias[1])
            row[1] = ", ".join(filter(None, [row[1], f"`{name}`"]))
        else:
            rows[name] = [f"`{name}{{{','.join(labels)}}}`" if labels else f"`{name}`", "", family.documentation]
            kinds[family.type].append(name)
    parts = (f"## {KINDS[kind]}\n\n{HEAD}" + "".join(f"| {' | '.join(rows[name])} |\n" for name in names)
             for kind, names in kinds.items())  # fmt: skip
    return "\n".join(parts)


def test_the_page_has_every_metric():
    assert PAGE.read_text().endswith(tables()), "run: PYTHONPATH=tests python tests/http/test_metrics_table.py"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition("## ")[0] + tables())
