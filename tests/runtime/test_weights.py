"""Reading and fusing engine weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity.tiny import cast, tiny_model
from safetensors.torch import save_file

from wicore_trt.backends.torch.weights import fuse_weights, load_tensors
from wicore_trt.errors import EngineFormatError
from wicore_trt.model.gemma3 import EMBEDDING, LM_HEAD

E4M3 = torch.float8_e4m3fn
FC, GATE, GATE_UP = (f"transformer.layers.1.mlp.{n}" for n in ("fc", "gate", "gate_up"))


def test_gate_and_up_are_stacked_and_the_head_is_tied(tmp_path: Path) -> None:
    tiny = tiny_model(2, tie_word_embeddings=True)
    path = tmp_path / "rank0.safetensors"
    save_file({**tiny.tensors, "vision_tower.x": torch.ones(1)}, path)
    weights = load_tensors(path, tiny.spec)
    expected = torch.cat([tiny.tensors[f"{FC}.weight"], tiny.tensors[f"{GATE}.weight"]])
    assert torch.equal(weights[f"{GATE_UP}.weight"], expected)
    assert weights[LM_HEAD] is weights[EMBEDDING]
    assert not any(".fc." in n or ".gate." in n or "vision" in n for n in weights)


def test_fp8_scales_follow_their_rows() -> None:
    tiny = tiny_model(2)
    tensors = cast(tiny.spec, tiny.tensors, E4M3)
    tensors[f"{FC}.activation_scaling_factor"] = torch.tensor([0.5])
    tensors[f"{GATE}.activation_scaling_factor"] = torch.tensor([0.25])
    weights = fuse_weights(tensors, tiny.spec)
    scale = weights[f"{GATE_UP}.weights_scaling_factor"]
    expected = torch.cat([tiny.tensors[f"{FC}.weight"], tiny.tensors[f"{GATE}.weight"]])
    actual = weights[f"{GATE_UP}.weight"].float() * scale[:, None]
    assert ((actual - expected).abs() <= expected.abs() * 2**-4 + scale[:, None] * 2**-10).all()
    assert weights[f"{GATE_UP}.activation_scaling_factor"].tolist() == [0.5], "the larger one covers both"


def test_scale_per_tensor_is_spread_over_the_channels() -> None:
    tiny = tiny_model(2)
    tensors = cast(tiny.spec, tiny.tensors, E4M3)
    tensors[f"{FC}.weights_scaling_factor"] = torch.tensor([3.0])
    rows = tiny.spec.intermediate_size
    assert fuse_weights(tensors, tiny.spec)[f"{GATE_UP}.weights_scaling_factor"][:rows].tolist() == [3.0] * rows


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda t: t.pop(f"{FC}.weight"), rf"lacks tensors: {FC}.weight"),
        (lambda t: t.pop(f"{FC}.weights_scaling_factor"), rf"lacks tensors: {FC}.weights_scaling_factor"),
        (lambda t: t.pop("transformer.ln_f.weight"), "ln_f"),
        (lambda t: t.update({f"{FC}.weight": t[f"{FC}.weight"][:-1]}), rf"do not fit its spec: {FC}.weight is \["),
        (lambda t: t.update({f"{FC}.weights_scaling_factor": torch.ones(2)}), "has 2 values"),
        (lambda t: t.pop(LM_HEAD), "lm_head"),
    ],
)
def test_incomplete_weights_are_named(breakage: object, message: str) -> None:
    tiny = tiny_model(1, tie_word_embeddings=False)
    tensors = cast(tiny.spec, tiny.tensors, E4M3)
    breakage(tensors)  # type: ignore[operator]
    with pytest.raises(EngineFormatError, match=message):
        fuse_weights(tensors, tiny.spec)


@pytest.mark.parametrize("content", [None, b"", b"not a safetensors file"])
def test_an_unreadable_file_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "rank0.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineFormatError, match=r"rank0\.safetensors cannot be read"):
        load_tensors(path, tiny_model(0).spec)
