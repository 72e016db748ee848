"""What the GPU bench of tiers without reuse asks for, rehearsed with a tiny engine on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_source import write_tiny_source

from benchmarks.kv import on_gpu, reuse_free
from wicore_trt.engine.build import build_engine


@pytest.mark.long
def test_the_rounds_find_nothing_and_copies_run_beside_decode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = {
        "PROMPTS": 5,
        "LENGTH": 40,
        "OUT": 4,
        "AT_ONCE": 2,
        "WARM": 20,
        "DECODE": (2, 40),
        "STEPS": 24,
        "COPIES": 2,
    }
    for name, value in (small | {"TOKENS": range(10, 60), "HOST_GIB": 1 / 256}).items():
        monkeypatch.setattr(reuse_free, name, value)
    monkeypatch.setattr(on_gpu, "PROMPT_TOKENS", range(10, 60))
    monkeypatch.setattr(on_gpu, "REST_S", 0.05)
    build_engine(write_tiny_source(tmp_path / "source"), tmp_path / "engine", page_tokens=8)

    def opened(path: Path, device_gib: float, at_once: int, longest: int, **flags: Any) -> Any:
        given = {"executor__device": "cpu", "kv__device_bytes": 1 << 20, "scheduler__max_context": 128}
        return on_gpu.opened(path, device_gib, at_once, longest, **given, **flags)

    rows, decode = reuse_free.rounds(opened, on_gpu.decode_gaps, tmp_path / "engine", 1)
    assert [row["arm"] for row in rows] == list(reuse_free.ORDER)
    assert [row["written_gb"] is not None and row["share"][0] in "+-" for row in rows] == [True] * 4
    assert rows[1]["gb_per_s"] == "-" and rows[0]["gb_per_s"] != "-"
    assert [row["copies"] for row in decode] == ["none", "2 pages a step"]
    assert all(row["steps"] > 30 and row["median_ms"] > 0 for row in decode) and decode[1]["gb_per_s"] >= 0
    assert "| share |" in on_gpu.table(rows) and "pages a step" in on_gpu.table(decode)
