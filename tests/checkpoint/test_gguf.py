"""GGUF: every supported type, metadata to spec, split and damaged files, and what else is called GGUF."""

from __future__ import annotations

import builtins
import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from wicore_trt.checkpoint.gguf import TYPES, read_gguf_spec
from wicore_trt.checkpoint.gguf_file import GgufFile, GgufTensor, open_gguf
from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.errors import CheckpointError, EnvironmentUnfitError
from wicore_trt.model.spec import GLOBAL, LOCAL

HIDDEN, HEADS, KV, DIM, MLP, VOCAB, LAYERS = 256, 2, 1, 256, 512, 64, 2
DIGESTS_OF_GGML = {
    "Q8_0": "090dbae73145f1dc",
    "Q4_0": "c9be5b60fda23ca1",
    "Q4_1": "a89d299afd7a5bf3",
    "Q5_0": "2d5f944286f10b93",
    "Q5_1": "9321a3302a0fcb6c",
    "Q2_K": "bf5307295e8a88e9",
    "Q3_K": "78d455e730342e52",
    "Q4_K": "2cf917f2e9fcf3df",
    "Q5_K": "97e25bbda1e52e94",
    "Q6_K": "9eba4f3cc500cb70",
    "IQ4_NL": "b812db36a93f62af",
    "IQ4_XS": "245be90eafa73156",
    "IQ3_S": "aca9b70e6a51d05c",
    "IQ3_XXS": "8acfc34e77f8b188",
    "IQ2_S": "c8416b8f8811a989",
    "IQ2_XS": "3b13cd55e78cde47",
    "IQ2_XXS": "53734504d0b385b2",
    "IQ1_M": "d6941fb0f87e2f7c",
    "IQ1_S": "eee7d946b607c112",
    "TQ1_0": "5e4617a738145d4f",
    "TQ2_0": "47f959076df414ac",
    "MXFP4": "9ea4fe37e93d5885",
}
"""Of what dequantize_row_* of ggml-quants.c (in llama-cpp-python 0.3.36) makes of `_random_blocks`."""


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


def _random_blocks(kind: str, count: int) -> np.ndarray:
    """Blocks of random bits: scales of every size, infinite ones and NaN too."""
    quant = gguf.GGMLQuantizationType[kind]
    return np.random.default_rng(quant.value).integers(0, 256, (count, gguf.GGML_QUANT_SIZES[quant][1]), np.uint8)


def _encode(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of `values`; where gguf cannot encode a type, random blocks of it that hold numbers of a usual size."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        blocks = _random_blocks(kind.name, 2_000)
        with np.errstate(all="ignore"):
            largest = np.abs(gguf.quants.dequantize(blocks, kind)).max(axis=1)
        usual = blocks[(largest > 0.01) & (largest < 100)]
        items, size = gguf.GGML_QUANT_SIZES[kind]
        return np.resize(usual, (values.size // items, size)).reshape(values.shape[0], -1)


def write_gguf(
    path: Path,
    kind: str = "F32",
    seed: int = 0,
    head: str = "",
    only: str = "",
    kinds: Mapping[str, str] | None = None,
    **metadata: Any,
) -> dict[str, np.ndarray]:
    """A tiny model; linears and embedding are of `kind` (with `only` that one, the others F16), those in `kinds` of
    theirs, an output.weight of its own of `head`. Returns what is in the file, as stored."""
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
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_token_list(["<pad>", "<eos>", "<bos>", "<unk>", *(f"t{i}" for i in range(4, VOCAB))])
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    stored = {}
    for name, shape in (_shapes() | ({"output.weight": (VOCAB, HIDDEN)} if head else {})).items():
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            stored[name] = values
            writer.add_tensor(name, values)
            continue
        other = "F16" if only and name != only else (kinds or {}).get(name, kind)
        quant = gguf.GGMLQuantizationType[head if name == "output.weight" else other]
        stored[name] = _encode(values, quant)
        writer.add_tensor(name, stored[name], raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _oracle(blocks: np.ndarray, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Dequantization written apart from the gguf package: transformers', and the layout for the types that it lacks."""
    raw = blocks.view(np.uint8)
    if kind in ("Q5_0", "Q5_1"):  # float16 scale (and least value), 32 fifth bits, 16 bytes of low then high nibbles
        raw = raw.reshape(-1, 22 if kind == "Q5_0" else 24)
        head = np.ascontiguousarray(raw[:, : raw.shape[1] - 20]).view(np.float16).astype(np.float32)
        fifth = np.unpackbits(raw[:, -20:-16], axis=1, bitorder="little").astype(np.int32)
        nibbles = np.concatenate([raw[:, -16:] & 15, raw[:, -16:] >> 4], axis=1) + 16 * fifth
        found = (nibbles - 16) * head if kind == "Q5_0" else nibbles * head[:, :1] + head[:, 1:]
        return found.astype(np.float32).reshape(shape)
    if kind == "MXFP4":  # an exponent of 2 (bias 127), 16 bytes of low then high nibbles: E2M1
        raw = raw.reshape(-1, 17)
        nibbles = np.concatenate([raw[:, 1:] & 15, raw[:, 1:] >> 4], axis=1)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        return (values[nibbles] * np.exp2(raw[:, :1].astype(np.float32) - 127)).reshape(shape)
    if kind in ("TQ1_0", "TQ2_0"):  # float16 scale at the end; digits -1, 0, 1
        scale = np.ascontiguousarray(raw.reshape(-1, 54 if kind == "TQ1_0" else 66)[:, -2:])
        raw = raw.reshape(len(scale), -1)[:, :-2].astype(np.int32)
        if kind == "TQ2_0":  # 2 halves of 32 bytes, 4 digits of 2 bits in each byte
            digits = [raw[:, at : at + 32] >> shift & 3 for at in (0, 32) for shift in (0, 2, 4, 6)]
        else:  # bytes 0-31, 32-47 of 5 base-3 digits, 48-51 of 4, as fractions of 256
            spans = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
            digits = [(raw[:, a:b] * 3**n % 256 * 3) >> 8 for a, b, count in spans for n in range(count)]
        return ((np.concatenate(digits, axis=1) - 1) * scale.view(np.float16).astype(np.float32)).reshape(shape)
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant", reason="needs transformers' own")
    code = gguf.GGMLQuantizationType[kind].value
    return dequant.dequantize(torch.from_numpy(raw), code).numpy().reshape(shape)


@pytest.mark.parametrize("kind", DIGESTS_OF_GGML)
def test_blocks_of_random_bits_are_ggmls_to_the_bit(kind: str, tmp_path: Path) -> None:
    path, name = tmp_path / "m.gguf", "blk.1.ffn_down.weight"
    write_gguf(path, kind, only=name)
    rows, columns = _shapes()[name]
    blocks = _random_blocks(kind, rows * columns // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0])
    with path.open("r+b") as file:
        file.seek(open_gguf(path).tensors[name].offset)
        file.write(blocks.tobytes())
    values = open_source(path).read_tensor("model.layers.1.mlp.down_proj.weight")
    values[np.isnan(values)] = np.nan
    assert hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest() == DIGESTS_OF_GGML[kind]


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_reads_as_stored(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    name, hf = "blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"
    stored = write_gguf(path, kind, seed=len(kind), only=name)
    source = open_source(path)
    shape = _shapes()[name]
    if kind in ("F32", "F16"):
        expected = stored[name].astype(np.float32)
    elif kind == "BF16":
        expected = torch.from_numpy(stored[name].view(np.int16)).view(torch.bfloat16).float().numpy().reshape(shape)
    else:
        expected = _oracle(stored[name], kind, shape)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(source.read_tensor(hf), expected, rtol=1e-6, atol=1e-7)
    assert np.abs(expected).max() > 0.01
    rows, tag = source.read_rows(hf, 5, 11)
    whole, _ = source.read_rows(hf, 0, shape[0])
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
        np.testing.assert_array_equal(source.read_norm(hf, 0, len(stored[name])), stored[name])
    np.testing.assert_array_equal(source.read_tensor("model.embed_tokens.weight"), stored["token_embd.weight"])


def test_a_directory_with_one_gguf_is_a_source(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    assert open_source(tmp_path).spec.num_layers == LAYERS
    for side in ("mmproj-F16.gguf", "imatrix.gguf", "config.json"):  # hubs keep them beside
        (tmp_path / side).write_bytes(b"GGUF")
    assert open_source(tmp_path, text_only=True).spec.num_layers == LAYERS
    with pytest.raises(CheckpointError, match="mmproj-F16.gguf is truncated or damaged"):
        open_source(tmp_path)
    (tmp_path / "mmproj-F16.gguf").unlink()
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
    spec = read_gguf_spec(_file())
    assert spec.query_pre_attn_scalar == 168  # hidden / heads: the 27B alone
    assert (spec.rope_theta, spec.rope_local_theta, spec.rope_scaling_factor) == (1e6, 1e4, 8.0)
    assert spec.layers_of(GLOBAL) == tuple(range(5, 62, 6))
    assert spec.rms_norm_eps == 1e-6 and spec.vocab_size == 262208 and spec.tie_word_embeddings
    assert spec.max_position_embeddings == 131072 and spec.sliding_window == 1024


def test_spec_of_other_sizes_and_spellings() -> None:
    spec = read_gguf_spec(_file(block_count=48, **{"attention.key_length": 256, "rope.scaling.type": "none"}))
    assert spec.query_pre_attn_scalar == 256 and spec.rope_scaling_factor == 1.0
    flags = {"block_count": 3, "attention.sliding_window_pattern": [True, False, True]}
    assert read_gguf_spec(_file(**flags)).layer_groups == (LOCAL, GLOBAL, LOCAL)
    flags["attention.sliding_window_pattern"] = 2
    assert read_gguf_spec(_file(**flags, **{"rope.freq_base_swa": 5e3})).layer_groups == (LOCAL, GLOBAL, LOCAL)
    assert read_gguf_spec(_file(**{"rope.freq_base_swa": 5e3})).rope_local_theta == 5e3


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
        read_gguf_spec(_file(**change))


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
        (b"GGUF\0\0\0\x03" + whole[8:], "GGUF version .*big-endian"),
        (whole[:16] + b"\xff" * 8 + whole[24:], "truncated or damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            open_source(path)


def test_unsupported_type_and_unknown_tensor(tmp_path: Path) -> None:
    write_gguf(tmp_path / "q.gguf", "F16")
    data = (tmp_path / "q.gguf").read_bytes()
    entry = b"blk.0.attn_q.weight" + struct.pack("<IQQ", 2, HIDDEN, HEADS * DIM)
    assert data.count(entry + struct.pack("<I", 1)) == 1
    data = data.replace(entry + struct.pack("<I", 1), entry + struct.pack("<I", 25))  # int16, of the same size
    (tmp_path / "q.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight is stored as I16.*Read are F32, F16"):
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


def test_a_head_of_its_own_is_read(tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "m.gguf", "Q5_1", head="F16")
    source = open_source(tmp_path / "m.gguf")
    assert not source.spec.tie_word_embeddings
    np.testing.assert_array_equal(source.read_tensor("lm_head.weight"), stored["output.weight"].astype(np.float32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "gemma2"}, "'gemma2' model, not gemma3"),
        ({"general.architecture": "gemma-embedding"}, "EmbeddingGemma"),
        ({"general.architecture": "clip"}, "an image encoder"),
        ({"general.architecture": "controlvector"}, "a control vector"),
        ({"general.architecture": None, "general.type": "imatrix"}, "an importance matrix"),
        ({"general.type": "adapter", "adapter.type": "lora"}, "a LoRA adapter.*--lora"),
        ({"general.quantization_version": 1}, "quantization_version is 1"),
    ],
)
def test_other_kinds_of_files_are_called_by_name(change: dict[str, Any], words: str) -> None:
    file = _file()
    file.metadata.update(change)
    with pytest.raises(CheckpointError, match=words):
        read_gguf_spec(file)


def test_keys_that_say_again_what_others_say() -> None:
    same = {"attention.key_length_swa": 128, "rope.dimension_count_swa": 128, "attention.scale": 168**-0.5}
    assert read_gguf_spec(_file(final_logit_softcapping=0.0, **same)) == read_gguf_spec(_file())
    for key, value in (("attention.value_length_swa", 64), ("attention.scale", 0.125), ("attention.scale", 0.0)):
        with pytest.raises(CheckpointError, match=key):
            read_gguf_spec(_file(**{key: value}))


def test_files_of_ollamas_converter() -> None:
    """It writes two bases of rope under other names, no factor and for vision models no epsilon; the 1B model's cap of
    logits is none of Gemma's."""
    bare = dict.fromkeys(("rope.freq_base", "rope.scaling.type", "rope.scaling.factor"))
    bases = {"rope.global.freq_base": 1e6, "rope.local.freq_base": 1e4}
    said: list[str] = []
    for keys in (bases, {"attention.layer_norm_rms_epsilon": None, "vision.block_count": 27}):
        assert read_gguf_spec(_file(**bare, **keys), said.append) == read_gguf_spec(_file())
    assert said == ["rope's linear factor 8 of Gemma 3 with 62 layers is taken, which the file leaves out."] * 2
    small = read_gguf_spec(_file(block_count=26, final_logit_softcapping=30.0, **bare, **bases), said.append)
    assert (small.final_logit_softcapping, small.rope_scaling_factor) == (None, 1.0) and "30" in said[-1]
    assert read_gguf_spec(_file(block_count=26, final_logit_softcapping=30.0)).final_logit_softcapping == 30.0
    with pytest.raises(CheckpointError, match=r"rope\.global\.freq_base is 500000"):
        read_gguf_spec(_file(**{"rope.global.freq_base": 5e5}))
    with pytest.raises(CheckpointError, match="lacks the key gemma3.attention.layer_norm_rms_epsilon"):
        read_gguf_spec(_file(**{"attention.layer_norm_rms_epsilon": None}))
