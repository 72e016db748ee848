"""tokenizer.json from strangers: what is not Gemma's kind is refused in one line with file and key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from text.synthetic_tokenizer import backend

from wicore_trt.errors import EngineFormatError
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.text.tokenizer_file import read_tokenizer

FILE = Path("m/tokenizer.json")
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
PREPEND = {"type": "Prepend", "prepend": "\u2581"}
BOMB = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
Value = dict[str, Any]


def read(edit: Callable[[Value], Any]) -> tokenizers.Tokenizer:
    value = json.loads(backend().to_str())
    edit(value)
    return read_tokenizer(json.dumps(value).encode(), FILE, "Build it again.")


def put(*path: str | int, value: Any) -> Callable[[Value], None]:
    def edit(file: Any) -> None:
        for key in path[:-1]:
            file = file[key]
        file[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (put("normalizer", value={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "normalizer"),
        (put("normalizer", value=REPLACE | {"pattern": {"Regex": "(a+)+$"}}), "normalizer.Replace.pattern"),
        (put("normalizer", value=REPLACE | {"pattern": {"String": ""}}), "normalizer.Replace.pattern.String"),
        (put("normalizer", value=REPLACE | {"content": "x" * 17}), "normalizer.Replace.content"),
        (put("normalizer", value={"type": "Sequence", "normalizers": [BOMB] * 2}), "8 times longer by its normalizer"),
        (put("normalizer", value={"type": "Prepend", "prepend": "x" * 10**6}), "normalizer.Prepend.prepend"),
        (put("decoder", value={"type": "Sequence", "decoders": [BOMB]}), "8 times longer by its decoder"),
        (put("decoder", value={"type": "CTC", "pad_token": "x"}), "decoder"),
        (put("decoder", value={"type": "Strip", "content": "h", "start": 0, "stop": 1}), "decoder.Strip.stop"),
        (put("pre_tokenizer", "behavior", value="Removed"), "pre_tokenizer.Split.behavior"),
        (put("pre_tokenizer", "pattern", value={"Regex": "(x+x+)+y"}), "pre_tokenizer.Split.pattern"),
        (put("model", "type", value="Unigram"), "model"),
        (put("model", "dropout", value=0.5), "model.BPE.dropout"),
        (put("model", "unk_token", value="?!"), "unknown token"),
        (put("model", "continuing_subword_prefix", value="\u00e9\u00e9"), "continuing_subword_prefix"),
        (put("model", "merges", value=[["h", "zz"]]), "cannot be read"),
        (put("model", "merges", value=[["h"]]), "cannot be read"),
        (put("model", "vocab", "h", value=-1), "model.BPE.vocab.h"),
        (put("model", "vocab", "h", value=7), "gives the id 7 to two tokens of model.vocab"),
        (put("model", "vocab", "h", value=1 << 40), "model.BPE.vocab.h"),
        (put("added_tokens", 1, "id", value=0), "gives the id 0 to two tokens of added_tokens"),
        (put("added_tokens", 1, "content", value="<bos>"), "the added token '<bos>' twice"),
        (put("added_tokens", 1, "content", value=""), "added_tokens.1.content"),
        (put("added_tokens", 1, "id", value=5000), "the added token '<eos>' the id 5000"),
        (lambda f: f["added_tokens"].append(ADDED | {"id": 9999, "content": "<new>"}), "'<new>' the id 9999"),
        (lambda f: f["added_tokens"].append(ADDED | {"id": 4000, "content": "y" * 513}), "added_tokens.6.content"),
        (put("post_processor", value={"type": "ByteLevel"}), "post_processor"),
        (put("truncation", value={"x": [[]] * 1_600_000}), "objects and lists"),
    ],
)  # fmt: skip
def test_refused_by_key(edit: Callable[[Value], Any], words: str) -> None:
    with pytest.raises(EngineFormatError) as caught:
        read(edit)
    message = str(caught.value)
    assert words in message and str(FILE) in message and message.isprintable() and len(message) < 700, message


@pytest.mark.parametrize(
    "edit",
    [
        put("normalizer", value={"type": "Sequence", "normalizers": [PREPEND, REPLACE]}),
        put("normalizer", value=None), put("decoder", value=None), put("pre_tokenizer", value=None),
        put("pre_tokenizer", value={"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never"}),
        put("post_processor", value=None), put("model", "merges", value=["h e", "l l", "he ll"]),
        put("padding", value={"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 8, "pad_id": 0,
                              "pad_type_id": 0, "pad_token": "<pad>"}),
        put("truncation", value={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}),
        lambda f: f["added_tokens"].append(ADDED | {"id": len(f["model"]["vocab"]), "content": "<image_soft_token>"}),
    ],
)  # fmt: skip
def test_real_forms_are_read(edit: Callable[[Value], Any]) -> None:
    tokenizer = read(edit)
    assert tokenizer.encode("hello", add_special_tokens=False).tokens[0][0] in "h\u2581"
    assert len(tokenizer.encode("he " * 40).ids) > 40


def test_a_panic_of_the_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    panic: type[BaseException] = type("PanicException", (BaseException,), {})

    class Panics:
        @staticmethod
        def from_buffer(data: bytes) -> None:
            raise panic("index out of bounds")

    data = backend().to_str().encode()
    monkeypatch.setattr(tokenizers, "Tokenizer", Panics)
    with pytest.raises(EngineFormatError, match="cannot be read: index out of bounds"):
        read_tokenizer(data, FILE, "Build it again.")
    panic.__name__ = "KeyboardInterrupt"
    with pytest.raises(panic, match="index out of bounds"):
        read_tokenizer(data, FILE, "Build it again.")


def test_ids_are_below_the_size(tmp_path: Path) -> None:
    value = json.loads(backend().to_str())
    value["model"]["vocab"]["far"] = 5000
    files = {"tokenizer.json": json.dumps(value).encode(), "generation_config.json": b'{"eos_token_id": 1}'}
    assert Tokenizer.from_files(files, tmp_path).vocab_size == 5001


def test_what_was_checked_before_is_loaded_alike_and_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = backend().to_str().encode()
    once = read_tokenizer(data, FILE, "Build it again.")
    monkeypatch.setattr("wicore_trt.text.tokenizer_file._find_contradiction", lambda file: "contradicts itself")
    with pytest.raises(EngineFormatError, match="contradicts itself"):
        read_tokenizer(data, FILE, "Build it again.")
    assert read_tokenizer(data, FILE, "Build it again.", checked=True).to_str() == once.to_str()
