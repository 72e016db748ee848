"""Structured outputs through OpenAI's client, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Literal

import pydantic
import pytest
from constrained_web import make_constrained_engine
from web import error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
make_one = make_constrained_engine
USER = [{"role": "user", "content": "hello"}]


class Answer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    mood: Literal["good", "bad"]
    numbers: list[Literal[1, 2, 3]]


async def test_a_pydantic_model_is_parsed(client):
    for seed in range(3):
        found = await client.chat.completions.parse(
            model="fake", messages=USER, response_format=Answer, max_tokens=500, seed=seed
        )
        [choice] = found.choices
        assert choice.finish_reason == "stop" and choice.message.parsed.mood in ("good", "bad")


class Moods(pydantic.BaseModel):
    moods: set[Literal["good", "bad"]] = pydantic.Field(max_length=2)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_of_a_schema_is_not_kept_is_told(client, stream):
    schema = Moods.model_json_schema()
    assert schema["properties"]["moods"]["uniqueItems"]
    form = {"type": "json_schema", "json_schema": {"name": "moods", "schema": schema | {"additionalProperties": False}}}
    function = {"name": "moods", "parameters": schema, "strict": True}
    call = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    for asked in ({"response_format": form}, call):
        found = await client.chat.completions.with_raw_response.create(
            model="fake", messages=USER, max_tokens=4, stream=stream, **asked
        )
        assert found.headers["x-wicore-schema-left-out"] == "uniqueItems"
    schema = Answer.model_json_schema()
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    kept = await client.chat.completions.with_raw_response.create(
        model="fake", messages=USER, max_tokens=4, response_format=form
    )
    assert "x-wicore-schema-left-out" not in kept.headers


async def test_streams_and_completions_are_constrained(client):
    schema = Answer.model_json_schema()
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": False}}
    stream = await client.chat.completions.create(
        model="fake", messages=USER, response_format=form, max_tokens=500, seed=4, n=2, stream=True
    )
    texts = {0: "", 1: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    for text in texts.values():
        Answer.model_validate_json(text)
    done = await client.completions.create(
        model="fake", prompt=["a", "b"], seed=4, max_tokens=500, extra_body={"response_format": form}
    )
    for choice in done.choices:
        Answer.model_validate_json(choice.text)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_grammar": 'start: "<" /[a-c]+/ ">"'}, "<[a-c]+>"),
        ({"guided_json": '{"enum": [12]}'}, "12"),
        ({"guided_json": {"enum": [12]}}, "12"),
        ({"structured_outputs": {"regex": "x[yz]"}}, "x[yz]"),
        ({"structured_outputs": {"choice": ["ü", "b"]}}, "b"),
        ({"structured_outputs": {"json": {"const": "k"}, "regex": None}}, '"k"'),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, "a"),
    ],
)
async def test_other_ways_to_ask(running, fields, pattern):
    for seed in range(3):
        answer = await running.chat(max_tokens=400, temperature=1, seed=seed, ignore_eos=False, **fields)
        [choice] = answer.json()["choices"]
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["message"]["content"]), choice


async def test_any_object(running):
    asked = {"response_format": {"type": "json_object"}, "max_tokens": 900, "temperature": 0.3}
    texts = [(await running.chat(seed=seed, **asked)).json()["choices"][0] for seed in range(6)]
    ended = [json.loads(c["message"]["content"]) for c in texts if c["finish_reason"] == "stop"]
    assert ended and all(isinstance(found, dict) for found in ended)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "response_format",
         "Invalid type: foo"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be a JSON schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"response_format": {}}, "response_format", "type is"),
        ({"response_format": []}, "response_format", ""),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": ""}, "guided_regex", "needs a text"),
        ({"guided_json": "{"}, "guided_json", "EOF"),
        ({"guided_choice": []}, "guided_choice", "list of texts"),
        ({"guided_grammar": "start: y"}, "guided_grammar", "unknown name"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag", "structural_tag"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs", "is a text"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "exclude"),
        ({"guided_regex": "a" * (1 << 18)}, "guided_regex", "at most 131072"),
        ({"structural_tag": "x"}, "structural_tag", "not supported"),
    ],
)  # fmt: skip
async def test_what_cannot_be_kept_is_400_with_the_field(running, fields, param, said):
    for answer in (await running.chat(**fields), await running.completion(**fields)):
        assert answer.status_code == 400 and error_of(answer)["param"] == param
        assert said in error_of(answer)["message"]


async def test_one_shot_inference_takes_none(running):
    answer = await running.post("/v1/inference", {"prompt": "hello", "guided_regex": "a"})
    assert answer.status_code == 400 and error_of(answer)["param"] == "guided_regex"
