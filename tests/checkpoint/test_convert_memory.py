"""Peak memory of a conversion, measured in a process of its own: it must not follow the size of the model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wicore_trt.checkpoint.names import hf_shapes
from wicore_trt.checkpoint.quantize import from_float32
from wicore_trt.checkpoint.safetensors_io import SafetensorsWriter
from wicore_trt.model.hf_config import read_hf_config

MIB = 1 << 20
SHAPES_27B = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 5376,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 21504,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
}
SCALED = SHAPES_27B | {"vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 1}
RUN = """
import sys
from wicore_trt.checkpoint.convert import convert
convert(sys.argv[1], sys.argv[2], dtype=sys.argv[3], tp_size=int(sys.argv[4]))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A directory whose gigabytes do not outlive the test."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def _write(directory: Path, config: dict[str, Any]) -> tuple[int, int]:
    """One shard per layer, filled with one random block over and over. Bytes of all and of the largest tensor."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    shapes = hf_shapes(read_hf_config(config))
    block = from_float32(np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32) * 0.02, "BF16").tobytes()
    shards: dict[str, list[str]] = {}
    for name in shapes:
        shards.setdefault(name.split(".")[2] if ".layers." in name else "top", []).append(name)
    weight_map = {}
    for shard, names in shards.items():
        file = directory / f"model-{shard}.safetensors"
        with SafetensorsWriter(file, [(n, "BF16", shapes[n]) for n in names]) as writer:
            for name in names:
                weight_map[name] = file.name
                for start in range(0, 2 * prod(shapes[name]), len(block)):
                    writer.write(name, block[: 2 * prod(shapes[name]) - start])
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sizes = [2 * prod(shape) for shape in shapes.values()]
    return sum(sizes), max(sizes)


def _peak(source: Path, output: Path, dtype: str, tp: int) -> int:
    """Peak resident bytes of converting in a fresh process."""
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(source), str(output), dtype, str(tp)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout) * 1024


@pytest.mark.long
def test_peak_stays_below_the_largest_tensor(disk: Path) -> None:
    _, largest = _write(disk / "m", SCALED)
    peak = _peak(disk / "m", disk / "c", "fp8", 2)
    print(f"peak {peak / MIB:.0f} MiB, largest tensor {largest / MIB:.0f} MiB")
    assert largest == 256 * MIB and peak < 208 * MIB


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype,tp", [("bfloat16", 1), ("fp8", 1), ("float16", 4)])
def test_peak_with_the_shapes_of_27b(dtype: str, tp: int, disk: Path) -> None:
    if shutil.disk_usage(disk).free < 20 << 30:
        pytest.skip("needs 20 GB of disk")
    total, largest = _write(disk / "m", SHAPES_27B)
    peak = _peak(disk / "m", disk / "c", dtype, tp)
    print(f"{dtype} tp {tp}: peak {peak / MIB:.0f} MiB for {total / 1e9:.2f} GB, largest tensor {largest / 1e9:.2f} GB")
    assert total > 6e9 and peak < 512 * MIB
