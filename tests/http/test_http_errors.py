"""Every error has one shape: statuses, fields that are refused, ignored or misspelled, bodies that are none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from web import MAX_CONTEXT, TOKENIZER, error_of, make_engine, serving

from wicore_trt.errors import (
    AuthenticationError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineFormatError,
    EnvironmentUnfitError,
    InvalidRequestError,
    NotFoundError,
    QueueFullError,
    RateLimitError,
    RequestCancelledError,
    UnavailableError,
    WicoreError,
)  # fmt: skip
from wicore_trt.http import intake
from wicore_trt.http.bodies import EVERY_FIELD, ChatBody, CompletionBody, read_fields
from wicore_trt.http.errors import STATUSES, error_headers, error_object, status_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
JSON = {"content-type": "application/json"}
SAMPLES = [None, True, 2, 0.25, "x", ["x"], {"x": 1}]


def refused() -> list[tuple[str, object]]:
    """Every refused field with values that ask for something."""
    return [
        (name, value)
        for name, neutral in intake.REFUSED.items()
        for value in SAMPLES[1:]
        if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)
    ]


async def test_every_refused_field_is_named(running):
    assert len(intake.REFUSED) > 40 and not intake.REFUSED.keys() & EVERY_FIELD
    seen = set()
    for name, value in refused():
        if name in seen:
            continue
        seen.add(name)
        for ask in (running.chat, running.completion):
            found = await ask(**{name: value})
            assert found.status_code == 400, (name, value, found.text)
            assert error_of(found)["param"] == name
    assert seen == set(intake.REFUSED)


async def test_values_that_ask_for_nothing_are_taken(running):
    body = {name: neutral[0] for name, neutral in intake.REFUSED.items() if neutral}
    assert len(body) > 20
    assert (await running.chat(**body)).status_code == 200
    assert (await running.completion(**dict.fromkeys(intake.REFUSED))).status_code == 200


async def test_other_servers_fields_that_change_answers_are_named(running):
    for name, value in {"n_predict": 3, "n_probs": 2, "top_n_sigma": 1.0, "typ_p": 0.5, "input_ids": [2],
                        "stop_regex": "e+", "num_beams": 4, "lora": [{"id": 0, "scale": 1.0}]}.items():  # fmt: skip
        for ask in (running.chat, running.completion):
            found = await ask(**{name: value})
            assert found.status_code == 400 and error_of(found)["param"] == name


async def test_harmless_fields_and_unknown_ones_are_taken(running):
    body = dict.fromkeys(intake.HARMLESS, "x") | {"my_own_field": {"a": [1]}, "x-trace": 5}
    assert {"metadata"} == intake.HARMLESS & EVERY_FIELD, "which one route gives back"
    assert not intake.HARMLESS & intake.REFUSED.keys()
    for ask in (running.chat, running.completion):
        assert (await ask(**body)).status_code == 200


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("top-p", "top_p"),
        ("topP", "top_p"),
        ("stops", "stop"),
    ],
)
async def test_misspelled_fields_are_named(running, given, meant):
    found = await running.chat(**{given: 1})
    assert found.status_code == 400 and error_of(found)["param"] == given
    assert f"Did you mean {meant}?" in error_of(found)["message"]


async def test_read_fields_other_routes_are_refused(running):
    found = await running.chat(echo=True)
    assert found.status_code == 400 and error_of(found)["param"] == "echo"
    assert (await running.chat(echo=False)).status_code == 200
    found = await running.completion(top_logprobs=2)
    assert found.status_code == 400 and error_of(found)["param"] == "top_logprobs"
    assert (await running.chat(top_logprobs=0)).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": 1e-7}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 33}, "n"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"9" * 10: 1}}, "logit_bias"),
        ({"seed": 1 << 64}, "seed"),
        ({"priority": 3}, "priority"),
        ({"timeout": 0}, "timeout"),
        ({"cache": {"ttl": 3}}, "cache.ttl"),
        ({"cache": {"ttl_s": -1}}, "cache.ttl_s"),
        ({"cache": {"priority": "urgent"}}, "cache.priority"),
        ({"cache": {"priority": ""}}, "cache.priority"),
        ({"cache": {"store": ""}}, "cache.store"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"stream_options": 5}, "stream_options"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": [96, 97]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
async def test_bad_values_are_named(running, body, param):
    found = await running.completion(**body)
    assert found.status_code == 400, found.text
    error = error_of(found)
    assert error["param"] == param and error["type"] == "invalid_request_error" and len(error["message"]) < 300


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"role": "tool", "content": "x"}], "messages"),
        ([{"role": "user"}], "messages"),
        ([{"role": {}, "content": "x"}], "messages"),
        ([{"role": "user", "content": [{"type": {}, "text": "x"}]}], "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages"),
        ([{"role": "user", "content": [["text"]]}], "messages"),
        ([["user", "x"]], "messages[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages"),
    ],
)
async def test_bad_messages_are_named(running, messages, param):
    found = await running.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    assert found.status_code == 400 and error_of(found)["param"] == param, found.text


async def test_a_prompt_that_is_not_there_is_missing_and_no_wrong_type(running):
    for path, body, said in (
        ("/v1/completions", {}, "prompt is missing."),
        ("/v1/completions", {"prompt": {}}, "prompt must be a text, "),
        ("/v1/responses", {}, "input is missing."),
    ):
        found = await running.post(path, body)
        assert found.status_code == 400 and error_of(found)["message"].startswith(said), found.text


async def test_top_logprobs_need_logprobs(running):
    found = await running.chat(top_logprobs=2)
    assert found.status_code == 400 and error_of(found)["param"] == "top_logprobs"
    assert (await running.chat(top_logprobs=0)).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff", b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "a", "seed": NaN}', b'{"prompt": "a", "timeout": Infinity}',
        b'{"prompt": "a", "timeout": 1e999}', b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", b"\0" * 100,
        b'{"a": ' + b"[" * 20_000, b'{"a": ' * 20_000, b"[" * 1_000_000, b'{"a": [' + b"[]," * 60_000 + b"[]]}",
        b'{"a":"' + b'\\",' * 500_000, b'{"a":' + b'",' * 500_000, b'{"a":"\\' + b"," * 60_000 + b"\\",
        b'{"a": ["' + b'ab","' * 300_000 + b'"]}', json.dumps({f"field {i}": 1 for i in range(200)}).encode(),
        '{"prompt": "a"}'.encode("utf-16"), b"\xef\xbb\xbf" + b'{"prompt": "a"}', b'{"prompt": "a"} x',
    ],
)  # fmt: skip
async def test_bodies_that_are_no_json_object(running, raw):
    found = await running.client.post("/v1/completions", content=raw, headers=JSON)
    assert found.status_code == 400 and error_of(found)["param"] in (None, "prompt"), found.text


async def test_commas_of_a_text_are_no_items(running):
    found = await running.completion(metadata=["[,{" * 100_000 + '"\\'] * 3)
    assert found.status_code == 200, found.text


async def test_depth_that_is_no_fault_of_the_parser(running):
    """Inside of an ignored field, a served one and a message."""
    deep = json.loads("[" * 400 + "]" * 400)
    assert (await running.completion(metadata=deep)).status_code == 200
    for body in ({"stop": deep}, {"cache": deep}, {"logit_bias": {"1": deep}}, {"prompt": deep}):
        assert (await running.completion(**body)).status_code == 400
    found = await running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": deep}]})
    assert found.status_code == 400


async def test_routes_and_methods_that_are_not_there(running):
    found = await running.client.get("/v2/models")
    assert found.status_code == 404 and "/v2/models. /openapi.json lists" in error_of(found)["message"]
    found = await running.client.get("/v1/completions")
    assert found.status_code == 405 and found.headers["allow"] == "POST"
    assert error_of(found)["message"] == "GET is not allowed here. Use POST."
    found = await running.client.request("DELETE", "/v1/models")
    assert found.status_code == 405 and error_of(found)
    assert (await running.client.get("/v1/completions/")).status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {},
        {**JSON, "content-encoding": "gzip"},
    ],
)
async def test_only_plain_json_is_read(running, headers):
    found = await running.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert found.status_code == 415 and error_of(found)["type"] == "invalid_request_error"


async def test_json_under_its_other_names(running):
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/problem+json"):
        raw = b'{"prompt": "a", "max_tokens": 1}'
        found = await running.client.post("/v1/completions", content=raw, headers={"content-type": kind})
        assert found.status_code == 200


async def test_request_ids_are_echoed(running):
    for path in ("/health", "/nope", "/v1/models"):
        found = await running.client.get(path, headers={"x-request-id": "mine-1"})
        assert found.headers["x-request-id"] == "mine-1"
    for bad in ("a b", "x" * 129, "\x7f"):
        found = await running.client.get("/health", headers={"x-request-id": bad})
        assert found.headers["x-request-id"] not in ("", bad)


async def test_every_error_has_a_status():
    def subclasses(cls):
        return {cls, *(s for sub in cls.__subclasses__() for s in subclasses(sub))}

    assert {cls.grpc_code for cls in subclasses(WicoreError)} - {"ALREADY_EXISTS"} <= set(STATUSES)
    expected = {
        InvalidRequestError("x", field="f"): 400, AuthenticationError("x"): 401, NotFoundError("x"): 404,
        QueueFullError("x"): 429, RateLimitError("x"): 429, RequestCancelledError("x"): 499, WicoreError("x"): 500,
        CheckpointError("x"): 500, EngineFormatError("x"): 500, EnvironmentUnfitError("x"): 500,
        EngineDeadError("x"): 503, UnavailableError("x"): 503, DeadlineError("x"): 504, ConfigError("x"): 400,
    }  # fmt: skip
    assert {error: status_of(error) for error in expected} == expected
    assert error_object(RateLimitError("x"))["error"]["code"] == "rate_limit_exceeded"
    assert error_object(AuthenticationError("x"))["error"]["code"] == "invalid_api_key"
    assert len(error_object(WicoreError("x" * 9999))["error"]["message"]) <= 512


@pytest.mark.parametrize("kind", ["text", "ids", "long text"])
async def test_a_prompt_beyond_the_context_is_told_in_the_words_that_clients_look_for(running, kind):
    """LiteLLM, dspy and pydantic-ai look for the code or "maximum context length", Claude Code for the two numbers."""
    text = "x" * (MAX_CONTEXT if kind != "long text" else 3 * MAX_CONTEXT)
    prompt = TOKENIZER.encode(text) if kind == "ids" else text
    turns = [{"role": "user", "content": text}]
    asked = {
        "/v1/completions": ({"prompt": prompt}, "prompt"),
        "/v1/chat/completions": ({"messages": turns}, "messages"),
        "/v1/responses": ({"input": text}, "input"),
        "/v1/messages": ({"messages": turns, "max_tokens": 3}, "messages"),
    }
    for path, (body, param) in asked.items():
        found = await running.post(path, body)
        error = error_of(found)
        assert found.status_code == 400 and error["param"] == param, found.text
        if path == "/v1/messages":
            assert error["message"] == f"prompt is too long: {len(text)} tokens > {MAX_CONTEXT - 1} maximum"
        else:
            assert error["code"] == "context_length_exceeded"
            assert f"maximum context length is {MAX_CONTEXT} tokens" in error["message"]
    counted = await running.post("/v1/messages/count_tokens", {"messages": turns})
    assert counted.json() == {"input_tokens": len(text)}, "who asks is about to shorten it"


async def test_the_hint_names_the_limit_that_is_the_cause():
    for built, said in ((MAX_CONTEXT, "an engine that was built for more"), (2 * MAX_CONTEXT, "larger --max-context")):
        engine = make_engine()
        engine.info = replace(engine.info, engine_context_tokens=built)
        async with serving(engine) as running:
            assert said in error_of(await running.completion(prompt="x" * MAX_CONTEXT))["message"]


async def test_when_to_come_back():
    headers = dict(error_headers(QueueFullError("x", retry_after_s=0.2)))
    assert headers == {b"retry-after": b"1", b"retry-after-ms": b"200"}
    assert dict(error_headers(QueueFullError("x", retry_after_s=61.5)))[b"retry-after"] == b"62"
    assert dict(error_headers(UnavailableError("x")))[b"retry-after"] == b"1"


async def test_the_seam_for_new_fields_is_the_models():
    """A field that a model gets is served: nothing else has to be changed but the list of refused ones."""
    for model in (ChatBody, CompletionBody):
        found = read_fields(model)
        assert found.served.keys() == set(model.model_fields) and not found.served.keys() & found.elsewhere
