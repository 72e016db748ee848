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
    unified_tensors,
)
from wicore_trt.errors import CheckpointError
from wicore_trt.model.hf_config import read_hf_config
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.model.vision import POSITIONS, PROJECTION, SOFT_NORM, vision_layer

SPEC = read_hf_config(TEXT_CONFIG)
UNTIED = read_hf_config(TEXT_CONFIG | {"tie_word_embeddings": False})
NAMES = sorted(hf_shapes(UNTIED))


@given(st.sampled_from(NAMES), st.sampled_from(sorted(PREFIXES)), st.integers(0, 99))
def test_every_spelling_of_a_name_makes_the_round_trip(name: str, prefix: str, layer: int) -> None:
    name = name.replace("layers.1.", f"layers.{layer}.")
    body, head = PREFIXES[prefix]
    spelled = name.replace("lm_head.", head) if name.startswith("lm_head.") else name.replace("model.", body, 1)
    assert canonical_name(spelled) == name


@pytest.mark.parametrize("spec", [SPEC, UNTIED], ids=["tied", "untied"])
def test_unified_tensors_use_every_source_tensor_once(spec: Gemma3Spec) -> None:
    tensors = unified_tensors(spec)
    used = [s for t in tensors for s in t.sources if t.role is not Role.HEAD or not spec.tie_word_embeddings]
    assert sorted(used) == sorted(hf_shapes(spec))
    assert len({t.name for t in tensors}) == len(tensors)


def test_the_trap_in_tensorrt_llm_names() -> None:
    sources, layer = {t.name: t.sources for t in unified_tensors(SPEC)}, "model.layers.1."
    assert sources["transformer.layers.1.mlp.fc.weight"] == (f"{layer}mlp.gate_proj.weight",)
    assert sources["transformer.layers.1.mlp.gate.weight"] == (f"{layer}mlp.up_proj.weight",)
    assert sources["transformer.layers.1.post_layernorm.weight"] == (f"{layer}post_attention_layernorm.weight",)
    qkv = tuple(f"{layer}self_attn.{p}_proj.weight" for p in "qkv")
    assert sources["transformer.layers.1.attention.qkv.weight"] == qkv


@pytest.mark.parametrize(
    "outer", ["", "model.", "_orig_mod.model.", "base_model.model.model.", "module.language_model."]
)
def test_vision_names(outer: str) -> None:
    for name in (SOFT_NORM, PROJECTION, POSITIONS, f"{vision_layer(3, 'mlp.fc1')}.bias"):
        for spelt in (name, name.replace("vision_tower.vision_model.", "vision_tower.")):
            assert canonical_name(outer + spelt) == name and is_vision(name)
    assert not any(is_vision(canonical_name(n)) for n in NAMES)


def test_missing_unknown_and_misshapen_tensors_are_listed() -> None:
    present = hf_shapes(SPEC)
    check_tensors(SPEC, present | {"lm_head.weight": (96, 64)})  # a tied model may carry a copy of its head
    lost = {n: s for n, s in present.items() if ".mlp.up_proj." not in n}
    with pytest.raises(CheckpointError, match=r"lacks 3 tensors.*layers\.0\.mlp\.up_proj.*layers\.2\.mlp\.up_proj"):
        check_tensors(SPEC, lost)
    many = {f"model.layers.0.odd_{i}": (1,) for i in range(30)}
    with pytest.raises(CheckpointError, match=r"30 tensors that Gemma 3 does not have.*odd_0.*and 22 more"):
        check_tensors(SPEC, present | many)
    with pytest.raises(CheckpointError, match=r"norm\.weight is \[65\], not \[64\]"):
        check_tensors(SPEC, present | {"model.norm.weight": (65,)})
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight, and its .* tie_word_embeddings: false"):
        check_tensors(UNTIED, present)
