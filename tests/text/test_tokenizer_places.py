"""Files beside tokenizer.json: their words on tokens and templates are compared with it, with each other and with
transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_tokenizer import TEMPLATE, write

from wicore_trt.checkpoint.tokenizer_check import check_tokenizer
from wicore_trt.errors import CheckpointError
from wicore_trt.text.tokenizer import Tokenizer

CONFIG: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}


def notes(path: Path) -> str:
    return "\n".join(check_tokenizer(path, "m", 512))


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"added_tokens": {"hello": 400}}, "added_tokens.json has the token 'hello'"),
        ({"tokenizer_config": {**CONFIG, "additional_special_tokens": ["hell"]}}, "tokenizer_config.json .* 'hell'"),
        ({"tokenizer_config": {**CONFIG, "extra_special_tokens": {"x_token": "hell"}}}, "tokenizer_config.json .*hell"),
        ({"special_tokens_map": {"additional_special_tokens": [{"content": "he"}]}}, "special_tokens_map.json .* 'he'"),
        (
            {"tokenizer_config": {**CONFIG, "added_tokens_decoder": {"5": {**FLAGS, "content": "<end_of_turn>",
                                                                         "lstrip": True}}}},
            "tokenizer_config.json .* '<end_of_turn>'",
        ),
        ({"added_tokens": {"<end_of_turn>": 7}}, "added_tokens.json has the token '<end_of_turn>'"),
    ],
)  # fmt: skip
def test_a_token_that_tokenizer_json_lacks_is_refused(files: dict[str, Any], place: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write(tmp_path, **files)
    with pytest.raises(CheckpointError, match=f"^m: {place}.* tokenizer.json has not so"):
        notes(tmp_path)
    if "'hell'" in place:  # transformers makes one token of it
        ours, theirs = Tokenizer.from_dir(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert ours.encode("hello") != theirs("hello")["input_ids"]


def test_files_that_agree_pass(tmp_path: Path) -> None:
    agreed = {"added_tokens_decoder": {"5": {**FLAGS, "content": "<end_of_turn>"}}, "add_bos_token": True}
    more = {"extra_special_tokens": {"turn_token": "<end_of_turn>"}}
    write(
        tmp_path,
        tokenizer_config={**CONFIG, **agreed, **more},
        added_tokens={"<end_of_turn>": 5},
        special_tokens_map={"bos_token": {"content": "<bos>", **FLAGS}},
        chat_template={"chat_template": TEMPLATE},
    )
    assert not {"counts", "otherwise"} & {*notes(tmp_path).replace(".", "").split()}
    write(tmp_path, post_processor=False)
    assert "texts begin with BOS here; tokenizer.json says otherwise" in notes(tmp_path)


def test_what_does_not_count_is_told(tmp_path: Path) -> None:
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
    write(tmp_path, tokenizer_config={**CONFIG, "chat_template": named, "add_bos_token": False},
          special_tokens_map={"bos_token": "<pad>"}, chat_template={"chat_template": TEMPLATE + "!"})  # fmt: skip
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["post_processor"]["single"].append({"SpecialToken": {"id": "<bos>", "type_id": 0}})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    told = notes(tmp_path)
    for words in (
        "chat_template.json and tokenizer_config.json hold different chat templates: that of chat_template.json counts",
        "chat template 'tool_use' is left aside",
        "texts begin without BOS here; tokenizer.json says otherwise",
        "bos_token is '<bos>' in tokenizer_config.json, '<pad>' in special_tokens_map.json: the first counts",
        "ends each text with a token that is left out",
    ):
        assert words in told
    write(tmp_path, tokenizer_config={**CONFIG, "chat_template": named[1:]}, chat_template=None)
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(CheckpointError, match="has 'tool_use' and none of the name default"):
        notes(tmp_path)


def test_templates_know_all_named_tokens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = "{{ bos_token }}{{ boi_token }}{{ messages[0]['content'] }}{{ turn_token }}{{ sep_token }}"
    more = {"boi_token": "<start_of_turn>", "extra_special_tokens": {"turn_token": "<end_of_turn>"}}
    write(tmp_path, tokenizer_config={**CONFIG, **more, "sep_token": "<unk>", "chat_template": template})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    said = [{"role": "user", "content": "hello world"}]
    expected = theirs.apply_chat_template(said, return_dict=False)
    assert Tokenizer.from_dir(tmp_path).apply_chat(said) == expected
