"""What is refused when an engine of backend tensorrt is loaded, and what the refusal says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_tensorrt.tensorrt_engines import LIMITS, executor_of, fake_engine
from backend_tensorrt.tensorrt_fakes import FakeDevice, fake_tensorrt
from parity.tiny import tiny_model
from tiny_source import write_tiny_tokenizer

from wicore_trt.backends.tensorrt.executor import WORKSPACE_BYTES, SlotMemory
from wicore_trt.backends.tensorrt.plan_io import INDEX, PHASES, plan_file
from wicore_trt.backends.tensorrt.session import read_index
from wicore_trt.config import Settings
from wicore_trt.core.assemble import make_executor
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import EngineDir, describe_files
from wicore_trt.errors import ConfigError, EngineFormatError, EnvironmentUnfitError


@pytest.fixture
def engine(tmp_path: Path) -> EngineDir:
    model = tiny_model(3)
    return fake_engine(tmp_path / "engine", model.spec, model.tensors)


def record(engine: EngineDir, name: str) -> None:
    """As if the engine had been built with the file that is there."""
    engine.manifest.files[name] = describe_files(engine.path)[name]


def edit(engine: EngineDir, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((engine.path / name).read_text())
    change(data)
    (engine.path / name).write_text(json.dumps(data))
    record(engine, name)


def tensor(plan: dict[str, Any], name: str) -> dict[str, Any]:
    return next(t for t in plan["tensors"] if t["name"] == name)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p["tensors"].remove(tensor(p, "positions")), "it lacks positions"),
        (lambda p: p["tensors"].append({**tensor(p, "positions"), "name": "extra"}), "it has extra"),
        (lambda p: tensor(p, "positions").update(kind="output"), "positions: its mode"),
        (lambda p: tensor(p, "lm_head.weight").update(dtype="float16"), "lm_head.weight: its dtype"),
        (lambda p: tensor(p, "cache.v.1").update(shape=["B", 1, 1, 1]), "cache.v.1: its shape"),
        (lambda p: p["profile"].update(B=[1, 1, 9], T=[1, 1, 9], R=[1, 1, 9]), "its profile"),
        (lambda p: p["aliases"].pop("cache.k.0.updated"), "cache.k.0.updated: its alias"),
        (lambda p: p["aliases"].update({"logits": "positions"}), "logits: its alias"),
        (lambda p: p["hosted"].append("token_ids"), "token_ids: its location"),
    ],
)
def test_a_plan_that_differs_from_its_index_is_refused_by_name(
    engine: EngineDir, phase: str, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    edit(engine, plan_file("sm89", phase), change)
    with pytest.raises(EngineFormatError) as caught:
        executor_of(engine)
    assert says in str(caught.value) and f"sm89.{phase}.plan" in str(caught.value)
    assert "--backend tensorrt --target sm89,sm120 --force" in str(caught.value)
    executor_of(engine, FakeDevice("sm120")).close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda i: tensor({"tensors": i["tensors"]["decode"]}, "kv_lengths.local").update(dtype="float32"),
            "kv_lengths",
        ),
        (lambda i: i["tensors"]["prefill"].pop(), "prefill: cache"),
        (lambda i: i["tensors"].pop("decode"), "cannot be read"),
        (lambda i: i["tensors"]["decode"][0].pop("kind"), "cannot be read"),
        (
            lambda i: tensor({"tensors": i["tensors"]["decode"]}, "lm_head.weight").update(dtype="fp8"),
            "different weights",
        ),
    ],
)
def test_an_index_that_this_version_does_not_bind_is_refused(
    engine: EngineDir, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    edit(engine, INDEX, change)
    with pytest.raises(EngineFormatError, match=says):
        executor_of(engine)


def test_the_index_of_a_real_build_is_accepted(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    model = tiny_model(22, vocab_size=256, head_dim=16, num_hidden_layers=2, sliding_window_pattern=2)
    model.hf.save_pretrained(tmp_path / "hf")
    write_tiny_tokenizer(tmp_path / "hf")
    real = build_engine(
        tmp_path / "hf", tmp_path / "engine", backend="tensorrt", dtype="bfloat16", targets=("sm89",), max_context=128
    )
    assert {*read_index(real)} == {*PHASES}


def test_without_a_plan_for_this_gpu_the_error_names_targets_and_the_command(engine: EngineDir) -> None:
    with pytest.raises(EnvironmentUnfitError) as caught:
        executor_of(engine, FakeDevice("sm86"))
    assert "has plans for sm89, sm120, and this GPU is sm86" in str(caught.value)
    assert "--target sm89,sm120,sm86 --force" in str(caught.value)


def test_another_version_of_tensorrt_is_refused(engine: EngineDir) -> None:
    device = FakeDevice()
    with pytest.raises(EnvironmentUnfitError, match=r"built by tensorrt-rtx 1\.7\.1\.116, and 2\.0 is installed"):
        executor_of(engine, device, fake_tensorrt(device, version="2.0"))


def test_a_plan_that_tensorrt_does_not_load_says_why(engine: EngineDir) -> None:
    (engine.path / plan_file("sm89", "decode")).write_bytes(b"\0")
    record(engine, plan_file("sm89", "decode"))
    with pytest.raises(EnvironmentUnfitError, match="does not load plans/sm89.decode.plan: not a plan of this version"):
        executor_of(engine)


def test_several_ranks_are_refused(engine: EngineDir) -> None:
    with pytest.raises(EngineFormatError, match="--tp 1"):
        executor_of(replace(engine, manifest=replace(engine.manifest, tp_size=2)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_make_executor_without_a_gpu_or_for_a_foreign_backend(engine: EngineDir) -> None:
    with pytest.raises(EnvironmentUnfitError, match="PyTorch finds none.* is for sm89, sm120"):
        make_executor(engine, Settings())
    with pytest.raises(EnvironmentUnfitError, match="backend 'other'"):
        make_executor(replace(engine, manifest=replace(engine.manifest, backend="other")), Settings())


def test_slots_take_the_memory_that_is_left(engine: EngineDir) -> None:
    memory = SlotMemory(engine.manifest.spec, LIMITS, "float32")
    pools = sum(p.nbytes for p in executor_of(engine).pools.values())

    def slots(free: int, **settings: Any) -> int:
        return executor_of(engine, FakeDevice(free_bytes=free), **settings)._table.slots

    least = pools + WORKSPACE_BYTES + memory.slot_bytes
    assert [slots(least), slots(least + memory.slot_bytes - 1), slots(least + memory.slot_bytes)] == [1, 1, 2]
    assert slots(1 << 40) == LIMITS.max_batch and slots(1 << 40, max_sequences=2) == 2
    with pytest.raises(ConfigError, match=r"kv\.device_bytes"):
        slots(least - 1)
    caches = memory.allocate(2, FakeDevice())
    assert sum(c.nbytes for c in caches.values()) + 2 * 4 * engine.manifest.spec.vocab_size == 2 * memory.slot_bytes
