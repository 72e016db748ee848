"""Damaged and foreign quantized models: each is refused in one line, or read to what its files say.

A failure prints the case's number; `judge(NUMBER, SEED, path)` runs it again.
"""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.mutations import odd_value, pick
from quantized_forms import FORMS, Tensors, decode, make_model, write_model

from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.errors import CheckpointError

SEED = 41
REFUSED, READ = "refused", "read right"
SIZES = {"F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
         "BOOL": 1, "I64": 8, "F64": 8, "U64": 8}  # fmt: skip
PARTS = ["weight", "weight_scale", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale",
         "qweight", "qzeros", "scales", "biases", "g_idx", "weight.absmax", "weight.quant_map", "weight_scale_inv",
         "weight.nested_absmax", "weight.nested_quant_map", "bias", "k_scale", "SCB"]  # fmt: skip
KEYS = [
    "bits", "group_size", "sym", "desc_act", "zero_point", "version", "format", "ignore", "kv_cache_scheme",
    "mode", "dynamic", "sparsity_config", "quant_algo", "checkpoint_format", "weight_block_size",
    "activation_scheme", "modules_to_not_convert", "lm_head", "rotation", "load_in_8bit",
    "quantized_layers", "config_groups",
]  # fmt: skip
WORDS = [
    "gptq", "awq", "bitsandbytes", "compressed-tensors", "modelopt", "mlx", "hqq", "torchao", "fp8",
    "nvfp4", "gemm", "gemv", "marlin", "int", "float", "block", "channel", "tensor", "group",
    "pack-quantized", "float-quantized", "mxfp4", "gptq_v2", "nf4", "fp4", "FP8", "NVFP4", "affine",
    "re:.*proj", "Linear",
]  # fmt: skip


def damage_config(rng: np.random.Generator, config: dict[str, Any]) -> None:
    """Change, drop or add a key somewhere in the description, or put it elsewhere."""
    key = "quantization" if isinstance(config.get("quantization"), dict) else "quantization_config"
    how = rng.random()
    if how < 0.05:
        said = config.pop(key)
        if rng.random() < 0.5:
            config[pick(rng, ["quantization", "quantization_config", "compression_config", "quantize"])] = said
        return
    if how < 0.1:
        other = FORMS[pick(rng, list(FORMS))]
        config[pick(rng, [key, "quantization_config", "quantization"])] = copy.deepcopy(other)
        return
    inner = config[key]
    while (deeper := [v for v in inner.values() if isinstance(v, dict) and v]) and rng.random() < 0.75:
        inner = pick(rng, deeper)
    name = pick(rng, KEYS if rng.random() < 0.2 else list(inner))
    if rng.random() < 0.2:
        inner.pop(name, None)
    elif rng.random() < 0.5:
        inner[name] = pick(rng, [*WORDS, True, False, None, 4, 8, 2, 3, 16, 32, 64, 128, -1, 0, [], {}, 4.0, 16.0])
    else:
        inner[name] = odd_value(rng, inner.get(name))


def damage_tensor(rng: np.random.Generator, tensors: Tensors) -> None:
    """Drop, rename, swap, retype, reshape, cut or overwrite a tensor, mostly one of a quantized module."""
    names = [n for n in tensors if "proj" in n or "scale" in n] if rng.random() < 0.9 else list(tensors)
    name = pick(rng, names)
    tag, array = tensors[name]
    module = name.split("proj.")[0] + "proj" if "proj." in name else name.rpartition(".")[0]
    how = int(rng.integers(10))
    if how == 0:
        del tensors[name]
    elif how == 1:
        tensors[f"{module}.{pick(rng, PARTS)}"] = tensors.pop(name)
    elif how == 2:
        tensors[f"{module}.{pick(rng, PARTS)}"] = tensors[pick(rng, names)]
    elif how == 3:
        other = pick(rng, names)
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif how == 4:
        wide = [t for t, size in SIZES.items() if size == array.itemsize]
        tensors[name] = pick(rng, wide), array
    elif how == 5:
        shapes = [array.shape[::-1], (array.size,), (array.size, 1), (1, *array.shape), (1, array.size)]
        tensors[name] = tag, np.ascontiguousarray(array).reshape(pick(rng, shapes))
    elif how == 6 and array.ndim and len(array) > 1:
        tensors[name] = tag, array[: int(rng.integers(1, len(array)))]
    elif how == 7 and array.ndim:
        tensors[name] = tag, np.concatenate([array, array[:1]])
    elif how == 8:
        raw = bytearray(np.ascontiguousarray(array).tobytes())
        for _ in range(int(rng.integers(1, 4))):
            raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
        tensors[name] = tag, np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
    else:
        value = pick(rng, [0, 1, 255, 0x7F80, 0x7FC0, 0xFFFF, 0x80, 3])
        filled = np.full(array.shape, 0, array.dtype)
        filled.reshape(-1).view(f"u{array.itemsize}")[:] = value & ((1 << (8 * array.itemsize)) - 1)
        tensors[name] = tag, filled


def make_case(number: int, seed: int) -> tuple[str, dict[str, Any], Tensors, dict[str, Any]]:
    rng = np.random.default_rng([seed, number])
    name = list(FORMS)[number % len(FORMS)]
    config, tensors = make_model(name, rng)
    files: dict[str, Any] = {}
    for _ in range(int(rng.integers(0 if number % 97 == 0 else 1, 3))):
        kind = rng.random()
        if kind < 0.45 and any(isinstance(config.get(k), dict) for k in ("quantization", "quantization_config")):
            damage_config(rng, config)
        elif kind < 0.97:
            damage_tensor(rng, tensors)
        else:
            file = pick(rng, ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
            files[file] = pick(rng, [{}, FORMS[name], {"quantization": {"quant_algo": "FP8"}}, {"bits": 4}])
    return name, config, tensors, files


def judge(number: int, seed: int, path: Path) -> str:
    """Open and read a case; every fifth is converted, too. Returns how it ended, or raises AssertionError."""
    name, config, tensors, files = make_case(number, seed)
    for stale in path.glob("*.json"):
        stale.unlink()
    write_model(path, config, tensors, files)
    try:
        source = open_source(path)
        found = {}
        for tensor, info in source.tensors.items():
            middle = info.shape[0] // 3
            found[tensor] = np.concatenate([_widen(*source.read_rows(tensor, *span))
                                            for span in ((0, middle), (middle, info.shape[0]))])  # fmt: skip
            source.read_e4m3(tensor, 0, middle + 1)
        if number % 5 == 0:
            convert(path, path.parent / "out", force=True)
    except CheckpointError as error:
        text = str(error)
        assert text.isprintable() and len(text) < 1500 and str(path) in text, f"case {number} ({name}): {text!r}"
        return REFUSED
    if "quantization" not in " ".join(k for k, v in config.items() if v):  # a file of its own says it
        config |= {"quantization_config": next(iter(files.values()), None)}
    wanted = decode(config, tensors)
    assert set(found) == set(wanted), f"case {number} ({name}): other tensors"
    for tensor, weight in wanted.items():
        np.testing.assert_array_equal(found[tensor], weight, f"case {number} ({name}): {tensor}")
    return READ


def _widen(block: np.ndarray, tag: str) -> np.ndarray:
    return (block.astype(np.uint32) << 16).view(np.float32) if tag == "BF16" else block.astype(np.float32)


def run_cases(numbers: range, seed: int, path: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    with np.errstate(all="ignore"):
        for number in numbers:
            try:
                counts[judge(number, seed, path)] += 1
            except AssertionError:
                raise
            except Exception as error:
                name, config, tensors, files = make_case(number, seed)
                raise AssertionError(f"case {number} ({name}), seed {seed}: {type(error).__name__}: {error}") from error
    return counts


def test_three_hundred_damaged_models(tmp_path: Path) -> None:
    counts = run_cases(range(300), SEED, tmp_path / "m")
    assert counts[READ] > 20 and counts[REFUSED] > 150, counts


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_damaged_models(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print(json.dumps({"seed": seed}), run_cases(range(10_000), seed, tmp_path / "m"))
