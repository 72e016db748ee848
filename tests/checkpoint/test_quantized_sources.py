"""Quantized Hugging Face checkpoints: each form equals its definition, and FP8 is kept bit for bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from quantized_forms import FORMS, Tensors, decode, make_model, make_module, write_model
from safetensors.numpy import save_file
from tiny_images import TEXT, VISION, make_config, make_vision_tensors

from wicore_trt.backends.torch.calibrate import TextCalibration
from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.names import hf_shapes
from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile
from wicore_trt.engine.build import build_engine
from wicore_trt.errors import CheckpointError
from wicore_trt.model.hf_config import read_hf_config

FP8_FORMS = ("ct fp8", "ct fp8 static", "modelopt")


def write(path: Path, name: str) -> tuple[Path, dict[str, Any], Tensors]:
    config, tensors = make_model(name, np.random.default_rng(7))
    return write_model(path, config, tensors), config, tensors


@pytest.mark.parametrize("name", FORMS)
def test_a_form_equals_its_definition(name: str, tmp_path: Path) -> None:
    path, config, tensors = write(tmp_path / "m", name)
    source, wanted = open_source(path), decode(config, tensors)
    assert set(source.tensors) == set(wanted)
    for tensor, weight in wanted.items():
        np.testing.assert_array_equal(source.read_tensor(tensor), weight, tensor)
        if weight.ndim == 2:  # rows that begin in the middle of words and blocks
            some, tag = source.read_rows(tensor, 3, 13)
            assert tag in ("F32", "BF16")
            np.testing.assert_array_equal(some if tag == "F32" else 0, weight[3:13] if tag == "F32" else 0)


@pytest.mark.parametrize("name", FORMS)
def test_bfloat16_is_rounded_once_and_said(name: str, tmp_path: Path) -> None:
    path, config, tensors = write(tmp_path / "m", name)
    notes: list[str] = []
    checkpoint = convert(path, tmp_path / "c", dtype="bfloat16", note=notes.append)
    wanted = decode(config, tensors)["model.layers.1.mlp.down_proj.weight"]
    bits = SafetensorsFile(checkpoint.rank_files[0]).read_rows("transformer.layers.1.mlp.proj.weight", 0, 32)
    wide = wanted.view(np.uint32).astype(np.uint64)
    np.testing.assert_array_equal(bits, ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16))
    assert "dequantized to bfloat16, each value rounded once" in notes[0]
    assert json.loads((tmp_path / "c" / "config.json").read_text())["wicore"]["read_as"] == notes[0]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", FP8_FORMS)
def test_fp8_is_kept_bit_for_bit(name: str, tp: int, tmp_path: Path) -> None:
    path, _, tensors = write(tmp_path / "m", name)
    notes: list[str] = []
    checkpoint = convert(path, tmp_path / "c", tp_size=tp, note=notes.append)
    assert checkpoint.weights.storage == "fp8" and "kept as published" in notes[0]
    assert checkpoint.weights.static_activations is (name != "ct fp8")
    assert checkpoint.kv_scales is (name != "ct fp8")
    for rank, file in enumerate(checkpoint.rank_files):
        held = SafetensorsFile(file)
        for layer, (ours, theirs) in ((0, ("mlp.fc", "mlp.gate_proj")), (1, ("attention.dense", "self_attn.o_proj"))):
            _, codes = tensors[f"model.layers.{layer}.{theirs}.weight"]
            tag, scales = tensors[f"model.layers.{layer}.{theirs}.weight_scale"]
            scales = (scales.astype(np.uint32) << 16).view(np.float32) if tag == "BF16" else scales
            scales = np.broadcast_to(scales.reshape(-1), len(codes)) if scales.size == 1 else scales.reshape(-1)
            rows = slice(rank * len(codes) // tp, (rank + 1) * len(codes) // tp) if ours == "mlp.fc" else slice(None)
            columns = slice(None) if ours == "mlp.fc" else slice(rank * 32 // tp, (rank + 1) * 32 // tp)
            weight = f"transformer.layers.{layer}.{ours}.weight"
            bits = held.read_rows(weight, 0, held.tensors[weight].shape[0])
            np.testing.assert_array_equal(bits, codes[rows, columns])
            np.testing.assert_array_equal(held.read_rows(f"{weight}s_scaling_factor", 0, len(bits)), scales[rows])
        if name != "ct fp8":
            qkv = "transformer.layers.0.attention."
            assert held.read_rows(f"{qkv}qkv.activation_scaling_factor", 0, 1) == np.float32(0.02)
            inner = [f"{k}_proj.{k}_scale" if name == "modelopt" else f"{k}_scale" for k in "kv"]
            larger = max(tensors[f"model.layers.0.self_attn.{one}"][1] for one in inner)
            assert held.read_rows(f"{qkv}kv_cache_scaling_factor", 0, 1) == larger


def test_input_scales_that_differ_are_left_for_the_token(tmp_path: Path) -> None:
    config, tensors = make_model("modelopt", np.random.default_rng(7))
    tensors["model.layers.1.mlp.up_proj.input_scale"] = "F32", np.float32(0.031).reshape(())
    notes: list[str] = []
    checkpoint = convert(write_model(tmp_path / "m", config, tensors), tmp_path / "c", note=notes.append)
    assert not checkpoint.weights.static_activations and checkpoint.kv_scales
    assert "by the token, its scales left aside" in notes[0]


def test_fp8_whose_inputs_are_not_quantized_becomes_bfloat16(tmp_path: Path) -> None:
    config, tensors = make_model("ct fp8", np.random.default_rng(8))
    config["quantization_config"] = copy.deepcopy(config["quantization_config"])
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    source = write_model(tmp_path / "m", config, tensors)
    assert convert(source, tmp_path / "auto").weights.storage == "bfloat16"
    assert convert(source, tmp_path / "asked", dtype="fp8").weights.storage == "fp8"


@pytest.mark.long
def test_an_engine_of_published_fp8_computes_what_its_weights_say(tmp_path: Path) -> None:
    from wicore_trt import LLM, SamplingParams

    path, config, tensors = write(tmp_path / "m", "ct fp8")
    notes: list[str] = []
    engine = build_engine(path, tmp_path / "e", note=notes.append)
    assert engine.manifest.dtype == "fp8" and engine.manifest.compiled["read_as"] == notes[0]
    wide = {n: ("F32", w) for n, w in decode(config, tensors).items()}
    plain = write_model(tmp_path / "p", {k: v for k, v in config.items() if k != "quantization_config"}, wide)
    answers = []
    for built in (engine.path, build_engine(plain, tmp_path / "q", dtype="float32").path):
        with LLM(built) as llm:
            asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True)
            [[answer]] = llm.generate([[2, 9, 17, 30, 5]], asked)
            answers.append([token.logprob for token in answer.prompt_logprobs[1:]])
    np.testing.assert_allclose(answers[0], answers[1], atol=0.3)


@pytest.mark.parametrize("name", ["ct w4", "gptq", "gptq order", "awq"])
def test_symmetric_groups_become_q4_0_bit_for_bit(name: str, tmp_path: Path) -> None:
    forms = copy.deepcopy(FORMS[name])
    (forms["config_groups"]["group_0"]["weights"] if name == "ct w4" else forms)["group_size"] = 32
    config, tensors = make_model(name, np.random.default_rng(7), forms)
    path, notes = write_model(tmp_path / "m", config, tensors), list[str]()
    fits = name in ("ct w4", "gptq")
    if name == "ct w4":  # beyond the bits of a float16
        tensors["model.layers.1.mlp.up_proj.weight_scale"] = "F32", np.full((64, 1), 0.1, np.float32)
        write_model(path, config, tensors)
    source, wanted = open_source(path), decode(config, tensors)
    blocks = [tensor for tensor in source.tensors if source.find_blocks(tensor)]
    assert len(blocks) == (13 if name == "ct w4" else 14 if fits else 0)
    for tensor in blocks:
        raw = source.read_blocks(tensor, 3, 16)
        np.testing.assert_array_equal(dequantize(raw, GGMLQuantizationType.Q4_0), wanted[tensor][3:16])
    checkpoint = convert(path, tmp_path / "c", dtype="q4_0", note=notes.append)
    assert ("kept bit for bit" in notes[0]) is fits and ("a second time" in notes[0]) is (name != "gptq")
    assert checkpoint.weights.storage == "q4_0"


def test_an_mlx_image_encoder_has_channels_last_and_quantized_modules(tmp_path: Path) -> None:
    rng, said = np.random.default_rng(3), {"group_size": 32, "bits": 4}
    wanted, tensors = {}, Tensors()
    for name, weight in make_vision_tensors(VISION, TEXT["hidden_size"]).items():
        if name.endswith("fc1.weight"):
            parts = make_module("mlx 4", said, name.removesuffix(".weight"), weight.shape, rng)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": held for part, held in parts.items()}
        else:
            tensors[name] = "F32", np.moveaxis(weight, 1, -1) if weight.ndim == 4 else weight
            wanted[name] = weight
    config = make_config() | {"quantization": said}
    for name, shape in hf_shapes(read_hf_config(make_config())).items():
        tensors[f"language_model.{name}"] = "F32", rng.standard_normal(shape, np.float32)
    source = open_source(write_model(tmp_path / "m", config, tensors))
    assert source.vision is not None
    for name, weight in wanted.items():
        np.testing.assert_array_equal(source.read_rows(name, 0, len(weight))[0], weight, name)
    fc1 = [name for name in tensors if name.endswith("fc1.scales")]
    for name in fc1:
        whole = name.removesuffix("scales") + "weight"
        held = source.read_rows(whole, 0, VISION["intermediate_size"])[0]
        np.testing.assert_array_equal(held, decode(config, tensors)[whole])
    assert fc1


def test_an_adapter_is_merged_into_what_quantized_weights_mean(tmp_path: Path) -> None:
    path, config, tensors = write(tmp_path / "m", "modelopt")
    rng, low, adapter = np.random.default_rng(5), {}, tmp_path / "a"
    adapter.mkdir()
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        low |= {f"{name}A.weight": rng.standard_normal((2, 32), np.float32)}
        low |= {f"{name}B.weight": rng.standard_normal((32, 2), np.float32)}
    save_file(low, adapter / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    source, base, notes = open_source(path, lora=adapter), decode(config, tensors), list[str]()
    q, k = (f"model.layers.0.self_attn.{one}_proj.weight" for one in "qk")
    a, b = (low[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{one}.weight"] for one in "AB")
    np.testing.assert_allclose(source.read_tensor(q), base[q] + b @ a, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(source.read_tensor(k), base[k])
    checkpoint = convert(path, tmp_path / "c", dtype="fp8", lora=adapter, note=notes.append)
    assert not checkpoint.weights.static_activations and not checkpoint.kv_scales
    assert notes[0].startswith("before the adapter was merged, ModelOpt FP8") and "left aside" in notes[0]
    bits = SafetensorsFile(checkpoint.rank_files[0]).read_rows("transformer.layers.0.attention.qkv.weight", 32, 48)
    np.testing.assert_array_equal(bits, tensors[k][1])
    assert convert(path, tmp_path / "d", lora=adapter).weights.storage == "bfloat16"


@pytest.mark.long
def test_calibration_takes_the_place_of_published_scales(tmp_path: Path) -> None:
    path, _, tensors = write(tmp_path / "m", "modelopt")
    (tmp_path / "text").write_text("abcdefgh " * 40)
    calibration, notes = TextCalibration(tmp_path / "text", 8), list[str]()
    checkpoint = convert(path, tmp_path / "c", dtype="fp8", calibration=calibration, note=notes.append)
    held = SafetensorsFile(checkpoint.rank_files[0])
    assert held.read_rows("transformer.layers.0.attention.qkv.activation_scaling_factor", 0, 1) != np.float32(0.02)
    bits = held.read_rows("transformer.layers.0.attention.qkv.weight", 32, 48)
    np.testing.assert_array_equal(bits, tensors["model.layers.0.self_attn.k_proj.weight"][1])
    assert notes[0] == "ModelOpt FP8 weights of 14 tensors kept as published, bits and scales."


Edit = Callable[[dict[str, Any], dict[str, Any], Tensors], None]


def said(**keys: Any) -> Edit:
    return lambda config, described, tensors: described.update(keys)


def weights(**keys: Any) -> Edit:
    return lambda config, described, tensors: described["config_groups"]["group_0"]["weights"].update(keys)


def gone(name: str) -> Edit:
    return lambda config, described, tensors: tensors.pop(name) and None


def put(name: str, tag: str, array: Any) -> Edit:
    return lambda config, described, tensors: tensors.update({name: (tag, np.asarray(array))})


UP = "model.layers.1.mlp.up_proj."
REFUSED: list[tuple[str, Edit, str]] = [
    ("ct fp8", said(quant_method="torchao"), "quantized by 'torchao'"), ("ct fp8", said(quant_method="hqq"), "hqq"),
    ("ct fp8", said(quant_method=None), "by None"), ("ct fp8", said(quant_method="fp8"), "by 'fp8'"),
    ("ct fp8", said(format="nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'"),
    ("ct fp8", said(format="marlin-24"), "format"), ("ct fp8", said(new_key=3), "new_key is 3; it is not known"),
    ("ct fp8", said(config_groups={}), "one group"), ("ct fp8", said(sparsity_config={"format": "sparse-24-bitmask"}),
                                                      "sparsity_config"),
    ("ct fp8", said(transform_config={"config_groups": {"u": {}}}), "transform_config"),
    ("ct fp8", said(ignore=["re:.*mlp.*"]), "is quantized, and its configuration says that it is not"),
    ("ct fp8", said(ignore=["re:(a+)+b"]), "a pattern"), ("ct fp8", weights(strategy="block"), "strategy is 'block'"),
    ("ct fp8", weights(block_structure=[128, 128]), "block_structure"), ("ct fp8", weights(num_bits=4), "num_bits"),
    ("ct fp8", weights(symmetric=False), "symmetric"), ("ct fp8", gone(UP + "weight_scale"), "stored as F8_E4M3"),
    ("ct fp8", put(UP + "weight_scale", "F32", np.full((64, 1), np.nan, np.float32)), "not finite and above 0"),
    ("ct fp8", put(UP + "weight", "F8_E4M3", np.full((64, 32), 0x7F, np.uint8)), "has a NaN"),
    ("ct fp8", put(UP + "weight", "F8_E5M2", np.zeros((64, 32), np.uint8)), "weight as F8_E5M2"),
    ("ct fp8", put(UP + "weight_scale", "F32", np.ones((2, 16), np.float32)), r"weight_scale as F32 \[2, 16\]"),
    ("ct fp8 static", gone(UP + "input_scale"), "lacks input_scale"),
    ("ct fp8 static", put(UP + "input_scale", "F32", np.float32(0).reshape(())), "input_scale that is not finite"),
    ("ct fp8 static", put("model.layers.1.self_attn.k_scale", "F32", np.float32(np.nan).reshape(())), "no scale of a"),
    ("ct fp8", lambda config, described, tensors: described["config_groups"]["group_0"].update(
        targets=["re:.*self_attn"]), "says that it is not"),
    ("ct fp8 static", gone("model.layers.1.self_attn.k_scale"), "some layers have"),
    ("ct fp8", put(UP + "input_scale", "F32", np.float32(1).reshape(())), "input_scale"),
    ("ct w4", weights(symmetric=False), "symmetric is False"), ("ct w4", weights(actorder="group"), "actorder"),
    ("ct w4", put(UP + "weight_zero_point", "I32", np.zeros((8, 2), np.int32)), "weight_zero_point"),
    ("ct w4", put(UP + "weight_g_idx", "I32", np.zeros(32, np.int32)), "weight_g_idx"),
    ("ct w4", weights(group_size=32), "weight_scale as"), ("ct w4", gone(UP + "weight_shape"), "lacks weight_shape"),
    ("modelopt", said(quant_algo="NVFP4"), "quant_algo is 'NVFP4'"), ("modelopt", said(quant_algo=None), "lacks quant"),
    ("modelopt", said(kv_cache_scheme="INT8"), "kv_cache_scheme is 'INT8'"),
    ("mlx 4", said(mode="mxfp4"), "mode is 'mxfp4'"), ("mlx 4", said(bits=3), "bits is 3"),
    ("mlx 4", gone(UP + "biases"), "lacks biases"), ("mlx 4", put(UP + "biases", "F64", np.ones((64, 1))), "biases as"),
    ("mlx 4", lambda config, described, tensors: config.update(
        quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
                             "version": "gemm"}), "two different"),
    ("nf4", said(bnb_4bit_quant_type="fp4"), "fp4"), ("nf4", said(load_in_8bit=True), "load_in_8bit"),
    ("nf4", said(bnb_4bit_quant_storage="bfloat16"), "quant_storage"),
    ("nf4", gone(UP + "weight.quant_map"), "lacks weight.quant_map"),
    ("nf4 nested", gone(UP + "weight.nested_absmax"), "nested_"),
    ("nf4 nested", put(UP + "weight.quant_map", "F32", np.linspace(-1, 1, 16, dtype=np.float32)), "not NF4"),
    ("awq", said(version="gemv"), "version is 'gemv'"), ("awq", said(zero_point=False), "zero_point"),
    ("awq", said(modules_to_not_convert=["mlp"]), "says that it is not"),
    ("gptq", said(sym=False), "sym is False"), ("gptq", said(bits=3), "bits is 3"),
    ("gptq", said(checkpoint_format="marlin"), "checkpoint_format"), ("gptq", said(dynamic={"-:x": {}}), "dynamic"),
    ("gptq", said(checkpoint_format="gptq", format="gptq_v2"), "checkpoint_format is \\['gptq', 'gptq_v2'\\]"),
    ("gptq 8", said(checkpoint_format=None), "zero points other than 127"),
    ("gptq", said(format=["gptq"]), "checkpoint_format is"),
    ("gptq", said(checkpoint_format="gptq_v2"), "zero points other than 8"),
    ("gptq", put(UP + "g_idx", "I32", np.arange(32, dtype=np.int32)[::-1] // 16), "desc_act is false"),
    ("gptq order", put(UP + "g_idx", "I32", np.full(32, 2, np.int32)), "outside of its 2 groups"),
    ("gptq order", gone(UP + "g_idx"), "lacks g_idx"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "words"), REFUSED, ids=[f"{n}: {w}" for n, _, w in REFUSED])
def test_what_cannot_be_kept_is_refused_by_name(name: str, edit: Edit, words: str, tmp_path: Path) -> None:
    config, tensors = make_model(name, np.random.default_rng(7))
    edit(config, config.get("quantization") or config["quantization_config"], tensors)
    path = write_model(tmp_path / "m", config, tensors)
    with pytest.raises(CheckpointError, match=words) as caught:
        source = open_source(path)
        for tensor in source.tensors:
            source.read_tensor(tensor)
    text = str(caught.value)
    assert (caught.value.fix or "give the model in BF16" in text) and text.isprintable() and len(text) < 900


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("modelopt", "hf_quant_config.json", {"producer": {"name": "modelopt", "version": "0.29"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}),
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 16, "sym": True, "desc_act": False}),
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 16, "w_bit": 4, "version": "GEMM"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("alone", [True, False])
def test_quantizers_files_say_it_too(name: str, file: str, content: Any, alone: bool, tmp_path: Path) -> None:
    config, tensors = make_model(name, np.random.default_rng(7))
    wanted = decode(config, tensors)
    if alone:
        del config["quantization_config"]
    source = open_source(write_model(tmp_path / "m", config, tensors, {file: content}))
    for tensor, weight in wanted.items():
        np.testing.assert_array_equal(source.read_tensor(tensor), weight, tensor)
    for key in ("bits", "w_bit", "quant_algo"):
        inner = content.get("quantization", content)
        if key in inner:
            (tmp_path / "m" / file).write_text(json.dumps({**content, "quantization": {**inner, key: 8}, key: 8}))
    with pytest.raises(CheckpointError):
        open_source(tmp_path / "m")
