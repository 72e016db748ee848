"""Hugging Face directories that cannot be right: headers, indexes, values and tokenizers, each refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz import models
from fuzz.models import EMBEDDING

from wicore_trt import LLM, SamplingParams
from wicore_trt.backends.torch.calibrate import TextCalibration
from wicore_trt.bench.perplexity import compare_engines
from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.engine.build import build_engine
from wicore_trt.errors import CheckpointError, ConfigError, InvalidRequestError
from wicore_trt.text.tokenizer import Tokenizer

NORM, UP = "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"


def write(path: Path, tag: str = "BF16", edit: Callable[[dict[str, Any]], Any] | None = None, **values: Any) -> Path:
    """A tiny directory. `edit` changes the header; `values` sets (row, number) of tensors by short name."""
    path.mkdir(exist_ok=True)
    tensors = models.weights(np.random.default_rng(3), tag)
    for short, (row, value) in values.items():
        tensors[{"up": UP, "norm": NORM, "embedding": EMBEDDING}[short]][row] = value
    header, data = models.safetensors(tensors, tag)
    header = (edit(header) or header) if edit else header
    (path / "config.json").write_text(json.dumps(models.CONFIG))
    (path / "model.safetensors").write_bytes(models.packed(header, data))
    for name, value in models.tokenizer_files().items():
        (path / name).write_text(json.dumps(value))
    return path


def one(name: str, **change: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(change)


def doubled(header: dict[str, Any]) -> bytes:
    return (json.dumps(header)[:-1] + ", " + json.dumps({EMBEDDING: header[EMBEDDING]})[1:]).encode()


def shifted(header: dict[str, Any]) -> None:
    for item in header.values():
        item["data_offsets"] = [at + 2 for at in item["data_offsets"]]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (one(NORM, data_offsets=[0, 64]), NORM), (shifted, "leaves a gap"), (doubled, "stands twice"),
        (one(EMBEDDING, data_offsets=[-3072, 0]), EMBEDDING), (one(EMBEDDING, data_offsets=[0.0, 3072.0]), EMBEDDING),
        (one(EMBEDDING, data_offsets="x"), EMBEDDING), (one(EMBEDDING, shape=[-48, -32]), EMBEDDING),
        (one(EMBEDDING, shape=[48.0, 32]), EMBEDDING), (one(NORM, shape=[32, True]), NORM),
        (one(NORM, shape=None), NORM),
        (one(EMBEDDING, shape=[1 << 62, 1 << 62]), EMBEDDING), (one(EMBEDDING, shape=[48, 32, *[1] * 60]), EMBEDDING),
        (one(EMBEDDING, dtype=["BF16"]), EMBEDDING), (one(EMBEDDING, dtype="Q7"), EMBEDDING),
        (one(EMBEDDING, dtype="I16"), EMBEDDING), (lambda h: h | {"__metadata__": [1]}, "its header"),
        (lambda h: h | {"a": None}, "a is None"), (lambda h: b"[]", "its header"), (lambda h: b"7", "its header"),
        (lambda h: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (lambda h: {n.replace("layers.0.", "layers.00."): item for n, item in h.items()}, "lacks"),
    ],
)  # fmt: skip
def test_headers(edit: Callable[[dict[str, Any]], Any], words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m", edit=edit)
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    assert str(path / "model.safetensors") in str(caught.value) and words in str(caught.value), str(caught.value)
    assert str(caught.value).isprintable()


def test_an_index_and_a_single_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    (path / "a.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {EMBEDDING: "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"both model\.safetensors and model\.safetensors\.index\.json"):
        open_source(path)
    (path / "a.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": {EMBEDDING: "model.safetensors"}}))
    assert open_source(path).tensors
    for wrong in ({"a": 1, "b": "x"}, {"a": ["x"]}, {"a": None}, {}, [], "x"):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(CheckpointError, match=r"index\.json"):
            open_source(path)


BF16_NAN, BF16_SIGNALLING, BF16_INF = 0x7FC0, 0x7F81, 0xFF80
BAD: list[tuple[str, str, str, Any, str]] = [
    *(("BF16", to, "up", BF16_NAN, f"{UP} holds NaN in row 5") for to in ("bfloat16", "float32", "float16", "fp8")),
    *(("BF16", dtype, "embedding", BF16_INF, f"{EMBEDDING} holds an infinity in row 5") for dtype in ("auto", "fp8")),
    ("F32", "float32", "up", np.nan, f"{UP} holds NaN in row 5"), ("F16", "float16", "up", -np.inf, "an infinity"),
    ("F16", "fp8", "embedding", np.inf, "an infinity"), ("F32", "auto", "norm", np.inf, f"{NORM} holds an infinity"),
    ("BF16", "auto", "norm", BF16_NAN, f"{NORM} holds NaN in row 5"),
    ("BF16", "auto", "norm", BF16_SIGNALLING, f"{NORM} holds NaN in row 5"),
    ("F32", "bfloat16", "up", 3.4e38, f"{UP} reaches 3.4e+38, beyond bfloat16's 3.38953e+38, in row 5"),
    ("F32", "float16", "up", 1e30, f"{UP} reaches 1e+30, beyond float16's 65504, in row 5"),
]  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("tag", "dtype", "short", "value", "words"), BAD)
def test_weights_that_are_not_finite(tag: str, dtype: str, short: str, value: Any, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m", tag, **{short: (5, value)})
    with pytest.raises(CheckpointError) as caught:
        convert(path, tmp_path / "c", dtype=dtype)
    assert words in str(caught.value) and str(path / "model.safetensors") in str(caught.value)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", "", "tokenizer.json"), ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json"),
        ("tokenizer_config.json", json.dumps({"bos_token": "q" * 9000}), "is not in tokenizer.json"),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja"),
        ("generation_config.json", '{"eos_token_id": 1000000000}', "eos_token_id is 1000000000"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x'"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": 1, "bos_token_id": [2]}', "bos_token_id is [2]"),
        ("generation_config.json", "[]", "generation_config.json"),
    ],
)  # fmt: skip
def test_tokenizers_that_would_not_load(name: str, text: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    (path / name).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        convert(path, tmp_path / "c")
    assert words in str(caught.value) and str(path) in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for a in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ raise_exception('Only images.') }}", "Only images"),
        ("{{ messages[0].role }}", "leaves text of the user out"),
        ("{{ messages[0].content[:4] }}", "leaves text of the user out"),
    ],
)
def test_a_model_that_cannot_chat_is_built_and_the_builder_is_told(template: str, why: str, tmp_path: Path) -> None:
    path, notes = write(tmp_path / "m"), list[str]()
    (path / "chat_template.jinja").write_text(template)
    convert(path, tmp_path / "c", note=notes.append)
    assert len([note for note in notes if "cannot chat" in note and why in note]) == 1, notes
    assert len([note for note in notes if note.startswith("answers end at 1 '<eos>' (")]) == 1, notes
    with pytest.raises(InvalidRequestError, match=f"cannot chat.*{why}") as caught:
        Tokenizer.from_dir(tmp_path / "c").apply_chat([{"role": "user", "content": "a"}])
    assert caught.value.field == "messages"


def test_a_tokenizer_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    tokenizer = models.tokenizer_files()["tokenizer.json"]
    tokenizer["model"]["vocab"]["more"] = 48
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="has the id 48, but the model has 48 tokens"):
        convert(path, tmp_path / "c")


def test_added_tokens_without_a_row_are_noted(tmp_path: Path) -> None:
    """Gemma 3 1B and 270M have <image_soft_token> = 262144 and 262,144 rows."""
    path, notes = write(tmp_path / "m"), list[str]()
    tokenizer = models.tokenizer_files()["tokenizer.json"]
    assert len(tokenizer["model"]["vocab"]) == 48
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"].append({"id": 48, "content": "<image_soft_token>", **flags})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    convert(path, tmp_path / "c", note=notes.append)
    assert Tokenizer.from_dir(tmp_path / "c").encode("<image_soft_token>", add_bos=False) == [48]
    assert [note for note in notes if "1 added token " in note and "'<image_soft_token>'" in note]
    text = tmp_path / "text"
    text.write_text("<image_soft_token>" * 20)
    with pytest.raises(ConfigError, match="token id 48, for which the model has no row"):
        convert(path, tmp_path / "d", dtype="fp8", calibration=TextCalibration(text, 10))
    engine = build_engine(tmp_path / "c", tmp_path / "e")
    with pytest.raises(ConfigError, match="token id 48, for which the model has no row"):
        compare_engines([engine.path], text, tokens=10, context=8, stride=None, threads=1, progress=lambda *_: None)
    with (
        LLM(engine.path, kv__device_bytes="16MiB") as llm,
        pytest.raises(InvalidRequestError, match="Token id 48 is outside"),
    ):
        llm.generate("<image_soft_token>", SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("dtype", "value", "said"), [("bfloat16", 1.23e-39, "1.2e-38"), ("float16", 1.23e-6, "6.1e-05")]
)
def test_numbers_that_lose_bits_for_being_small_are_said(dtype: str, value: float, said: str, tmp_path: Path) -> None:
    row = np.full(32, 0.5, np.float32)
    row[:7] = value
    path, lines = write(tmp_path / "m", "F32", up=(5, row)), list[str]()
    convert(path, tmp_path / "c", dtype=dtype, note=lines.append)
    assert len([line for line in lines if f"are below {said} and lost bits as {dtype}, " in line]) == 1, lines


@pytest.mark.parametrize(
    ("dtype", "value", "said"), [("float16", 1e-9, "float16"), ("fp8", 1e-9, "FP8"), ("bfloat16", 1e-42, "bfloat16")]
)
def test_what_a_cast_loses_is_said_once(dtype: str, value: float, said: str, tmp_path: Path) -> None:
    row = np.linspace(0.1, 1, 32, dtype=np.float32)
    row[:7] = value
    path, lines = write(tmp_path / "m", "F32", up=(5, row)), list[str]()
    checkpoint = convert(path, tmp_path / "c", dtype=dtype, note=lines.append)
    lines = [line for line in lines if "became 0" in line]
    assert len(lines) == 1 and f"7 of them in {UP}" in lines[0] and said in lines[0]
    assert checkpoint.config["wicore"]["flushed_to_zero"] == int(lines[0].split()[0]) >= 7
    quiet = list[str]()
    convert(path, tmp_path / "d", dtype="float32", note=quiet.append)
    assert not [line for line in quiet if "became 0" in line]


def test_a_configuration_of_megabytes_is_not_parsed(tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    (path / "config.json").write_text(json.dumps(models.CONFIG | {"x": [[]] * 400_000}))
    with pytest.raises(CheckpointError, match=r"config\.json has 1\d* bytes, more than the 1048576"):
        open_source(path)
