"""What `trtllm-build` of 1.2 does, without TensorRT: parses its flags, checks a checkpoint, writes an engine directory.

Flags, field names, tensor names and the layout of the output are TensorRT-LLM's (commands/build.py, modeling_utils.py,
models/gemma/config.py, builder.py), written down here a second time. Whatever is not known to them fails.
The "engine" of a rank is the JSON of what a builder would have seen: rope tables and norm epsilons of the model class.
STAND_IN_* environment variables make it fail or change arguments as the real one may.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import trtllm_stand_in
from safetensors import safe_open

ONE = {"type": int}
FLAGS: dict[str, dict[str, Any]] = (
    dict.fromkeys(
        ("checkpoint_dir", "model_config", "build_config", "model_cls_file", "model_cls_name", "output_dir",
         "input_timing_cache", "output_timing_cache", "log_level", "visualize_network", "lora_dir"), {"type": str}
    )
    | dict.fromkeys(
        ("max_batch_size", "max_input_len", "max_seq_len", "max_beam_width", "max_num_tokens", "opt_num_tokens",
         "max_encoder_input_len", "max_prompt_embedding_table_size", "workers", "tokens_per_block", "max_draft_len",
         "max_lora_rank"), ONE
    )
    | dict.fromkeys(
        ("bert_attention_plugin", "gpt_attention_plugin", "gemm_plugin", "gemm_swiglu_plugin", "lora_plugin",
         "fp8_rowwise_gemm_plugin", "moe_plugin", "mamba_conv1d_plugin", "nccl_plugin", "low_latency_gemm_plugin",
         "low_latency_gemm_swiglu_plugin", "gemm_allreduce_plugin"), {"type": str}
    )
    | dict.fromkeys(
        ("dora_plugin", "context_fmha", "bert_context_fmha_fp32_acc", "remove_input_padding", "use_paged_context_fmha",
         "use_fp8_context_fmha", "fuse_fp4_quant", "multiple_profiles", "paged_state", "streamingllm",
         "norm_quant_fusion", "reduce_fusion", "user_buffer", "use_fused_mlp", "pp_reduce_scatter"),
        {"choices": ("enable", "disable")},
    )
    | dict.fromkeys(
        ("strip_plan", "weight_sparsity", "weight_streaming", "fast_build", "enable_debug_output", "dry_run",
         "monitor_memory", "gather_context_logits", "gather_generation_logits", "gather_all_token_logits"),
        {"action": "store_true"},
    )
    | {
        "kv_cache_type": {"choices": ("continuous", "paged", "disabled")},
        "profiling_verbosity": {"choices": ("layer_names_only", "detailed", "none")},
        "logits_dtype": {"choices": ("float16", "float32")},
    }
)  # fmt: skip
GENERIC = {
    "architecture", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_act",
    "logits_dtype", "norm_epsilon", "position_embedding_type", "max_position_embeddings", "rotary_embedding_dim",
    "num_key_value_heads", "intermediate_size", "mapping", "quantization", "use_parallel_embedding",
    "embedding_sharding_dim", "head_size", "qk_layernorm", "runtime_defaults",
}  # fmt: skip
GEMMA = {
    "rotary_base", "rotary_scaling", "attn_bias", "mlp_bias", "inter_layernorms", "query_pre_attn_scalar",
    "final_logit_softcapping", "_sliding_window_pattern", "rope_local_base_freq", "sliding_window",
}  # fmt: skip
QUANT = {
    "quant_algo", "kv_cache_quant_algo", "group_size", "smoothquant_val", "clamp_val", "use_meta_recipe",
    "has_zero_point", "pre_quant_scale", "exclude_modules",
}  # fmt: skip
TAGS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class BadCheckpointError(Exception):
    """The checkpoint is not what TensorRT-LLM documents."""


def need(condition: bool, message: str) -> None:
    if not condition:
        raise BadCheckpointError(message)


def check_config(config: dict[str, Any]) -> None:
    need(set(config) == GENERIC | GEMMA, f"keys differ: {sorted(set(config) ^ (GENERIC | GEMMA))}")
    need(config["architecture"] == "Gemma3ForCausalLM", "architecture")
    need(config["dtype"] in TAGS, "dtype")
    need(set(config["quantization"]) <= QUANT, "quantization")
    need(config["quantization"]["quant_algo"] in (None, "FP8"), "quant_algo")
    need(config["quantization"]["kv_cache_quant_algo"] in (None, "FP8"), "kv_cache_quant_algo")
    need(config["query_pre_attn_scalar"] is not None and config["inter_layernorms"] is True, "gemma 3 group")
    scaling = config["rotary_scaling"]
    need(scaling is None or (scaling["type"] == "linear" and scaling["factor"] > 1), "rotary_scaling")
    need(set(config["runtime_defaults"]) <= {"max_attention_window", "sink_token_length"}, "runtime_defaults")
    need(len(config["runtime_defaults"]["max_attention_window"]) == config["num_hidden_layers"], "windows")
    mapping = config["mapping"]
    need(mapping["world_size"] == mapping["tp_size"] and mapping["pp_size"] == 1, "mapping")
    need(config["use_parallel_embedding"] == (mapping["tp_size"] > 1), "use_parallel_embedding")
    need(config["vocab_size"] % mapping["tp_size"] == 0, "vocab_size")


def expected_tensors(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every tensor of a rank; all ranks have the same."""
    tp, tag, hidden = config["mapping"]["tp_size"], TAGS[config["dtype"]], config["hidden_size"]
    dim, mlp, vocab = config["head_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv = config["num_attention_heads"] // tp, max(1, config["num_key_value_heads"] // tp)
    fp8, kv_fp8 = (config["quantization"][key] for key in ("quant_algo", "kv_cache_quant_algo"))
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "transformer.vocab_embedding.weight": (tag, (vocab // tp, hidden)),
        "transformer.ln_f.weight": (tag, (hidden,)),
        "lm_head.weight": (tag, (vocab // tp, hidden)),
    }
    for i in range(config["num_hidden_layers"]):
        prefix = f"transformer.layers.{i}."
        norms = dict.fromkeys(("input_layernorm", "post_layernorm", "pre_feedforward_layernorm"), hidden)
        norms |= {"post_feedforward_layernorm": hidden, "attention.q_layernorm": dim, "attention.k_layernorm": dim}
        found |= {f"{prefix}{name}.weight": (tag, (size,)) for name, size in norms.items()}
        linears = {
            "attention.qkv": ((heads + 2 * kv) * dim, hidden),
            "attention.dense": (hidden, heads * dim),
            "mlp.fc": (mlp // tp, hidden),
            "mlp.gate": (mlp // tp, hidden),
            "mlp.proj": (hidden, mlp // tp),
        }
        for name, shape in linears.items():
            found[f"{prefix}{name}.weight"] = ("F8_E4M3" if fp8 else tag, shape)
            if fp8:
                found |= {f"{prefix}{name}.{s}_scaling_factor": ("F32", (1,)) for s in ("activation", "weights")}
        if kv_fp8:
            found[f"{prefix}attention.kv_cache_scaling_factor"] = ("F32", (1,))
    return found


def check_rank(path: Path, expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    with safe_open(path, framework="numpy") as file:
        names = set(file.keys())
        need(names == set(expected), f"{path.name}: tensors differ: {sorted(names ^ set(expected))[:4]}")
        for name, (tag, shape) in expected.items():
            part = file.get_slice(name)
            have = (part.get_dtype(), tuple(part.get_shape()))
            need(have == (tag, shape), f"{path.name}: {name} is {have}, not {(tag, shape)}")


def check_checkpoint(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    check_config(config)
    ranks = [f"rank{rank}.safetensors" for rank in range(config["mapping"]["world_size"])]
    need(
        sorted(p.name for p in directory.iterdir() if p.suffix != ".cache") == sorted(["config.json", *ranks]), "files"
    )
    for name in ranks:
        check_rank(directory / name, expected_tensors(config))
    return config


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, options in FLAGS.items():
        parser.add_argument(f"--{name}", **options)
    args = parser.parse_args()
    print("[TRT-LLM] [I] loading", args.checkpoint_dir)
    config = check_checkpoint(Path(args.checkpoint_dir))
    need(args.workers == 1 or args.model_cls_file is None, "a class from a file cannot be sent to other workers")
    if message := os.environ.get("STAND_IN_FAIL"):
        print(message, file=sys.stderr)
        sys.exit(3)
    trtllm_stand_in.install()
    name = args.model_cls_name
    model_cls = getattr(SourceFileLoader("models", args.model_cls_file).load_module(), name)
    if os.environ.get("STAND_IN_OWN_CLASS"):
        model_cls = trtllm_stand_in.GemmaForCausalLM
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    for rank in range(config["mapping"]["world_size"]):
        model = model_cls(SimpleNamespace(**config))
        (output / f"rank{rank}.engine").write_text(json.dumps(model.seen()))
    lost = os.environ.get("STAND_IN_DROP", "")
    build = {key: getattr(args, key) for key in ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")}
    build |= {"max_beam_width": args.max_beam_width, "plugin_config": {"tokens_per_block": args.tokens_per_block}}
    build |= {"max_num_tokens": 7} if os.environ.get("STAND_IN_CLAMP") else {}
    config["runtime_defaults"]["sink_token_length"] = None
    document = {
        "version": "1.2.1",
        "pretrained_config": {k: v for k, v in config.items() if k != lost},
        "build_config": build,
    }
    (output / "config.json").write_text(json.dumps(document))
    (Path(args.output_timing_cache)).write_bytes(b"cache")


if __name__ == "__main__":
    main()
