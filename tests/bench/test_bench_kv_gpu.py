"""The KV benchmark of a GPU: what the GPU has no room for is skipped with a reason."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks.gpu.cases import EXPECTED
from benchmarks.kv import on_gpu


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
