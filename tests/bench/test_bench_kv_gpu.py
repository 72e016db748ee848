"""The KV benchmark of a GPU: what the GPU has no room for is skipped with a reason; attention is measured as often as
asked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_source import write_tiny_source

from benchmarks.gpu.cases import EXPECTED
from benchmarks.kv import on_gpu
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.core import engine as core_engine
from wicore_trt.engine.build import build_engine
from wicore_trt.runtime.batch import StepBatch, StepResult


def test_arms_that_the_gpu_has_no_room_for_are_skipped_and_said(monkeypatch, tmp_path, capsys):
    """80 GiB of pages on a GPU of 80 GB."""
    asked, given = [], {}

    def sessions(path, arm, order, disk, **flags):
        asked.append(arm)
        return 1.0, [on_gpu.Turned(arm, order, 0, 1.0, 48.0, 0.1, 0.2, 0.0)], {}

    def run_peer(name, site, scripts, scratch, left, gib):
        given[name] = gib
        return {"version": "1", "rows": [], "problem": ""}

    monkeypatch.setattr(on_gpu, "describe", lambda: {"memory_bytes": 79 << 30, "target": "sm90", "name": "H100"})
    monkeypatch.setattr(on_gpu, "measure_gpu_rates", lambda: EXPECTED)
    monkeypatch.setattr(on_gpu, "Engines", lambda *_: SimpleNamespace(engine=lambda config: (tmp_path, None)))
    monkeypatch.setattr(on_gpu, "sessions", sessions)
    monkeypatch.setattr(on_gpu, "run_peer", run_peer)
    out = tmp_path / "kv.json"
    peer = ["--vllm-site", str(tmp_path), "--peer-scripts", str(tmp_path), "--peer-runs", "sessions"]
    assert on_gpu.main(["--only", "sessions", "--output", str(out), *peer]) == 0
    document = json.loads(out.read_text())
    assert asked == [arm for arm, (device, _, _) in on_gpu.ARMS.items() if device < 80]
    [why] = document["skipped"]
    assert why == "sessions device 80 GiB, random: 80 GiB of KV pages, and the GPU has room for 47"
    assert why in capsys.readouterr().out and given == {"sessions": 46}
    assert document["versions"]["native"] != "absent"
    assert on_gpu.room_gib() == pytest.approx(46.6, abs=0.5)


@pytest.mark.long
def test_the_gpu_bench_measures_as_often_as_its_rows_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rehearsed with a tiny engine on the CPU."""
    monkeypatch.setattr(on_gpu, "PROMPT_TOKENS", range(10, 60))
    execute, kept = TorchExecutor.execute, core_engine.ATTENTION_STEPS
    seen: dict[int, list[bool]] = {}

    def executed(self: TorchExecutor, batch: StepBatch) -> StepResult:
        result = execute(self, batch)
        assert bool(result.attention) is batch.measure_attention
        seen.setdefault(core_engine.ATTENTION_STEPS, []).append(batch.measure_attention)
        return result

    monkeypatch.setattr(TorchExecutor, "execute", executed)
    build_engine(write_tiny_source(tmp_path / "source"), tmp_path / "engine", page_tokens=8)
    given = {"executor__device": "cpu", "kv__device_bytes": 1 << 20, "scheduler__max_context": 128}
    rows = on_gpu.masses(tmp_path / "engine", ((2, 40), (1, 17)), "auto", 40, **given)
    assert [r["measured"] for r in rows] == [*on_gpu.MEASURED] * 2 and {r["sequences"] for r in rows} == {1, 2}
    assert all(r["steps"] > 70 and r["mean_ms"] > 0 for r in rows) and rows[0]["share"] == "+0.00%"
    assert kept == core_engine.ATTENTION_STEPS and "| never |" in on_gpu.table(rows)
    assert all(seen[1]) and not any(seen[1 << 62]) and 4 <= sum(seen[32]) <= len(seen[32]) // 32 + 4
