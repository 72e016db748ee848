"""The real 270M file against transformers: every weight, the configuration and the tokenizer's ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from wicore_trt.checkpoint.gguf import GgufSource
from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.engine.directory import open_engine
from wicore_trt.model.hf_config import read_hf_config

pytestmark = pytest.mark.model

TEXTS = [
    "",
    " ",
    "   three  spaces   everywhere    ",
    "\n\n\n\ttabs\t\t and\r\nlines\n",
    "The capital of France is Paris.",
    "naïve café — “quotes” … ½ ² ™",
    "Ünïcödé ünd Groß; ΑΒΓ αβγ; Привет, мир; שלום עולם; مرحبا بالعالم",
    "日本語のテキスト、中文文本。한국어 텍스트 ไทย हिन्दी தமிழ்",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 ☕️ e\u0301 \u200b\u200d\ufeff",
    "\U00010348 \U0001d11e \ue000 \x00 \x07 \x1b[0m \u2028",
    "<bos><start_of_turn>user\nHi<end_of_turn>\n<eos><pad><unk><mask><unused7>[multimodal]<start_of_image>",
    "<table><tr><td>1</td></tr></table> <h1>x</h1> < b >",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x**2}  # ok\n\n\n\n",
    "▁already▁escaped ▁▁ <0x41> <0xFF>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 1234567890 3.14159 $1,000.00",
    "a" + " " * 40 + "b" + "\n" * 40 + "c" + "\t" * 40,
]


@pytest.fixture(scope="module")
def source(gemma_270m_gguf: Path) -> GgufSource:
    opened = open_source(gemma_270m_gguf)
    assert isinstance(opened, GgufSource)
    return opened


@pytest.mark.long
def test_weights_and_spec_equal_transformers(source: GgufSource, gemma_270m_gguf: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gemma_270m_gguf.parent, gguf_file=gemma_270m_gguf.name, dtype="float32"
    )
    theirs = model.state_dict()
    for name in source.tensors:
        np.testing.assert_array_equal(source.read_tensor(name), theirs[name].numpy(), err_msg=name)
    assert set(theirs) - set(source.tensors) <= {"lm_head.weight"}
    config: dict[str, Any] = json.loads(model.config.to_json_string())
    expected = read_hf_config(config)
    assert source.spec.to_dict() == expected.to_dict() | {
        "rms_norm_eps": pytest.approx(expected.rms_norm_eps, rel=1e-6)
    }


def _random_texts(seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    planes = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x600), (0x900, 0xA00), (0x3040, 0x30FF), (0x4E00, 0x9FFF)]
    planes += [(0x1F300, 0x1FAFF), (0x0, 0x20), (0x2000, 0x2100), (0x20, 0x21)]
    texts = []
    for _ in range(40):
        low, high = zip(*(planes[i] for i in rng.integers(0, len(planes), 60)), strict=True)
        texts.append("".join(chr(c) for c in rng.integers(low, high)))
    return texts


ALL_TEXTS = TEXTS + _random_texts(seed=11)
IDS_OF_TRANSFORMERS = "8465130b245f29c387029a7b54af2211"
"""A digest of the ids and texts that transformers 5.23 makes of these texts with this file."""


def test_tokenizer_gives_the_ids_that_it_gave_when_they_were_those_of_transformers(
    engine_270m: Path,
) -> None:
    """With the files that the build of the engine made, straight from this file."""
    tokenizer = Tokenizer.from_file(str(engine_270m / "tokenizer.json"))
    config = json.loads((engine_270m / "tokenizer_config.json").read_text())
    assert tokenizer.get_vocab_size() == open_engine(engine_270m).manifest.spec.vocab_size
    tokens = ["<bos>", "<eos>", "<pad>", "<unk>"]
    assert [config[k] for k in ("bos_token", "eos_token", "pad_token", "unk_token")] == tokens
    assert config["add_bos_token"] is True and "chat_template" not in config
    assert json.loads((engine_270m / "generation_config.json").read_text()) == {"bos_token_id": 2, "eos_token_id": [1]}
    ids = [tokenizer.encode(text, add_special_tokens=s).ids for text in ALL_TEXTS for s in (True, False)]
    known = [ids, [tokenizer.decode(i, skip_special_tokens=True) for i in ids]]
    assert hashlib.blake2b(json.dumps(known).encode(), digest_size=16).hexdigest() == IDS_OF_TRANSFORMERS


@pytest.mark.long
def test_tokenizer_equals_transformers(source: GgufSource, gemma_270m_gguf: Path, engine_270m: Path) -> None:
    """Transformers takes half a minute to read the file. Where this passes the test above holds the right digest."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(gemma_270m_gguf.parent, gguf_file=gemma_270m_gguf.name)
    tokenizer = Tokenizer.from_file(str(engine_270m / "tokenizer.json"))
    assert len(theirs) == source.spec.vocab_size
    for text in ALL_TEXTS:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special).ids
            assert ids == theirs(text, add_special_tokens=special).input_ids, repr(text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
