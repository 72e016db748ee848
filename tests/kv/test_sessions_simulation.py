"""Conversations that outgrow host memory: what the tiers keep of them, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.cases import CONFIGS
from benchmarks.kv.disk_simulation import Sizes
from benchmarks.kv.sessions_simulation import play
from benchmarks.kv.virtual_disk import GPUS, PAGE_BYTES, PAGE_TOKENS, WINDOW, World
from wicore_trt.model.spec import GLOBAL, LOCAL

DISK = World(((0.0, 1.65e9),))
RECORDS = {"h200": "gpu-kv-h200-1126.json", "h100": "gpu-kv-h100.json"}


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_host_tier_for_half_of_the_conversations_keeps_a_third_of_them_in_random_order(seed: int) -> None:
    """Least recently used first finds a fifth: who has not come for longest comes next. The policy learns that within
    two rounds."""
    rows = play(DISK, Sizes(10.0, 16.0, 45.0, sequences=4), conversations=24, history=8192, turns=5, seed=seed)
    assert sum(row["in device or host"] for row in rows[2:]) / 3 > 0.3


@pytest.mark.long
@pytest.mark.parametrize("seed", [3, 4])
def test_a_disk_brings_conversations_while_others_decode(seed: int) -> None:
    """All that is found is what the disk brings: device and host memory have a seventh each time. Where requests were
    read ahead of that did not wait, and where loads shared the disk, a quarter was found in both rounds together; half
    where steps that the disk slows down ruled out loads that spare others. Steps as on an H200's machine."""
    world = World(((0.0, 1.65e9),), launch_s=0.09, drag=1.1, graph_tokens=768)
    rows = play(world, Sizes(16.0, 16.0, 56.0), conversations=48, history=8192, turns=3, seed=seed)
    assert sum(row["found"] for row in rows[1:]) > 0.75, rows


def test_a_host_tier_with_room_for_all_finds_all() -> None:
    rows = play(DISK, Sizes(8.0, 16.0, 45.0, sequences=4), conversations=10, history=4096, turns=3, seed=1)
    assert rows[0]["found"] == 0.0
    assert all(row["found"] > 0.9 and row["in device or host"] > 0.9 for row in rows[1:]), rows


@pytest.mark.parametrize("gpu", GPUS)
def test_steps_of_a_gpu_take_what_its_memory_needs(gpu: str) -> None:
    """Weights and KV of eight sequences over the bytes a second that a run on that GPU copied."""
    record = json.loads((Path(__file__).parents[2] / "docs/benchmarks" / RECORDS[gpu]).read_text())
    keys = 8 * (8500 * PAGE_BYTES[GLOBAL] + WINDOW * PAGE_BYTES[LOCAL]) / PAGE_TOKENS
    least = (CONFIGS["fp8"].cost().weight_bytes + keys) / record["bytes_per_s"]
    assert least < World((), gpu=gpu).step_s([(8500, 1)] * 8) < 1.3 * least
