"""Names: both directions, all spellings, and errors that list what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_gemma import PREFIXES, TEXT_CONFIG

from wicore_trt.checkpoint.names import (
    Role,
    canonical_name,
    check_tensors,
    hf_shapes,
    is_vision,
    to_hf,
    to_unified,
    unified_tensors,
)
from wicore_trt.errors import CheckpointError
from wicore_trt.model.gemma3 import LM_HEAD
from wicore_trt.model.spec import Gemma3Spec

SPEC = Gemma3Spec.from_hf_config(TEXT_CONFIG)
UNTIED = Gemma3Spec.from_hf_config(TEXT_CONFIG | {"tie_word_embeddings": False})
NAMES = sorted(hf_shapes(UNTIED))


@given(st.sampled_from(NAMES), st.sampled_from(sorted(PREFIXES)), st.integers(0, 99))
def test_every_spelling_of_a_name_makes_the_round_trip(name: str, prefix: str, layer: int) -> None:
    name = name.replace("layers.1.", f"layers.{layer}.")
    body, head = PREFIXES[prefix]
    spelled = name.replace("lm_head.", head) if name.startswith("lm_head.") else name.replace("model.", body, 1)
    assert canonical_name(spelled) == name
    assert name in to_hf(to_unified(canonical_name(spelled)))


@pytest.mark.parametrize("spec", [SPEC, UNTIED], ids=["tied", "untied"])
def test_unified_tensors_use_every_source_tensor_once(spec: Gemma3Spec) -> None:
    tensors = unified_tensors(spec)
    used = [s for t in tensors for s in t.sources if t.role is not Role.HEAD or not spec.tie_word_embeddings]
    assert sorted(used) == sorted(hf_shapes(spec))
    assert len({t.name for t in tensors}) == len(tensors)
    assert [t.sources for t in tensors if t.name != LM_HEAD] == [to_hf(t.name) for t in tensors if t.name != LM_HEAD]


def test_the_trap_in_tensorrt_llm_names() -> None:
    layer = "model.layers.7."
    assert to_unified(layer + "mlp.gate_proj.weight") == "transformer.layers.7.mlp.fc.weight"
    assert to_unified(layer + "mlp.up_proj.weight") == "transformer.layers.7.mlp.gate.weight"
    assert to_unified(layer + "post_attention_layernorm.weight") == "transformer.layers.7.post_layernorm.weight"
    assert to_hf("transformer.layers.7.attention.qkv.weight") == tuple(
        f"{layer}self_attn.{p}_proj.weight" for p in "qkv"
    )


@pytest.mark.parametrize("name", ["model.layers.01.input_layernorm.weight", "model.layers.1.mlp.weight", "x", ""])
def test_foreign_names_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="not a tensor"):
        to_unified(name)
    with pytest.raises(CheckpointError, match="not a tensor"):
        to_hf(name)


def test_vision_names() -> None:
    assert is_vision("vision_tower.vision_model.embeddings.patch_embedding.weight")
    assert is_vision("model.multi_modal_projector.mm_input_projection_weight")
    assert not any(is_vision(n) for n in NAMES)


def test_missing_unknown_and_misshapen_tensors_are_listed() -> None:
    present = hf_shapes(SPEC)
    check_tensors(SPEC, present | {"lm_head.weight": (96, 64)})  # a tied model may carry a copy of its head
    lost = {n: s for n, s in present.items() if ".mlp.up_proj." not in n}
    with pytest.raises(CheckpointError, match=r"lacks 3 tensors.*layers\.0\.mlp\.up_proj.*layers\.2\.mlp\.up_proj"):
        check_tensors(SPEC, lost)
    many = {f"model.layers.0.lora_{i}": (1,) for i in range(30)}
    with pytest.raises(CheckpointError, match=r"30 tensors that Gemma 3 does not have.*lora_0.*and 22 more"):
        check_tensors(SPEC, present | many)
    with pytest.raises(CheckpointError, match=r"norm\.weight is \[65\], not \[64\]"):
        check_tensors(SPEC, present | {"model.norm.weight": (65,)})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*lm_head"):
        check_tensors(UNTIED, present)
