"""GGUF: every supported type, metadata to spec, damaged files."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from wicore_trt.checkpoint.gguf import TYPES, gguf_spec
from wicore_trt.checkpoint.gguf_file import GgufFile, GgufTensor, open_gguf
from wicore_trt.checkpoint.source import open_source
from wicore_trt.errors import CheckpointError, EnvironmentUnfitError
from wicore_trt.model.spec import GLOBAL, LOCAL

HIDDEN, HEADS, KV, DIM, MLP, VOCAB, LAYERS = 256, 2, 1, 256, 512, 64, 2
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (HIDDEN,),
                "attn_q": (HEADS * DIM, HIDDEN),
                "attn_k": (KV * DIM, HIDDEN),
                "attn_v": (KV * DIM, HIDDEN),
                "attn_q_norm": (DIM,),
                "attn_k_norm": (DIM,),
                "attn_output": (HIDDEN, HEADS * DIM),
                "post_attention_norm": (HIDDEN,),
                "ffn_norm": (HIDDEN,),
                "ffn_gate": (MLP, HIDDEN),
                "ffn_up": (MLP, HIDDEN),
                "ffn_down": (HIDDEN, MLP),
                "post_ffw_norm": (HIDDEN,),
            }.items()
        }
    return shapes


def _encode(values: np.ndarray, kind: gguf.GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """Blocks of `values`; for K types, which gguf cannot encode, random blocks with sane float16 scales."""
    if kind.name not in K_TYPES:
        return gguf.quants.quantize(values, kind)
    items, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (values.size // items, size), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.02, (blocks.shape[0], 2)).astype(np.float16).view(np.uint8)
    if kind.name == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks.reshape(values.shape[0], -1)


def write_gguf(path: Path, kind: str = "F32", seed: int = 0, **metadata: Any) -> dict[str, np.ndarray]:
    """A tiny model; linears and embedding are of `kind`. Returns what is in the file, as stored."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.add_context_length(4096)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_key_length(DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(128)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<pad>", "<eos>", "<bos>", "<unk>", *(f"t{i}" for i in range(4, VOCAB))])
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    stored = {}
    for name, shape in _shapes().items():
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            stored[name] = values
            writer.add_tensor(name, values)
            continue
        quant = gguf.GGMLQuantizationType[kind]
        stored[name] = _encode(values, quant, rng)
        writer.add_tensor(name, stored[name], raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _oracle(blocks: np.ndarray, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Dequantization written apart from the gguf package: transformers', and for Q5_0, which it lacks, the layout."""
    raw = blocks.view(np.uint8)
    if kind == "Q5_0":  # float16 scale, 32 fifth bits, 16 bytes of low then high nibbles
        raw = raw.reshape(-1, 22)
        fifth = np.unpackbits(raw[:, 2:6], axis=1, bitorder="little").astype(np.int32)
        nibbles = np.concatenate([raw[:, 6:] & 15, raw[:, 6:] >> 4], axis=1).astype(np.int32)
        scale = np.ascontiguousarray(raw[:, :2]).view(np.float16).astype(np.float32)
        return ((nibbles + 16 * fifth - 16) * scale).reshape(shape)
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    code = gguf.GGMLQuantizationType[kind].value
    return dequant.dequantize(torch.from_numpy(raw), code).numpy().reshape(shape)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_reads_as_stored(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    stored = write_gguf(path, kind, seed=len(kind))
    source = open_source(path)
    name, hf = "blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"
    shape = _shapes()[name]
    if kind in ("F32", "F16"):
        expected = stored[name].astype(np.float32)
    elif kind == "BF16":
        expected = torch.from_numpy(stored[name].view(np.int16)).view(torch.bfloat16).float().numpy().reshape(shape)
    else:
        expected = _oracle(stored[name], kind, shape)
    np.testing.assert_allclose(source.read(hf), expected, rtol=1e-6, atol=1e-7)
    assert np.abs(expected).max() > 0.01
    rows, tag = source.rows(hf, 5, 11)
    whole, _ = source.rows(hf, 0, shape[0])
    np.testing.assert_array_equal(rows, whole[5:11])
    assert tag == (kind if kind in ("F16", "BF16") else "F32")


def test_norms_are_the_files_bit_for_bit(tmp_path: Path) -> None:
    """Small factors too, which 1 + (x - 1) would round."""
    stored = write_gguf(tmp_path / "m.gguf")
    source = open_source(tmp_path / "m.gguf")
    for name, hf in (
        ("blk.0.post_ffw_norm.weight", "model.layers.0.post_feedforward_layernorm.weight"),
        ("blk.1.attn_k_norm.weight", "model.layers.1.self_attn.k_norm.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ):
        np.testing.assert_array_equal(source.norm(hf, 0, len(stored[name])), stored[name])
    np.testing.assert_array_equal(source.read("model.embed_tokens.weight"), stored["token_embd.weight"])


def test_a_directory_with_one_gguf_is_a_source(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    assert open_source(tmp_path).spec.num_layers == LAYERS
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match="2 GGUF files"):
        open_source(tmp_path)


def test_parser_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.add_token_list(["a", "▁b", "\n", ""])
    writer.add_token_scores([0.5, -1.0, 1e-7, 3.0])
    writer.add_token_types([1, 3, 4, 6])
    writer.add_add_bos_token(True)
    writer.add_array("test.flags", [True, False, True])
    writer.add_uint64("test.u64", 1 << 40)
    writer.add_float64("test.f64", 0.1)
    writer.add_int8("test.i8", -3)
    writer.add_tensor("t", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("u", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = open_gguf(path), gguf.GGUFReader(str(path))
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.offset == tensor.data_offset and mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.read_rows(tensor.name, 0, mine.shape[0]) == tensor.data.tobytes()


def _file(**metadata: Any) -> GgufFile:
    keys = {
        "context_length": 131072,
        "block_count": 62,
        "embedding_length": 5376,
        "feed_forward_length": 21504,
        "attention.head_count": 32,
        "attention.head_count_kv": 16,
        "attention.key_length": 128,
        "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
        "attention.sliding_window": 1024,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    } | metadata
    meta = {f"gemma3.{k}": v for k, v in keys.items() if v is not None} | {"general.architecture": "gemma3"}
    return GgufFile(Path("x.gguf"), meta, {"token_embd.weight": GgufTensor((262208, 5376), "Q8_0", 0, 1)})


def test_spec_of_27b() -> None:
    spec = gguf_spec(_file())
    assert spec.query_pre_attn_scalar == 168  # hidden / heads: the 27B alone
    assert (spec.rope_theta, spec.rope_local_theta, spec.rope_scaling_factor) == (1e6, 1e4, 8.0)
    assert spec.layers_of(GLOBAL) == tuple(range(5, 62, 6))
    assert spec.rms_norm_eps == 1e-6 and spec.vocab_size == 262208 and spec.tie_word_embeddings
    assert spec.max_position_embeddings == 131072 and spec.sliding_window == 1024


def test_spec_of_other_sizes_and_spellings() -> None:
    spec = gguf_spec(_file(block_count=48, **{"attention.key_length": 256, "rope.scaling.type": "none"}))
    assert spec.query_pre_attn_scalar == 256 and spec.rope_scaling_factor == 1.0
    flags = {"block_count": 3, "attention.sliding_window_pattern": [True, False, True]}
    assert gguf_spec(_file(**flags)).layer_groups == (LOCAL, GLOBAL, LOCAL)
    flags["attention.sliding_window_pattern"] = 2
    assert gguf_spec(_file(**flags, **{"rope.freq_base_swa": 5e3})).layer_groups == (LOCAL, GLOBAL, LOCAL)
    assert gguf_spec(_file(**{"rope.freq_base_swa": 5e3})).rope_local_theta == 5e3


@pytest.mark.parametrize(
    "change,message",
    [
        ({"feed_forward_length": None}, "lacks the key gemma3.feed_forward_length"),
        ({"attention.sliding_window": None}, "gemma3.attention.sliding_window"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'; it must be 'linear'"),
    ],
)
def test_metadata_that_does_not_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        gguf_spec(_file(**change))


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    for content, message in (
        (whole[:-100], "truncated"),
        (whole[:200], "truncated or damaged"),
        (b"GGUF", "truncated or damaged: the version"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a GGUF file.*git lfs"),
        (b"GGUF\x01\0\0\0" + whole[8:], "GGUF version 1"),
        (b"GGUF\0\0\0\x03" + whole[8:], "GGUF version"),
        (whole[:16] + b"\xff" * 8 + whole[24:], "truncated or damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            open_source(path)


def test_unsupported_type_and_unknown_tensor(tmp_path: Path) -> None:
    write_gguf(tmp_path / "q.gguf", "Q4_1")
    with pytest.raises(CheckpointError, match=r"uses Q4_1.*It reads F32, F16"):
        open_source(tmp_path / "q.gguf")
    write_gguf(tmp_path / "l.gguf")
    data = (tmp_path / "l.gguf").read_bytes()
    (tmp_path / "l.gguf").write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
        open_source(tmp_path / "l.gguf")


def test_missing_extra_names_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    real = builtins.__import__

    def without_gguf(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(EnvironmentUnfitError, match=r"pip install -e '.\[gguf\]'"):
        open_source(path)
