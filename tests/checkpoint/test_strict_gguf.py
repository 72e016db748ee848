"""GGUF files that are not what llama.cpp writes: refused in one line with file, tensor or key, at no cost."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz import models
from fuzz.models import ARRAY, BOOL, F32, I32, STRING, U32, U64
from fuzz.reader import read_gguf, read_safetensors

from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.gguf_file import open_gguf
from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.checkpoint.safetensors_io import read_at
from wicore_trt.errors import CheckpointError

G, T = "gemma3.", "tokenizer.ggml."
TENSORS = models.gguf_tensors(np.random.default_rng(1))


def keys(*change: tuple[str, int, Any], without: str = "") -> list[tuple[str, int, Any]]:
    """The metadata of a whole file with some keys set anew or left out."""
    found = {name: (name, kind, value) for name, kind, value in models.metadata() if name != without}
    return list((found | {key[0]: key for key in change}).values())


def tensors(index: int, **change: Any) -> list[dict[str, Any]]:
    return [t | change if i == index else dict(t) for i, t in enumerate(TENSORS)]


def refused(path: Path, data: bytes, *words: str) -> None:
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and message.isprintable(), message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("kind", [models.GGUF_F32, models.GGUF_F16, models.GGUF_BF16])
def test_norms_of_every_type_are_served_bit_for_bit(kind: int, tmp_path: Path) -> None:
    import gguf

    table = []
    for tensor in TENSORS:
        if len(tensor["dims"]) == 1:
            x = np.geomspace(1e-6, 200, tensor["dims"][0], dtype=np.float32)  # 1 + (x - 1) rounds what is below 0.5
            raw = gguf.quants.quantize(x, gguf.GGMLQuantizationType(kind)).tobytes()
            tensor = tensor | {"kind": kind, "raw": raw}
        table.append(tensor)
    (tmp_path / "m.gguf").write_bytes(models.gguf_file(keys(), table))
    model = read_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "c")
    built = read_safetensors((tmp_path / "c" / "rank0.safetensors").read_bytes())
    for theirs, ours in (("input_layernorm", "input_layernorm"), ("self_attn.q_norm", "attention.q_layernorm")):
        want = model.tensors[f"model.layers.1.{theirs}.weight"]
        assert built[f"transformer.layers.1.{ours}.weight"][2] == want.astype(np.float32).tobytes()


def test_rope_keys_are_llama_cpps(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def spec(*change: tuple[str, int, Any], without: str = "") -> Any:
        path.write_bytes(models.gguf_file(keys(*change, without=without), TENSORS))
        return open_source(path).spec

    linear, factor = (G + "rope.scaling.type", STRING, "linear"), (G + "rope.scaling.factor", F32, 8.0)
    assert spec().rope_scaling_factor == 1.0
    assert spec(linear, factor).rope_scaling_factor == 8.0
    assert spec((G + "rope.scale_linear", F32, 4.0)).rope_scaling_factor == 4.0
    assert spec((G + "rope.scaling.type", STRING, "none"), factor).rope_scaling_factor == 1.0
    assert spec(without=G + "rope.freq_base").rope_theta == 10_000.0
    for change in (
        (factor,),
        (linear,),
        (linear, (factor[0], F32, 0.0)),
        (linear, factor, (G + "rope.scale_linear", F32, 4.0)),
    ):
        refused(path, models.gguf_file(keys(*change), TENSORS), "rope.sc")


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        (G + "block_count", U32, 0xFFFFFFFF), (G + "block_count", U64, 1 << 63), (G + "block_count", STRING, "x"),
        (G + "block_count", F32, 2.0), (G + "attention.head_count", U32, 0), (G + "attention.head_count_kv", U32, 3),
        (G + "attention.head_count", ARRAY, (U32, [4, 4])), (G + "attention.key_length", F32, 8.0),
        (G + "attention.value_length", U32, 4), (G + "attention.layer_norm_rms_epsilon", F32, float("nan")),
        (G + "attention.layer_norm_rms_epsilon", STRING, "x"), (G + "rope.freq_base", F32, 0.0),
        (G + "rope.freq_base", U32, 10_000), (G + "attention.sliding_window", U32, 0),
        (G + "attention.sliding_window_pattern", U32, 0), (G + "attention.sliding_window_pattern", I32, -6),
        (G + "attention.sliding_window_pattern", ARRAY, (BOOL, [True])), (G + "context_length", F32, 1.5),
        (G + "attention.sliding_window_pattern", ARRAY, (U32, [1, 0])), (G + "final_logit_softcapping", STRING, "x"),
        (G + "rope.scaling.type", STRING, "yarn"), (G + "rope.dimension_count", U32, 4), (G + "vocab_size", U32, 47),
        (G + "attn_logit_softcapping", F32, 50.0), (G + "expert_count", U32, 4), (G + "mystery", U32, 1),
        ("general.alignment", U32, 0), ("general.alignment", U32, 3), ("general.alignment", STRING, "x"),
        ("split.count", STRING, "x"), ("split.count", U32, 3), (T + "tokens", U32, 5), (T + "tokens", STRING, "abc"),
        (T + "tokens", ARRAY, (STRING, models.PIECES[:-3])), (T + "tokens", ARRAY, (STRING, [*models.PIECES, "more"])),
        (T + "tokens", ARRAY, (STRING, [*models.PIECES[:-1], "a"])), (T + "tokens", ARRAY, (U32, list(range(48)))),
        (T + "tokens", ARRAY, (STRING, [*models.PIECES[:-1], ""])), (T + "token_type", ARRAY, (I32, [1])),
        (T + "tokens", ARRAY, (STRING, [*models.PIECES[:-1], "q" * 3_000_000])), (T + "token_type", U32, 3),
        (T + "bos_token_id", U32, 48), (T + "eos_token_id", I32, -1), (T + "eos_token_id", ARRAY, (U32, [1])),
        (T + "unknown_token_id", STRING, "x"), (T + "add_bos_token", STRING, "no"),
        ("tokenizer.chat_template", ARRAY, (U32, [1])),
    ],
)  # fmt: skip
def test_keys_of_the_wrong_type_or_range(key: str, kind: int, value: Any, tmp_path: Path) -> None:
    named = {"general.alignment": "general.alignment", "split.count": "split.count"}.get(key, key)
    refused(tmp_path / "m.gguf", models.gguf_file(keys((key, kind, value)), TENSORS), named)


def test_tensors_lie_one_behind_the_other(tmp_path: Path) -> None:
    path, name = tmp_path / "m.gguf", TENSORS[1]["name"]
    first = TENSORS[0]
    for offset in (0, 4, 64, len(first["raw"]) + 4, 1 << 40, (1 << 64) - 1):
        refused(path, models.gguf_file(keys(), tensors(1, at=offset)), name)
    refused(path, models.gguf_file(keys(), [*TENSORS, dict(first)]), f"holds the tensor {first['name']} twice")
    refused(path, models.gguf_file(keys(), [*TENSORS, first | {"name": models.EMBEDDING}]), "a GGUF name")
    refused(path, models.gguf_file([*keys(), keys()[3]], TENSORS), f"the key {keys()[3][0]} stands twice")
    for dims in ([], [0], [32, 0], [1 << 63, 32], [1] * 9):
        refused(path, models.gguf_file(keys(), tensors(1, dims=dims)), name)
    norm = next(i for i, t in enumerate(TENSORS) if t["dims"] == [32])
    refused(
        path, models.gguf_file(keys(), tensors(norm, kind=models.GGUF_Q8_0, raw=b"\0" * 34)), "one dimension", "Q8_0"
    )


def test_counts_are_held_against_the_file(tmp_path: Path) -> None:
    """Sparse files make large counts cheap to write; nothing may be allocated for them."""
    head = b"GGUF" + struct.pack("<I", 3)
    name = struct.pack("<Q", 1) + b"a"
    for counts, rest, size in (
        ((1, 0), name + struct.pack("<I", 0xFFFFFFFF), 40 << 30),
        ((0, 1), name + struct.pack("<IIQ", ARRAY, STRING, 1 << 27), 3 << 30),
        ((0, 1), name + struct.pack("<IIQ", ARRAY, 0, 1 << 28), 1 << 30),
        ((0, 1), name + struct.pack("<IQ", STRING, 1 << 29), 1 << 30),
        ((0, 1), name + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 5000, 1 << 20),
        ((1 << 63, 0), b"", 1 << 30),
        ((0, (1 << 28) - 1), b"", 1 << 30),
    ):
        with (tmp_path / "m.gguf").open("wb") as file:
            file.write(head + struct.pack("<QQ", *counts) + rest)
            file.truncate(size)
        with pytest.raises(CheckpointError, match=r"m\.gguf is truncated or damaged"):
            open_gguf(tmp_path / "m.gguf")


def test_reads_longer_than_the_system_gives_at_once(tmp_path: Path) -> None:
    class Short:
        def __init__(self, data: bytes) -> None:
            self.data, self.at = data, 0

        def seek(self, at: int) -> None:
            self.at = at

        def read(self, size: int) -> bytes:
            piece = self.data[self.at : self.at + min(size, 7)]
            self.at += len(piece)
            return piece

    file: Any = Short(bytes(range(100)))
    assert read_at(file, 3, 90, tmp_path) == bytes(range(3, 93))
    with pytest.raises(CheckpointError, match="ended early"):
        read_at(file, 50, 60, tmp_path)


SCORES = [-float(i) for i in range(48)]
KINDS = [3] * 4 + [1] * 44


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (("add_space_prefix", BOOL, True), "add_space_prefix is True; it must be False"),
        (("add_eos_token", BOOL, True), "add_eos_token"), (("add_sep_token", BOOL, True), "add_sep_token"),
        (("remove_extra_whitespaces", BOOL, True), "remove_extra_whitespaces"),
        (("precompiled_charsmap", ARRAY, (I32, [1])), "precompiled_charsmap"),
        (("merges", ARRAY, (STRING, ["a b"])), "merges"), (("merges", ARRAY, (STRING, ["a"])), "merges[0]"),
        (("merges", ARRAY, (STRING, ["b b", "a a"])), "merges"), (("foo_token_id", U32, 1), "foo_token_id"),
        (("eom_token_id", U32, 48), "eom_token_id"),
        (("pre", STRING, "qwen2"), "pre is 'qwen2'"),
        (("scores", ARRAY, (F32, [*SCORES[:-1], 1.0])), "scores[47] is 1.0"),
        (("scores", ARRAY, (F32, SCORES[:-1])), "48 numbers"), (("scores", ARRAY, (I32, [1] * 48)), "48 numbers"),
        (("scores", ARRAY, (F32, [float("nan")] * 48)), "scores["),
        (("token_type", ARRAY, (I32, [*KINDS[:-1], 6])), "a byte's"),
        (("eos_token_ids", ARRAY, (I32, [48])), "below 48"),
    ],
)  # fmt: skip
def test_tokenizer_keys_are_used_or_refused(key: tuple[str, int, Any], words: str, tmp_path: Path) -> None:
    refused(tmp_path / "m.gguf", models.gguf_file(keys((T + key[0], *key[1:])), TENSORS), words)


def test_tokenizer_keys_of_other_converters(tmp_path: Path) -> None:
    special = [*models.PIECES[:4], "<start>", *models.PIECES[5:]]  # typed as text, which nothing merges to
    extra = [
        (T + "eos_token_ids", ARRAY, (I32, [1, 5])), (T + "pre", STRING, "default"), (T + "add_eos_token", BOOL, False),
        (T + "tokens", ARRAY, (STRING, special)), (T + "scores", ARRAY, (F32, [*SCORES[:4], -1000.0, *SCORES[5:]])),
    ]  # fmt: skip
    (tmp_path / "m.gguf").write_bytes(models.gguf_file(keys(*extra), TENSORS))
    assert open_source(tmp_path / "m.gguf").generation_config == {"bos_token_id": 2, "eos_token_id": [1, 5]}


def split(directory: Path, **odd: Any) -> list[Path]:
    """The model in 3 files, as llama-gguf-split writes it; `odd` replaces its keys."""
    paths = [directory / f"m-{i + 1:05d}-of-00003.gguf" for i in range(3)]
    for index, path in enumerate(paths):
        said = {"no": index, "count": 3, "tensors.count": len(TENSORS)} | odd
        keys_of_part = [*(keys() if index == 0 else []), *(("split." + key, U32, value) for key, value in said.items())]
        path.write_bytes(models.gguf_file(keys_of_part, TENSORS[index::3]))
    return paths


def test_a_split_model_is_read_from_any_of_its_parts(tmp_path: Path) -> None:
    whole, directory = tmp_path / "m.gguf", tmp_path / "d"
    whole.write_bytes(models.gguf_file(keys(), TENSORS))
    want = open_source(whole)
    directory.mkdir()
    parts = split(directory)
    for given in (*parts, directory):
        source = open_source(given)
        assert source.spec == want.spec and source.tensors == want.tensors
        for name in want.tensors:
            np.testing.assert_array_equal(source.read_tensor(name), want.read_tensor(name))
    assert open_source(directory).place_of("model.norm.weight").startswith(str(directory))
    parts[1].unlink()
    for given in (parts[2], directory):
        with pytest.raises(CheckpointError, match=r"one of 3 parts, of which 1 are missing: m-00002-of-00003\.gguf"):
            open_source(given)


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    for odd, words in (
        ({"tensors.count": 9}, "not 9 as split.tensors.count says"),
        ({"no": 1}, "is not part 1 of 3"),
        ({"count": 2}, "split.count is 2"),
    ):
        with pytest.raises(CheckpointError, match=words):
            open_source(split(tmp_path, **odd)[0])
    parts = split(tmp_path)
    said = [("split.no", U32, 2), ("split.count", U32, 3)]
    parts[2].write_bytes(models.gguf_file(said, TENSORS[:1]))
    with pytest.raises(CheckpointError, match=f"holds the tensor {TENSORS[0]['name']} once more"):
        open_source(parts[0])


def test_a_fused_projection_is_read_as_its_three_parts(tmp_path: Path) -> None:
    plain, fused, names = tmp_path / "m.gguf", tmp_path / "f.gguf", {t["name"]: t for t in TENSORS}
    q, k, v = (dict(names[f"blk.1.attn_{n}.weight"]) for n in "qkv")
    for part in (q, k, v):
        part |= {"kind": models.GGUF_F16, "raw": np.arange(np.prod(part["dims"]), dtype=np.float16).tobytes()}
    rest = [t for t in TENSORS if t["name"] not in (q["name"], k["name"], v["name"])]
    plain.write_bytes(models.gguf_file(keys(), [*rest, q, k, v]))
    one = q | {"name": "blk.1.attn_qkv.weight", "raw": q["raw"] + k["raw"] + v["raw"]}
    one["dims"] = [q["dims"][0], q["dims"][1] + k["dims"][1] + v["dims"][1]]
    fused.write_bytes(models.gguf_file(keys(), [*rest, one]))
    source, want = open_source(fused), open_source(plain)
    assert source.tensors == want.tensors and source.place_of("model.layers.1.self_attn.v_proj.weight").endswith(
        "_qkv.weight"
    )
    for name in want.tensors:
        np.testing.assert_array_equal(source.read_rows(name, 3, 8)[0], want.read_rows(name, 3, 8)[0])
    refused(tmp_path / "x.gguf", models.gguf_file(keys(), [*rest, one, k]), "k_proj.weight twice")


def test_a_blob_of_ollama_is_read_and_its_manifest_names_it(tmp_path: Path) -> None:
    blob, manifest = tmp_path / "blobs" / f"sha256-{'0a' * 32}", tmp_path / "manifests" / "library" / "gemma3" / "1b"
    blob.parent.mkdir()
    manifest.parent.mkdir(parents=True)
    vision = [
        {"name": n, "dims": [4], "kind": models.GGUF_F32, "raw": b"\0" * 16, "at": None} for n in ("v.blk.0.x", "mm.y")
    ]
    blob.write_bytes(models.gguf_file(keys((G + "vision.block_count", U32, 1)), [*TENSORS, *vision]))
    source = open_source(blob)
    [note] = source.notes
    assert note.startswith("left aside: 2 tensors of the image encoder. ") and "lacks the key gemma3.vision." in note
    assert source.vision is None
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": blob.name.replace("-", ":"), "size": 1}
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [{"mediaType": "x", "digest": "y"}, layer]}))
    refused(manifest, manifest.read_bytes(), "manifest of Ollama", str(blob))


def test_merges_beyond_any_model_are_not_made() -> None:
    from itertools import product

    from wicore_trt.checkpoint import gguf_tokenizer

    tokens = ["".join(letters) for size in range(1, 8) for letters in product("ab", repeat=size)]
    gguf_tokenizer._MAX_MERGES, most = 1000, gguf_tokenizer._MAX_MERGES
    try:
        with pytest.raises(ValueError, match="more than 1000 ways"):
            gguf_tokenizer._find_merges(tokens, {token: i for i, token in enumerate(tokens)})
    finally:
        gguf_tokenizer._MAX_MERGES = most
