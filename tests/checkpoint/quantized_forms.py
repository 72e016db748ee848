"""Tiny quantized models by hand, and what each form means: packing and decoding from the published definitions.

Plain loops over integers, so that nothing is shared with the product. A model is {name: (safetensors tag, array)} and
a config.json; BF16 is its bits in uint16, E4M3 its bits in uint8. `decode` reads any such model, also a damaged one.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
from fuzz import models
from fuzz.models import CONFIG, packed

Tensors = dict[str, tuple[str, np.ndarray]]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_FP8_ARGS = {"num_bits": 8, "type": "float", "symmetric": True}
_CT = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head", "re:vision.*"]}


def _ct(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "input_activations": inputs}
    return _CT | {"format": form, "config_groups": {"group_0": group}} | more


_W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16, "actorder": "weight"}
_TOKEN, _TENSOR = {"strategy": "token", "dynamic": True}, {"strategy": "tensor", "dynamic": False}
_BNB = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, "_load_in_8bit": False,
    "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0,
    "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": ["lm_head"],
}  # fmt: skip
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False, "damp_percent": 0.01}
FORMS: dict[str, dict[str, Any]] = {
    "ct fp8": _ct("float-quantized", _FP8_ARGS | {"strategy": "channel"}, _FP8_ARGS | _TOKEN),
    "ct fp8 static": _ct("float-quantized", _FP8_ARGS | {"strategy": "tensor"}, _FP8_ARGS | _TENSOR,
                         kv_cache_scheme=_FP8_ARGS | _TENSOR),
    "ct w4": _ct("pack-quantized", _W4),
    "ct w8": _ct("pack-quantized", _W4 | {"num_bits": 8, "strategy": "channel", "group_size": None}),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"},
                 "ignore": ["lm_head", "vision_tower*"], "producer": {"name": "modelopt"}},
    "mlx 4": {"group_size": 32, "bits": 4},
    "mlx 8": {"group_size": 32, "bits": 8, "mode": "affine",
              "model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 4}},
    "nf4": _BNB | {"bnb_4bit_use_double_quant": False}, "nf4 nested": _BNB,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["vision_tower"]},
    "gptq": _GPTQ, "gptq order": _GPTQ | {"desc_act": True, "checkpoint_format": "gptq"},
    "gptq 8": _GPTQ | {"bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
}  # fmt: skip
"""Fields of config.json by form; MLX's stand in `quantization`."""


def make_model(
    name: str, rng: np.random.Generator, form: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Tensors]:
    """config.json and random tensors of a form, described by `form` in place of FORMS."""
    said = copy.deepcopy(form or FORMS[name])
    config = CONFIG | {("quantization" if name.startswith("mlx") else "quantization_config"): said}
    tensors: Tensors = {}
    for tensor, shape in models.shapes().items():
        module = tensor.removesuffix(".weight")
        if module.endswith(LINEARS) or (name.startswith("mlx") and module.endswith("embed_tokens")):
            tensors |= {f"{module}.{part}": held for part, held in make_module(name, said, module, shape, rng).items()}
        else:
            scale = 0.1 if "norm" in tensor else 0.3
            tensors[tensor] = "BF16", models.bf16(rng.standard_normal(shape).astype(np.float32) * np.float32(scale))
    if name in ("ct fp8 static", "modelopt"):
        for layer in range(CONFIG["num_hidden_layers"]):
            for kind in "kv":
                inner = f"{kind}_proj.{kind}_scale" if name == "modelopt" else f"{kind}_scale"
                tensors[f"model.layers.{layer}.self_attn.{inner}"] = "F32", np.float32(rng.uniform(0.01, 2)).reshape(())
    return config, tensors


def make_module(name: str, said: Any, module: str, shape: tuple[int, ...], rng: np.random.Generator) -> Tensors:
    rows, columns = shape
    if name in ("ct fp8", "ct fp8 static", "modelopt"):
        codes = rng.integers(0, 0x7F, shape, dtype=np.uint8) | rng.integers(0, 2, shape, dtype=np.uint8) << 7
        if name == "ct fp8":
            return {"weight": ("F8_E4M3", codes), "weight_scale": ("BF16", models.bf16(_scales(rng, (rows, 1))))}
        shared = {"q_proj": 0.02, "k_proj": 0.02, "v_proj": 0.02, "gate_proj": 0.03, "up_proj": 0.03}
        inner = np.float32(shared.get(module.rpartition(".")[2], 0.05)).reshape(())
        scale = "F32", _scales(rng, () if name == "modelopt" else (1,))
        return {"weight": ("F8_E4M3", codes), "weight_scale": scale, "input_scale": ("F32", inner)}
    if name.startswith("nf4"):
        return _make_nf4(name, shape, rng)
    sizes = said.get(module, said) if name.startswith("mlx") else said
    args = said["config_groups"]["group_0"]["weights"] if name.startswith("ct") else sizes
    bits, group = args.get("num_bits") or args["bits"], args["group_size"]
    group = columns if group in (None, -1) else group
    codes, groups = rng.integers(0, 1 << bits, shape), columns // group
    if name.startswith("ct"):
        scale = "BF16", models.bf16(_scales(rng, (rows, groups)))
        size = "I64", np.array(shape, np.int64)
        return {"weight_packed": ("I32", _words(codes, bits)), "weight_scale": scale, "weight_shape": size}
    if name.startswith("mlx"):
        scale, bias = ("BF16", models.bf16(_scales(rng, (rows, groups)))), _scales(rng, (rows, groups)) * -8
        words = _words(codes, bits).view(np.uint32)
        return {"weight": ("U32", words), "scales": scale, "biases": ("BF16", models.bf16(bias))}
    scale = "F16", _scales(rng, (groups, rows)).astype(np.float16)
    if name == "awq":
        zeros = rng.integers(0, 16, (groups, rows))
        return {"qweight": ("I32", _awq_words(codes.T)), "qzeros": ("I32", _awq_words(zeros)), "scales": scale}
    zero = (1 << (bits - 1)) - (said.get("checkpoint_format") != "gptq_v2")
    order = np.arange(columns) // group
    order = rng.permutation(order) if said["desc_act"] else order
    return {
        "qweight": ("I32", np.ascontiguousarray(_words(codes, bits).T)), "scales": scale,
        "qzeros": ("I32", _words(np.full((groups, rows), zero), bits)), "g_idx": ("I32", order.astype(np.int32)),
    }  # fmt: skip


def _scales(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(rng.uniform(0.001, 0.1, shape), np.float32)


def _make_nf4(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Tensors:
    count = shape[0] * shape[1]
    blocks = count // 64
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    parts: Tensors = {"weight": ("U8", rng.integers(0, 256, (count // 2, 1), dtype=np.uint8))}
    parts["weight.quant_map"] = "F32", np.array(NF4, np.float32)
    if name == "nf4":
        parts["weight.absmax"] = "F32", _scales(rng, (blocks,))
    else:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
        parts["weight.absmax"] = "U8", rng.integers(0, 256, blocks, dtype=np.uint8)
        parts["weight.nested_absmax"] = "F32", _scales(rng, (-(-blocks // 256),))
        parts["weight.nested_quant_map"] = "F32", np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return parts | {"weight.quant_state.bitsandbytes__nf4": ("U8", text)}


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last axis into int32, lowest bits first."""
    each = 32 // bits
    filled = np.zeros((codes.shape[0], -(-codes.shape[1] // each) * each), np.int64)
    filled[:, : codes.shape[1]] = codes
    words = sum(filled[:, i::each] << (bits * i) for i in range(each))
    return np.asarray(words).astype(np.uint32).view(np.int32)


def _awq_words(codes: np.ndarray) -> np.ndarray:
    """Pack the last axis eight at a time, in AutoAWQ's order (WQLinear_GEMM.from_linear)."""
    words = sum(codes[:, AWQ_ORDER[i] :: 8].astype(np.int64) << (4 * i) for i in range(8))
    return np.asarray(words).astype(np.uint32).view(np.int32)


def write_model(path: Path, config: dict[str, Any], tensors: Tensors, files: dict[str, Any] | None = None) -> Path:
    """Write a directory with a tokenizer; `files` are more JSON files."""
    path.mkdir(parents=True, exist_ok=True)
    header, data = {}, b""
    for name, (tag, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": tag, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    (path / "model.safetensors").write_bytes(packed(header, data))
    for name, value in {"config.json": config, **models.tokenizer_files(), **(files or {})}.items():
        (path / name).write_text(json.dumps(value))
    return path


def decode(config: dict[str, Any], tensors: Tensors) -> dict[str, np.ndarray]:
    """Weights in float32 by name, of a model that a reader may accept. Raises for one that means nothing."""
    keys = ("quantization", "quantization_config", "compression_config")
    said = next(config[key] for key in keys if config.get(key))
    method = said.get("quant_method", "mlx")
    found: dict[str, np.ndarray] = {}
    for name, (tag, array) in tensors.items():
        module = name.rpartition(".")[0]
        if name.endswith((".weight_scale", ".scales", ".weight.absmax")):
            whole = module if "absmax" not in name else module.removesuffix(".weight")
            parts = {n.removeprefix(whole + "."): held for n, held in tensors.items() if n.startswith(whole + ".")}
            found[f"{whole}.weight"] = _decode_module(method, said, whole, parts)
        elif tag in ("BF16", "F16", "F32") and name.endswith(".weight"):
            found.setdefault(name, widen(tag, array))
    return found


def widen(tag: str, array: np.ndarray) -> np.ndarray:
    """Floats as float32."""
    if tag == "BF16":
        return (np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array).view({"F16": np.float16, "F32": np.float32}[tag]).astype(np.float32)


def e4m3(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    assert code & 0x7F != 0x7F
    return -value if code & 128 else value


def _decode_module(method: str, said: dict[str, Any], module: str, parts: Tensors) -> np.ndarray:
    get = {part: array for part, (_, array) in parts.items()}
    if method == "bitsandbytes":
        return _decode_nf4(get)
    scales = widen(*parts["weight_scale" if "weight_scale" in parts else "scales"])
    if "weight" in parts and parts["weight"][0] == "F8_E4M3":
        table = np.array([0.0 if code & 0x7F == 0x7F else e4m3(code) for code in range(256)], np.float32)
        return table[get["weight"]] * (scales.reshape(-1, 1) if scales.size > 1 else scales.reshape(()))
    if method == "compressed-tensors":
        args = next(iter(said["config_groups"].values()))["weights"]
        rows, columns = map(int, get["weight_shape"])
        codes = _unwords(get["weight_packed"], args["num_bits"])[:, :columns] - (1 << (args["num_bits"] - 1))
        return _by_group(codes, scales, np.arange(columns) * scales.shape[1] // columns)
    if method == "mlx":
        sizes = said.get(module, said)
        codes = _unwords(get["weight"].view(np.int32), sizes["bits"])
        groups = np.arange(codes.shape[1]) // sizes["group_size"]
        return _by_group(codes, scales, groups) + widen(*parts["biases"])[:, groups]
    if method == "awq":
        codes, zeros = (_awq_codes(get[part]) for part in ("qweight", "qzeros"))
        groups = np.arange(len(codes)) * len(scales) // len(codes)
        return _by_group((codes - zeros[groups]).T, scales.T, groups)
    codes = _unwords(np.ascontiguousarray(get["qweight"].T), said["bits"])
    layout = said.get("checkpoint_format") or said.get("format")
    zeros = _unwords(get["qzeros"], said["bits"]) + (layout != "gptq_v2")
    groups = get["g_idx"] if "g_idx" in get else np.arange(codes.shape[1]) * len(scales) // codes.shape[1]
    return _by_group(codes - zeros.T[: len(codes), groups], scales.T, groups)


def _by_group(codes: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return np.asarray(codes, np.float32) * scales[:, groups]


def _unwords(words: np.ndarray, bits: int) -> np.ndarray:
    wide, each = words.view(np.uint32).astype(np.int64), 32 // bits
    codes = np.zeros((wide.shape[0], wide.shape[1] * each), np.int64)
    for i in range(each):
        codes[:, i::each] = (wide >> (bits * i)) & ((1 << bits) - 1)
    return codes


def _awq_codes(words: np.ndarray) -> np.ndarray:
    wide = words.view(np.uint32).astype(np.int64)
    codes = np.zeros((wide.shape[0], wide.shape[1] * 8), np.int64)
    for i in range(8):
        codes[:, AWQ_ORDER[i] :: 8] = (wide >> (4 * i)) & 15
    return codes


def _decode_nf4(get: dict[str, np.ndarray]) -> np.ndarray:
    state = json.loads(bytes(get["weight.quant_state.bitsandbytes__nf4"]))
    scales = get["weight.absmax"]
    if "nested_offset" in state:
        outer = np.repeat(get["weight.nested_absmax"], state["nested_blocksize"])[: len(scales)]
        scales = get["weight.nested_quant_map"][scales] * outer + np.float32(state["nested_offset"])
    assert get["weight.quant_map"].tolist() == np.array(NF4, np.float32).tolist()
    data = get["weight"].reshape(-1)
    values = np.array(NF4, np.float32)[np.stack([data >> 4, data & 15], 1).reshape(-1)]
    return (values * np.repeat(scales, state["blocksize"])[: len(values)]).reshape(state["shape"])
