"""Constant inputs of plans: weights made of the right parts, and rope tables."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from backend_tensorrt.tensorrt_fakes import FakeDevice
from parity.tiny import cast, tiny_model
from safetensors.torch import save_file

from wicore_trt.backends.tensorrt.plan_io import PlanLimits, TensorSpec, list_weights, step_tensors
from wicore_trt.backends.torch.weights import fuse_weights
from wicore_trt.errors import EngineFormatError
from wicore_trt.model.gemma3 import EMBEDDING, LM_HEAD, layer_weight
from wicore_trt.model.spec import GLOBAL
from wicore_trt.runtime.device_weights import load_weights, make_rope_tables

E4M3 = torch.float8_e4m3fn


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "rank0.safetensors")
    return path / "rank0.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3])
@pytest.mark.parametrize("tied", [True, False])
def test_inputs_hold_what_the_torch_backend_computes_with(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(9, tie_word_embeddings=tied)
    tensors = cast(model.spec, model.tensors, dtype)
    if dtype == E4M3:
        for n, part in enumerate(("mlp.fc", "mlp.gate")):
            name = layer_weight(1, part).removesuffix("weight") + "activation_scaling_factor"
            tensors[name] = torch.tensor([0.5 - 0.2 * n])
    path = saved(tmp_path, tensors)
    inputs = list_weights([path], model.spec, "bfloat16")
    weights, expected = load_weights(path, inputs, model.spec, FakeDevice()), fuse_weights(tensors, model.spec)
    assert {*weights} == {t.name for t in inputs} == {*expected}
    for tensor in inputs:
        got, want = weights[tensor.name], expected[tensor.name]
        assert got.dtype == want.dtype and tuple(got.shape) == tensor.shape and got.data_ptr() % 256 == 0
        assert torch.equal(got.flatten().view(torch.uint8), want.contiguous().flatten().view(torch.uint8)), tensor.name
    assert (weights[LM_HEAD].data_ptr() == weights[EMBEDDING].data_ptr()) == tied


def test_one_scale_stands_for_all_rows_of_its_part(tmp_path: Path) -> None:
    model = tiny_model(9)
    tensors = cast(model.spec, model.tensors, E4M3)
    fc, gate = (layer_weight(0, part) + "s_scaling_factor" for part in ("mlp.fc", "mlp.gate"))
    tensors[fc], tensors[gate] = torch.tensor([2.0]), torch.tensor([3.0])
    path = saved(tmp_path, tensors)
    weights = load_weights(path, list_weights([path], model.spec, "bfloat16"), model.spec, FakeDevice())
    rows = model.spec.intermediate_size
    scales = weights[layer_weight(0, "mlp.gate_up") + "s_scaling_factor"].flatten()
    assert (scales[:rows] == 2).all() and (scales[rows:] == 3).all() and len(scales) == 2 * rows


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(layer_weight(0, "mlp.gate")), "lacks .*mlp.gate"),
        (lambda t: t.update(stranger=torch.zeros(1)), "engine does not take: stranger"),
        (lambda t: t.update({layer_weight(0, "mlp.fc"): t[layer_weight(0, "mlp.fc")].half()}), "mlp.fc.weight is"),
        (lambda t: t.update({layer_weight(0, "mlp.fc"): t[layer_weight(0, "mlp.fc")][:-1]}), "values, and "),
    ],
)
def test_a_file_that_does_not_fit_is_refused(change: object, says: str, tmp_path: Path) -> None:
    model = tiny_model(9)
    tensors = dict(model.tensors)
    inputs = list_weights([saved(tmp_path, tensors)], model.spec, "float32")
    change(tensors)  # type: ignore[operator]
    with pytest.raises(EngineFormatError, match=says):
        load_weights(saved(tmp_path, tensors), inputs, model.spec, FakeDevice())


def test_what_no_plan_needs_may_lie_in_the_file(tmp_path: Path) -> None:
    model = tiny_model(9, tie_word_embeddings=True)
    inputs = list_weights([saved(tmp_path, model.tensors)], model.spec, "float32")
    idle = (
        "transformer.layers.0.attention.kv_cache_scaling_factor",
        "transformer.layers.0.mlp.fc.activation_scaling_factor",
    )
    more = {LM_HEAD: torch.zeros(2), **{name: torch.ones(1) for name in idle}}
    weights = load_weights(saved(tmp_path, {**model.tensors, **more}), inputs, model.spec, FakeDevice())
    assert torch.equal(weights[LM_HEAD], model.tensors[EMBEDDING])
    path = tmp_path / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(EngineFormatError, match="cannot be read"):
        load_weights(path, inputs, model.spec, FakeDevice())


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_rope_tables_are_exact_to_float32_at_every_position(factor: float) -> None:
    rope = {"rope_type": "linear", "factor": factor} if factor > 1 else {"rope_type": "default"}
    spec = tiny_model(
        9,
        num_hidden_layers=2,
        sliding_window_pattern=2,
        rope_parameters={
            "full_attention": {"rope_theta": 1e6, **rope},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ).spec
    inputs: list[TensorSpec] = step_tensors(spec, PlanLimits(1, 1, 131072))
    tables = make_rope_tables(spec, 131072, FakeDevice())
    assert {*tables} == {t.name for t in inputs if t.kind == "table"} and len(tables) == 4
    for group, theta, scale in ((GLOBAL, 1e6, factor), ("local", 1e4, 1.0)):
        for position in (0, 1, 77, 4095, 131071):
            for i in (0, 1, spec.head_dim // 2 - 1):
                angle = position / scale * theta ** (-2 * i / spec.head_dim)
                for part, want in (("cos", math.cos(angle)), ("sin", math.sin(angle))):
                    assert abs(float(tables[f"rope.{group}.{part}"][position, i]) - want) < 1e-7
