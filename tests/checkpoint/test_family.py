"""Models of Gemma 3's family by name: small ones with the keys of their own config.json, beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_images import BOI, EOI, SOFT, write_image_tokenizer

from wicore_trt import LLM, SamplingParams
from wicore_trt.engine.build import build_engine

IDS = [2, *(5 + (7 * i) % 50 for i in range(30))]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "vocab_size": 384, "max_position_embeddings": 128,
}  # fmt: skip
SCALED = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
KINDS = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
SAVED = {  # what transformers 4.57 writes of a text model
    "_sliding_window_pattern": 6, "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02,
    "layer_types": KINDS, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
    "use_bidirectional_attention": False, "use_cache": True, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "image_size": 56, "intermediate_size": 48, "model_type": "siglip_vision_model",
    "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
WRAPPER = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": BOI,
    "eoi_token_index": EOI, "image_token_index": SOFT, "eos_token_id": [1, 5], "initializer_range": 0.02,
    "mm_tokens_per_image": 4, "vision_config": VISION,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "MedGemma 4B": WRAPPER | {"torch_dtype": "bfloat16", "text_config": SIZES | SCALED | {"model_type": "gemma3_text"}},
    "MedGemma 1.5 4B": WRAPPER  # as transformers 4.57 saves it
    | {
        "dtype": "bfloat16", "transformers_version": "4.57.3",
        "text_config": SIZES | SCALED | SAVED | {"model_type": "gemma3_text", "query_pre_attn_scalar": 256},
        "vision_config": VISION | {
            "attention_dropout": 0.0, "dtype": "bfloat16", "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-06,
            "num_channels": 3,
        },
    },
    "ShieldGemma 2": WRAPPER
    | {
        "architectures": ["ShieldGemma2ForImageClassification"], "model_type": "shieldgemma2", "yes_token_index": 9,
        "tie_word_embeddings": False, "text_config": SIZES | SCALED | {"model_type": "gemma3_text"},
    },
    "MedGemma 27B text": SIZES
    | SCALED
    | {k: v for k, v in SAVED.items() if k not in ("layer_types", "_sliding_window_pattern")}
    | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 168, "cache_implementation": "hybrid", "torch_dtype": "bfloat16",
    },
    "TranslateGemma": WRAPPER
    | {
        "dtype": "bfloat16",
        "text_config": SIZES | SCALED | SAVED | {"model_type": "gemma3_text", "query_pre_attn_scalar": 8},
    },
    "FunctionGemma 270M": SIZES
    | SAVED
    | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rope_scaling": None,
        "query_pre_attn_scalar": 256, "dtype": "bfloat16", "transformers_version": "4.57.3",
    },
}  # fmt: skip


@pytest.mark.parametrize("model", CONFIGS)
def test_a_model_by_name_computes_what_transformers_computes(model: str, tmp_path: Path) -> None:
    import transformers

    config = CONFIGS[model]
    wrapped, shield = config["model_type"] != "gemma3_text", config["model_type"] == "shieldgemma2"
    kind = transformers.Gemma3ForConditionalGeneration if wrapped else transformers.Gemma3ForCausalLM
    kind = transformers.ShieldGemma2ForImageClassification if shield else kind
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    theirs = kind(transformers.AutoConfig.from_pretrained(tmp_path)).float().eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight += 0.1 * torch.randn_like(weight)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if wrapped:  # the hub's names
        tensors = load_file(tmp_path / "model.safetensors")
        old = {n.replace("model.language_model.", "language_model.model.").replace("model.vision", "vision"): t
               for n, t in tensors.items()}  # fmt: skip
        save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    write_image_tokenizer(tmp_path)
    notes = list[str]()
    engine = build_engine(tmp_path, tmp_path / "e", dtype="float32", note=notes.append)
    assert (engine.manifest.vision is not None) == wrapped
    assert any("9 for Yes, a violation, 3771 for No" in note for note in notes) == shield
    assert not [note for note in notes if "left aside" in note or "counts" in note]
    with LLM(str(tmp_path / "e")) as llm:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
        [[answer]] = llm.generate([IDS], sampling)
    assert answer.prompt_logprobs is not None
    with torch.no_grad():
        oracle = theirs.model if shield else kind.from_pretrained(tmp_path, dtype=torch.float32)
        rows = torch.log_softmax(oracle(torch.tensor([IDS])).logits[0], -1)
    expected = rows[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])].numpy()
    np.testing.assert_allclose([entry.logprob for entry in answer.prompt_logprobs[1:]], expected, atol=1e-4)
