"""Q4_0: the engine has a file's blocks bit for bit; other weights are quantized by llama.cpp's reference rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from test_gguf import DIM, HEADS, HIDDEN, KV, LAYERS, MLP, write_gguf
from tiny_source import CONFIG, open_intact, write_tiny_tokenizer

from wicore_trt.backends.torch.calibrate import TextCalibration
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.names import Role, hf_shapes, unified_tensors
from wicore_trt.checkpoint.whole import CheckpointTensors
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import open_engine
from wicore_trt.engine.manifest import read_manifest
from wicore_trt.engine.options import find_backend
from wicore_trt.errors import CheckpointError, ConfigError, EngineFormatError
from wicore_trt.model.hf_config import read_hf_config
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.runtime.weight_specs import list_weights

ROWS = {  # of each linear of the unified layout, the file's tensors and their rows
    "attention.qkv": {"attn_q": HEADS * DIM, "attn_k": KV * DIM, "attn_v": KV * DIM},
    "attention.dense": {"attn_output": HIDDEN},
    "mlp.fc": {"ffn_gate": MLP},
    "mlp.gate": {"ffn_up": MLP},
    "mlp.proj": {"ffn_down": HIDDEN},
}


def blocks_of(tensors: dict[str, np.ndarray], name: str, kind: str, rows: slice) -> np.ndarray:
    """GGUF's bytes of these rows, uint8 [rows, bytes], from a checkpoint's or an engine's tensors."""
    values, scales = tensors[name][rows], tensors[f"{name}s_scaling_factor"][rows]
    parts = [scales]
    if f"{name}s_minimum" in tensors:
        minimums = tensors[f"{name}s_minimum"][rows]
        parts.append(minimums)
        if kind == "Q4_0":
            assert (minimums == scales * np.float16(-8)).all()
            parts.pop()
    heads = [part.reshape(*scales.shape, 1).view(np.uint8) for part in parts]
    nibbles = values.view(np.uint8).reshape(*scales.shape, -1)
    return np.concatenate([*heads, nibbles], axis=2).reshape(len(values), -1)


@pytest.mark.parametrize(
    ("embedding", "head", "kinds"),
    [
        ("F16", "float16", {}),
        ("Q8_0", "q8_0", {"blk.1.ffn_down.weight": "Q4_1"}),
        ("Q6_K", "q6_k", {"blk.0.ffn_down.weight": "Q4_1", "blk.0.attn_v.weight": "Q4_1"}),
        ("BF16", "", {"blk.0.ffn_up.weight": "Q4_1"}),
    ],
)
def test_the_engine_has_the_bytes_of_the_file(tmp_path: Path, embedding: str, head: str, kinds: dict[str, str]) -> None:
    said: list[str] = []
    stored = write_gguf(tmp_path / "m.gguf", "Q4_0", kinds={"token_embd.weight": embedding, **kinds})
    engine = build_engine(tmp_path / "m.gguf", tmp_path / "engine", dtype="q4_0", note=said.append)
    assert "bit for bit" in " ".join(said) and "after training" not in " ".join(said)
    manifest = open_engine(engine.path).manifest
    made = {"blk.1.ffn_down.weight": "mlp.proj", "blk.0.ffn_down.weight": "mlp.proj"}
    made |= {"blk.0.attn_v.weight": "attention.qkv", "blk.0.ffn_up.weight": "mlp.gate_up"}
    assert manifest.weights.minimums == tuple(sorted({made[name] for name in kinds})) and manifest.weights.head == head
    assert (manifest.dtype, manifest.base_dtype, manifest.format_version) == ("q4_0", "bfloat16", 3)
    tensors = {n: t.numpy() for n, t in _load(engine.rank_files[0]).items()}
    assert not [name for name in tensors if name.startswith("lm_head")]
    for layer in range(LAYERS):
        for linear, parts in ROWS.items():
            first = 0
            for part, rows in parts.items():
                file = f"blk.{layer}.{part}.weight"
                name, span = f"transformer.layers.{layer}.{linear}.weight", slice(first, first + rows)
                back = blocks_of(tensors, name, kinds.get(file, "Q4_0"), span)
                assert back.tobytes() == stored[file].tobytes(), file
                first += rows
    name, published = "transformer.vocab_embedding.weight", stored["token_embd.weight"]
    if head == "q8_0":
        assert blocks_of(tensors, name, "Q8_0", slice(None)).tobytes() == published.tobytes()
    elif head == "q6_k":
        values, scales = tensors[name].astype(np.float32), tensors[f"{name}s_scaling_factor"]
        wide = (values.reshape(*scales.shape, 16) * scales[..., None]).reshape(values.shape)
        reference = gguf.quants.dequantize(published, gguf.GGMLQuantizationType.Q6_K)
        assert wide.tobytes() == reference.tobytes() and len(np.unique(values)) == 64
    else:
        assert tensors[name].tobytes() == published.tobytes()


def _load(path: Path) -> dict[str, torch.Tensor]:
    return {n: t.view(torch.uint16) if t.dtype == torch.bfloat16 else t for n, t in load_torch(path).items()}


def test_a_float16_embedding_that_bfloat16_holds_is_stored_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "Q4_0", kinds={"token_embd.weight": "F16"}) and tmp_path / "m.gguf"
    data = bytearray(path.read_bytes())
    reader = gguf.GGUFReader(path)
    at = next(t for t in reader.tensors if t.name == "token_embd.weight")
    values = np.frombuffer(data, np.uint16, at.n_elements, int(at.data_offset)) & 0xFFF8  # 8 significant bits are left
    data[int(at.data_offset) : int(at.data_offset) + values.nbytes] = values.tobytes()
    path.write_bytes(data)
    assert build_engine(path, tmp_path / "engine", dtype="q4_0").manifest.weights.head == ""


def q4_source(path: Path, **config: Any) -> Path:
    """A source in float32 whose rows are whole blocks. Its values are float16's, so that some lie between two steps."""
    path.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    config = CONFIG | {"tie_word_embeddings": True, **sizes, **config}
    random = np.random.default_rng(0)
    shapes = hf_shapes(read_hf_config(config))
    tensors = {n: random.standard_normal(s).astype(np.float16).astype(np.float32) for n, s in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(path)
    return path


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_other_sources_are_quantized_by_the_reference_rule(tmp_path: Path, tp: int) -> None:
    source, said = q4_source(tmp_path / "source"), list[str]()
    checkpoint = convert(source, tmp_path / "ckpt", dtype="q4_0", tp_size=tp, note=said.append)
    assert "quantized to Q4_0 after training" in " ".join(said) and "twice" not in " ".join(said)
    assert open_intact(checkpoint.path).config["wicore"]["format_version"] == 3
    whole, weights = CheckpointTensors(checkpoint), load_file(source / "model.safetensors")
    kind = gguf.GGMLQuantizationType.Q4_0
    for tensor in unified_tensors(checkpoint.spec):
        if tensor.role is Role.LINEAR:
            stacked = np.concatenate([weights[name] for name in tensor.sources])
            want = gguf.quants.dequantize(gguf.quants.quantize(stacked, kind), kind)
            np.testing.assert_array_equal(whole.read_whole(tensor)[0], want)
    lists = list_weights(checkpoint.rank_files, checkpoint.spec, "bfloat16")
    shapes = {w.name: (w.dtype, w.shape) for w in lists}
    gate_up = "transformer.layers.0.mlp.gate_up.weight"
    assert shapes[gate_up] == ("q4_0", (256 // tp, 32))
    assert shapes[f"{gate_up}s_scaling_factor"] == ("float16", (256 // tp, 2))


def test_rows_that_are_no_whole_blocks_are_refused_by_name(tmp_path: Path) -> None:
    source = q4_source(tmp_path / "source", intermediate_size=64)
    convert(source, tmp_path / "two", dtype="q4_0", tp_size=2)
    with pytest.raises(CheckpointError, match=r"mlp\.proj\.weight has rows of 16 values on a rank"):
        convert(source, tmp_path / "four", dtype="q4_0", tp_size=4)


def test_other_blocks_are_said_to_be_quantized_twice(tmp_path: Path) -> None:
    said: list[str] = []
    write_gguf(tmp_path / "m.gguf", "Q4_K", kinds={"token_embd.weight": "Q6_K", "blk.0.ffn_up.weight": "Q4_0"})
    build_engine(tmp_path / "m.gguf", tmp_path / "engine", dtype="q4_0", note=said.append)
    assert any("quantized twice, as the source has Q4_K" in line for line in said)
    assert any("wicore bench perplexity" in line for line in said)
    said.clear()
    write_gguf(tmp_path / "q.gguf", "Q4_0")
    assert build_engine(tmp_path / "q.gguf", tmp_path / "other", note=said.append).manifest.dtype == "bfloat16"
    assert any("--dtype q4_0 keeps, bit for bit" in line for line in said)


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-llm"])
def test_backends_without_products_for_it_refuse_it(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"{backend}.*does not compute with q4_0"):
        build_engine(q4_source(tmp_path / "s"), tmp_path / "e", dtype="q4_0", backend=backend)
    checkpoint = convert(tmp_path / "s", tmp_path / "ckpt", dtype="q4_0")
    monkeypatch.setattr(type(find_backend(backend)), "targets", lambda self, options: ["sm90"])
    with pytest.raises(ConfigError, match=f"{backend}.*does not compute with q4_0"):
        build_engine(checkpoint.path, tmp_path / "e", backend=backend)


def test_what_says_q4_0_wrongly_is_refused(tmp_path: Path) -> None:
    engine = build_engine(q4_source(tmp_path / "s"), tmp_path / "e", dtype="q4_0")
    manifest = engine.manifest
    for change in ({"head": "q9"}, {"minimums": "mlp.fc"}, {"minimums": ""}, {"algo": "FP8"}):
        broken = {**(manifest.quantization or {}), **change}
        (engine.path / "engine.json").write_text(replace(manifest, quantization=broken).to_json())
        with pytest.raises(EngineFormatError, match="quantization is not what an engine has"):
            read_manifest(engine.path)
    (engine.path / "engine.json").write_text(replace(manifest, format_version=2).to_json())
    with pytest.raises(EngineFormatError, match="format_version"):
        read_manifest(engine.path)


def test_torch_operators_compute_what_dequantized_weights_give(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "Q4_0", kinds={"blk.0.ffn_down.weight": "Q4_1", "token_embd.weight": "Q6_K"})
    exact = build_engine(tmp_path / "m.gguf", tmp_path / "exact", dtype="q4_0")
    wide = build_engine(tmp_path / "m.gguf", tmp_path / "wide", dtype="float32")  # by the gguf package
    settings = ExecutorOptions(kv_pages={"global": 1, "local": 1}, max_batch_tokens=8, max_context=32, kernels="torch")
    tensors = load_torch(wide.rank_files[0])
    batch = StepBatch([SequenceSlice(0, [2, 5, 9, 40, 41], 0, {"global": [0], "local": [0]})])
    logits = []
    for executor in (
        TorchExecutor(exact, settings),
        TorchExecutor.from_tensors(exact.manifest.spec, "bfloat16", tensors, settings),
    ):
        logits.append(executor.logits(batch, torch.arange(5)).clone())
        executor.close()
    assert torch.equal(*logits) and float(logits[0].std()) > 0


def test_an_adapter_changes_only_the_blocks_that_it_reaches(tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "m.gguf", "Q4_0", kinds={"token_embd.weight": "BF16"})
    (tmp_path / "lora").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"], "layers_to_transform": [0]}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    random, name = np.random.default_rng(1), "base_model.model.model.layers.0.mlp.up_proj"
    low = {"A": random.standard_normal((2, HIDDEN), np.float32), "B": random.standard_normal((MLP, 2), np.float32)}
    save_file({f"{name}.lora_{n}.weight": t for n, t in low.items()}, tmp_path / "lora" / "adapter_model.safetensors")
    said: list[str] = []
    made = convert(tmp_path / "m.gguf", tmp_path / "c", dtype="q4_0", lora=tmp_path / "lora", note=said.append)
    assert any("1 linears are quantized to Q4_0 after training" in line for line in said)
    assert any("quantized twice, as the source has Q4_0" in line for line in said)
    tensors = {n: t.numpy() for n, t in _load(made.rank_files[0]).items()}
    kind = gguf.GGMLQuantizationType.Q4_0
    merged = gguf.quants.dequantize(stored["blk.0.ffn_up.weight"], kind) + (low["B"] @ low["A"]) * np.float32(2)
    for layer, want in ((0, gguf.quants.quantize(merged, kind)), (1, stored["blk.1.ffn_up.weight"])):
        back = blocks_of(tensors, f"transformer.layers.{layer}.mlp.gate.weight", "Q4_0", slice(None))
        assert back.tobytes() == want.tobytes(), layer


def test_kv_scales_are_those_of_the_dequantized_weights(tmp_path: Path) -> None:
    """Measured at building on the source, and later on the checkpoint, whose blocks are read again."""
    source = q4_source(tmp_path / "source")
    (tmp_path / "text.txt").write_text("abcdefghijklmnop" * 8)
    calibration = TextCalibration(tmp_path / "text.txt", 64)
    early = convert(source, tmp_path / "early", dtype="q4_0", calibration=calibration)
    plain = convert(source, tmp_path / "plain", dtype="q4_0", tp_size=2)
    late = convert(plain.path, tmp_path / "late", calibration=calibration)
    assert early.kv_scales and late.kv_scales and late.weights == plain.weights and late.tp_size == 2
    name = "transformer.layers.3.attention.kv_cache_scaling_factor"
    first, second = (float(load_torch(c.rank_files[0])[name]) for c in (early, late))
    assert 0 < abs(first / second - 1) < 0.2, "float32 weights and their Q4_0"
    with pytest.raises(ConfigError, match="nothing to calibrate"):
        convert(source, tmp_path / "none", dtype="q4_0", calibration=replace(calibration, kv_scales=False))
    with pytest.raises(ConfigError, match="nothing to calibrate"):
        convert(plain.path, tmp_path / "none", calibration=replace(calibration, kv_scales=False))


@pytest.mark.parametrize(
    ("tensor", "kind", "at", "bits"),
    [
        ("blk.1.ffn_up.weight", "Q4_0", 0, 0x7C00),
        ("blk.0.ffn_down.weight", "Q4_1", 2, 0x7E00),
        ("blk.0.ffn_down.weight", "Q4_1", 0, 0xFC00),
        ("token_embd.weight", "Q8_0", 0, 0x7E01),
        ("token_embd.weight", "Q6_K", 208, 0x7C00),
    ],
)
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, tensor: str, kind: str, at: int, bits: int) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "Q4_0", kinds={tensor: kind})
    entry = next(t for t in gguf.GGUFReader(path).tensors if t.name == tensor)
    size, data = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1], bytearray(path.read_bytes())
    place = int(entry.data_offset) + 5 * size + at  # in the sixth block
    data[place : place + 2] = bits.to_bytes(2, "little")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{tensor}: the scales of .* holds (NaN|an infinity) in row \d"):
        convert(path, tmp_path / "ckpt", dtype="q4_0")
    assert not (tmp_path / "ckpt").exists()


def test_weights_beyond_the_scales_of_float16_are_refused(tmp_path: Path) -> None:
    source = q4_source(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 40] = 1e6
    save_file(weights, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"scale of model.*down_proj.* reaches 125000, beyond .*row 3.*bfloat16"):
        convert(source, tmp_path / "ckpt", dtype="q4_0")


@pytest.mark.parametrize("group", [32, 64])
def test_w4a16_of_compressed_tensors_fits_exactly_where_float16_holds_its_scales(tmp_path: Path, group: int) -> None:
    source, random = q4_source(tmp_path / "source"), np.random.default_rng(2)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "input_activations": None}}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": said | {"ignore": ["lm_head"]}}
    (source / "config.json").write_text(json.dumps(config))
    plain, exact, odd = load_file(source / "model.safetensors"), dict[str, np.ndarray](), "model.layers.2.mlp.up_proj"
    for name in [n for n in plain if n.endswith("_proj.weight")]:
        module, (rows, columns) = name.removesuffix(".weight"), plain.pop(name).shape
        values = random.integers(-8, 8, (rows, columns)).astype(np.int64)
        scales = np.exp(random.standard_normal((rows, columns // group)) - 4).astype(np.float16).astype(np.float32)
        scales[0, 0] = np.float32(0.1) if module == odd else scales[0, 0]
        words = ((values + 8).reshape(rows, -1, 8) << (4 * np.arange(8))).sum(axis=2)
        plain[f"{module}.weight_packed"] = words.astype(np.uint32).view(np.int32)
        plain |= {f"{module}.weight_scale": scales, f"{module}.weight_shape": np.array([rows, columns])}
        exact[name] = values.astype(np.float32) * np.repeat(scales, group, axis=1)
    save_file(plain, source / "model.safetensors")
    notes: list[str] = []
    whole = CheckpointTensors(convert(source, tmp_path / "ckpt", dtype="q4_0", note=notes.append))
    assert any("second time to Q4_0, but for 27 that are kept bit for bit" in line for line in notes), notes
    for tensor in unified_tensors(whole.spec):
        if tensor.role is Role.LINEAR and f"{odd}.weight" not in tensor.sources:
            want = np.concatenate([exact[name] for name in tensor.sources])
            np.testing.assert_array_equal(whole.read_whole(tensor)[0], want)


@pytest.mark.long
def test_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    source, found = q4_source(tmp_path / "source"), list[torch.Tensor]()
    pages = {"global": [0], "local": [0]}
    for tp in (1, 2):
        engine = build_engine(source, tmp_path / f"tp{tp}", dtype="q4_0", tp_size=tp)
        options = ExecutorOptions(device="cpu", kernels="torch", threads=1, kv_pages={"global": 1, "local": 1})
        executor: Any = find_backend("torch").open(open_engine(engine.path), options)
        try:
            batch = StepBatch([SequenceSlice(0, [2, 5, 9, 40, 41], 0, pages)])
            found.append(executor.logits(batch, torch.arange(5)).clone())
        finally:
            executor.close()
    assert float((found[0] - found[1]).abs().max() / found[0].abs().max()) < 0.03


@pytest.mark.parametrize(("bits", "said"), [(0x6FFF, ""), (0xF000, r"reaches 65536, beyond float16's 65504, in row 2")])
def test_a_scale_whose_minimum_float16_cannot_hold_is_refused(tmp_path: Path, bits: int, said: str) -> None:
    """Q4_0 beside Q4_1 in one linear has the minimum -8 d."""
    path, name = tmp_path / "m.gguf", "blk.1.ffn_down.weight"
    write_gguf(path, "Q4_0", kinds={"blk.0.ffn_down.weight": "Q4_1"})
    at = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    data = bytearray(path.read_bytes())
    first = int(at.data_offset) + 2 * (int(at.n_bytes) // HIDDEN)
    data[first : first + 2] = bits.to_bytes(2, "little")
    path.write_bytes(data)
    if not said:
        assert convert(path, tmp_path / "c", dtype="q4_0").path
        return
    with pytest.raises(CheckpointError, match=rf"{name}: beside Q4_1 .* {said}"):
        convert(path, tmp_path / "c", dtype="q4_0")
