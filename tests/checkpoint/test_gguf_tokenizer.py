"""Tokenizers from GGUF metadata, on a small vocabulary: ids against transformers, and the files beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from wicore_trt.checkpoint.gguf_file import open_gguf
from wicore_trt.checkpoint.gguf_tokenizer import GgufVocabulary, read_vocabulary, write_tokenizer
from wicore_trt.errors import CheckpointError

NORMAL, CONTROL, USER, UNUSED, BYTE = 1, 3, 4, 5, 6
SPECIAL = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", CONTROL), ("[multimodal]", USER)]
SPECIAL += [("<start_of_turn>", CONTROL), ("<end_of_turn>", CONTROL), ("\n", USER), ("\n\n", USER), ("\n\n\n", USER)]
SPECIAL += [("  ", USER), ("   ", USER), ("<table>", USER), ("[PAD9]", UNUSED)]
PIECES = [
    "▁t",
    "▁th",
    "he",
    "▁the",
    "in",
    "an",
    "▁a",
    "er",
    "the",
    "▁▁t",
    "ab",
    "abc",
    "bc",
    "▁<",
    "ta",
    "<t",
    "le>",
    "é",
    "日本",
]
LETTERS = "▁abcdefghijklmnopqrstuvwxyz<>日本/_"


def _write(path: Path, **keys: Any) -> tuple[list[str], list[int]]:
    tokens = [*SPECIAL, *((f"<0x{b:02X}>", BYTE) for b in range(256)), *((t, NORMAL) for t in (*PIECES, *LETTERS))]
    names, types = [t for t, _ in tokens], [k for _, k in tokens]
    writer = gguf.GGUFWriter(str(path), "gemma3")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_block_count, 1),
        (writer.add_embedding_length, 8),
        (writer.add_feed_forward_length, 8),
        (writer.add_head_count, 1),
        (writer.add_head_count_kv, 1),
        (writer.add_key_length, 8),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_rope_freq_base, 1e6),
        (writer.add_sliding_window, 8),
        (writer.add_tokenizer_model, keys.pop("model", "llama")),
        (writer.add_token_list, names),
        (writer.add_token_types, types),
        (writer.add_token_scores, [-float(i) for i in range(len(names))]),
        (writer.add_bos_token_id, 2),
        (writer.add_eos_token_id, 1),
        (writer.add_unk_token_id, 3),
        (writer.add_pad_token_id, 0),
        (writer.add_add_bos_token, keys.pop("add_bos", True)),
        (writer.add_add_space_prefix, False),
    ):
        add(value)
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((len(names), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return names, types


def _vocabulary(metadata: dict[str, Any]) -> GgufVocabulary:
    return read_vocabulary(metadata, len(metadata["tokenizer.ggml.tokens"]), "t.gguf")


def _texts() -> list[str]:
    rng = np.random.default_rng(3)
    parts = [
        "the",
        " the",
        "an",
        "a",
        "  ",
        "   ",
        "     ",
        " ",
        "\n",
        "\n\n\n\n",
        "<table>",
        "<tab",
        "le>",
        "abc",
        "é",
        "日本",
        "語",
    ]
    parts += ["<bos>", "<end_of_turn>", "<0x41>", "👩‍👩‍👧", "▁", "[multimodal]", "[PAD9]", "\x00", "bc", "\t"]
    return ["".join(rng.choice(parts, rng.integers(0, 12))) for _ in range(300)]


@pytest.mark.parametrize("add_bos", [True, False])
def test_ids_equal_transformers(add_bos: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    _write(tmp_path / "t.gguf", add_bos=add_bos)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    write_tokenizer(_vocabulary(open_gguf(tmp_path / "t.gguf").metadata), {"eos_token_id": [1]}, tmp_path)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    mine, other = (json.loads(t.to_str()) for t in (ours, theirs.backend_tokenizer))
    assert mine["model"] == other["model"]  # the merges in the same order too
    for text in _texts():
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special).ids
            assert ids == theirs(text, add_special_tokens=special).input_ids, repr(text)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is add_bos


def test_chat_model(tmp_path: Path) -> None:
    names, _ = _write(tmp_path / "t.gguf", chat_template="{{ messages }}", eot_token_id=6)
    metadata = open_gguf(tmp_path / "t.gguf").metadata
    assert _vocabulary(metadata).ends == [1, names.index("<end_of_turn>")] == [1, 6]
    del metadata["tokenizer.ggml.eot_token_id"]
    vocabulary = _vocabulary(metadata)
    assert vocabulary.ends == [1, 6]  # the template says that turns end
    write_tokenizer(vocabulary, {"eos_token_id": vocabulary.ends}, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [1, 6]
    del metadata["tokenizer.chat_template"]
    assert _vocabulary(metadata).ends == [1]


def _tokenizer(metadata: dict[str, Any], directory: Path) -> dict[str, Any]:
    directory.mkdir(exist_ok=True)
    write_tokenizer(_vocabulary(metadata), {"eos_token_id": [1]}, directory)
    return dict(json.loads((directory / "tokenizer.json").read_text()))


def test_bpe_of_newer_converters_equals_sentencepiece(tmp_path: Path) -> None:
    """Without tokenizer.model llama.cpp's converter writes model gpt2: merges, no scores, bytes typed as text."""
    names, types = _write(tmp_path / "t.gguf")
    metadata = open_gguf(tmp_path / "t.gguf").metadata
    plain = _tokenizer(metadata, tmp_path / "llama")
    del metadata["tokenizer.ggml.scores"]
    metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.token_type": [NORMAL if kind == BYTE else kind for kind in types],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in plain["model"]["merges"]],
    }
    for pre in ("default", "gemma4"):
        assert _tokenizer(metadata | {"tokenizer.ggml.pre": pre}, tmp_path / "gpt2") == plain
    assert _vocabulary(metadata).notes == []
    ids = [float(index) for index in range(len(names))]  # Ollama's converter writes them as scores
    assert _tokenizer(metadata | {"tokenizer.ggml.scores": ids}, tmp_path / "gpt2") == plain
    metadata["tokenizer.ggml.merges"] = ["h e", "\u2581 t"]
    assert _tokenizer(metadata, tmp_path / "gpt2")["model"]["merges"] == [["h", "e"], ["\u2581", "t"]]
    assert "come from no merge of the file" in _vocabulary(metadata).notes[0]
    for key, value, words in (
        ("merges", [], "lacks the key tokenizer.ggml.merges"),
        ("merges", ["he"], r"merges\[0\] is 'he'"),
        ("pre", "llama-bpe", "pre is 'llama-bpe'"),
        ("model", "t5", "its tokenizer is 't5'"),
        ("tokens", [name.replace("\u2581", "\u0120") for name in names], "bytes spelt as letters"),
    ):
        with pytest.raises(CheckpointError, match=words):
            _vocabulary(metadata | {f"tokenizer.ggml.{key}": value})


def test_special_tokens_that_a_converter_typed_as_text(tmp_path: Path) -> None:
    names, types = _write(tmp_path / "t.gguf", chat_template="<start_of_turn>{{ messages }}<end_of_turn>")
    metadata = open_gguf(tmp_path / "t.gguf").metadata
    plain = _tokenizer(metadata, tmp_path / "right")
    turns = [names.index("<start_of_turn>"), names.index("<end_of_turn>")]
    for wrong in (turns, [names.index("<table>"), names.index("[multimodal]")], range(6)):
        for kind in (NORMAL, 0):
            metadata["tokenizer.ggml.token_type"] = [kind if i in wrong else t for i, t in enumerate(types)]
            assert _tokenizer(metadata, tmp_path / "wrong") == plain
            notes = _vocabulary(metadata).notes
            assert (names[wrong[0]] in notes[0]) if kind == NORMAL else not notes
    metadata["tokenizer.ggml.token_type"] = [UNUSED if i in turns else t for i, t in enumerate(types)]
    assert _tokenizer(metadata, tmp_path / "wrong") == plain
    metadata["tokenizer.ggml.token_type"] = types
    metadata["tokenizer.ggml.tokens"] = [{"<table>": "<end>"}.get(name, name) for name in names]
    metadata["tokenizer.ggml.token_type"] = [NORMAL if i == names.index("<table>") else t for i, t in enumerate(types)]
    metadata["tokenizer.ggml.eot_token_id"] = names.index("<table>")  # named by a key, so it stands for no text
    added = _tokenizer(metadata, tmp_path / "named")["added_tokens"]
    assert {(token["content"], token["special"]) for token in added} > {("<end>", True), ("[multimodal]", False)}


def test_all_ends_and_templates_go_on(tmp_path: Path) -> None:
    _write(tmp_path / "t.gguf", chat_template="{{ messages }}", eot_token_id=6)
    metadata = open_gguf(tmp_path / "t.gguf").metadata
    metadata |= {"tokenizer.ggml.eom_token_id": 12, "tokenizer.ggml.eos_token_ids": [1, 4]}
    metadata |= {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    vocabulary = _vocabulary(metadata)
    assert vocabulary.ends == [1, 4, 6, 12]
    write_tokenizer(vocabulary, {"eos_token_id": vocabulary.ends}, tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    assert written == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]
