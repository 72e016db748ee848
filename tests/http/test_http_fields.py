"""Every field of every route, those inside of fields too: honoured, known to change nothing, or refused by its path."""

from __future__ import annotations

import json
import random
import string

import pytest
from constrained_web import PAINT, make_constrained_engine
from web import GREEDY, error_of

from wicore_trt.http import bodies, intake
from wicore_trt.http.routes import ROUTES

pytestmark = pytest.mark.asyncio(loop_scope="module")
make_one = make_constrained_engine
FUNCTION = {"name": "paint", "description": "Paint.", "parameters": PAINT, "strict": True}
CALLED = {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": "{}"}}
WRAPPED = {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}
FORMAT = {"type": "json_schema", "schema": {"const": 1}}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGPg5GAHAAA2ABlutSoqAAAAAElFTkSuQmCC"
IMAGES = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "low"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
]
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "hello"}, *IMAGES]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": "done"},
]
COMMON = {**GREEDY, "cache": {"session": "s", "priority": "low", "ttl_s": 5.0}}
OPTIONS = {"include_usage": True, "continuous_usage_stats": False}
PLAIN = {"type": "function", **FUNCTION}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hello"}, IMAGES[1]]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "paint", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": [
        {"type": "text", "text": "no"}, IMAGES[1]]}]},
]  # fmt: skip
CLAUDE = {
    "messages": BLOCKS,
    "system": [{"type": "text", "text": "be"}],
    "tools": [{"type": "custom", "name": "paint", "description": "x", "input_schema": PAINT, "strict": True}],
    "tool_choice": {"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}, *IMAGES]},
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"type": "function_call", "call_id": "c1", "name": "paint", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}, *IMAGES]},
]
CHAT = {
    "messages": TURNS,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "paint"}},
}
WHOLE = {
    "/v1/chat/completions": [
        {**COMMON, **CHAT, "max_tokens": 1, "stream_options": OPTIONS, "stream": True},
        {"messages": TURNS, **COMMON, "max_tokens": 3, "response_format": WRAPPED},
        {"messages": TURNS, **COMMON, "max_tokens": 3, "response_format": {**FORMAT, "type": "json_object"}},
        *({"messages": TURNS, **COMMON, "max_tokens": 3, "structured_outputs": one} for one in (
            {"json": {"const": 1}}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": 'start: "a"'}, {"json_object": True},
        )),
    ],
    "/v1/completions": [
        {**COMMON, "prompt": "a", "max_tokens": 1, "stream_options": OPTIONS, "stream": True},
        {**COMMON, "prompt": "a", "max_tokens": 3, "response_format": WRAPPED},
        {**COMMON, "prompt": "a", "max_tokens": 3, "structured_outputs": {"regex": "b"}},
    ],
    "/v1/responses": [
        {**COMMON, "input": ITEMS, "tools": [PLAIN], "tool_choice": {"type": "function", "name": "paint"},
         "max_output_tokens": 2, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {**COMMON, "input": ITEMS, "max_output_tokens": 3, "text": {"format": FORMAT}},
    ],
    "/v1/messages": [
        {**COMMON, **CLAUDE, "max_tokens": 2},
        {**COMMON, "messages": BLOCKS, "max_tokens": 3, "output_config": {"format": FORMAT}},
        {**COMMON, "messages": BLOCKS, "max_tokens": 3, "output_format": FORMAT},
    ],
    "/v1/messages/count_tokens": [CLAUDE],
    "/v1/inference": [{**COMMON, "prompt": "a", "max_tokens": 3}],
    "/tokenize": [{"messages": TURNS}, {"messages": TURNS, "tools": CHAT["tools"], "tool_choice": CHAT["tool_choice"]}],
}  # fmt: skip
HINTS = {
    "strict",
    "is_error",
    "disable_parallel_tool_use",
    "session",
    "priority",
    "ttl_s",
    "include_usage",
    "include_obfuscation",
    "media_type",
}
"""Flags, of which a value that is none says nothing, and hints to the cache, which change no answer."""
SAID_TWICE = {
    "messages.tool_calls.type",
    *(
        f"{path}.source.type"
        for path in ("messages.content", "messages.content.content", "input.content", "input.output")
    ),
}
"""Fields that repeat what a field beside them says."""


WHOLE["/v1/responses/input_tokens"] = [{"input": ITEMS, "tools": [PLAIN]}]
ALSO = {"/v1/responses/input_tokens": WHOLE["/v1/responses"]}
"""Routes that take the bodies of another, of which they look at a part."""


def places(body: object, table: intake.FieldPath, above: str = ""):
    """(path, path without numbers, the object, its place in the table) of all objects that the table knows."""
    yield above, "".join(c for c in above if c not in "[]0123456789"), body, table
    for name, value in body.items():
        inside = table.served.get(name)
        if inside is None:
            continue
        path = f"{above}.{name}".lstrip(".")
        for i, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, dict):
                yield from places(item, inside, f"{path}[{i}]" if isinstance(value, list) else path)


def list_paths(table: intake.FieldPath, above: str = "") -> list[str]:
    """All paths that the table knows, without numbers."""
    inside = [(f"{above}.{name}".lstrip("."), one) for name, one in table.served.items() if one is not None]
    return [above, *(path for name, one in inside for path in list_paths(one, name))]


def cases():
    for operation in ROUTES:
        for number, body in enumerate(WHOLE.get(operation.path, ())):
            yield pytest.param(operation, body, id=f"{operation.path}-{number}")


async def answer(running, path: str, body: object) -> tuple[int, str]:
    found = await running.post(path, body)
    text = found.text
    for line in text.split("\n"):
        found_json = line.removeprefix("data: ")
        if found_json.startswith("{"):
            text = text.replace(line, json.dumps(steady(json.loads(found_json))))
    return found.status_code, text


def steady(value: object) -> object:
    """An answer without what differs from one to the next."""
    if isinstance(value, dict):
        gone = {"id", "created", "created_at", "call_id", "request_id", "latency_ms", "item_id"}
        gone |= {"prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens"}
        if value.get("object") == "response":  # which repeats what it was asked
            gone |= {"text", "tools", "tool_choice", "metadata"}
        if "cache_read_input_tokens" in value:
            value["input_tokens"] += value["cache_read_input_tokens"]
        return {k: steady(v) for k, v in value.items() if k not in gone}
    return [steady(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("operation", "body"), list(cases()))
async def test_what_is_known_of_each_place_holds(running, operation, body):
    before = await answer(running, operation.path, body)
    assert before[0] == 200, before
    rng, seen = random.Random(operation.path), 0
    first = body is WHOLE[operation.path][0]
    known = (
        set() if first else {p for _, p, _, _ in places(WHOLE[operation.path][0], bodies.read_fields(operation.body))}
    )
    changed = json.loads(json.dumps(body))  # no object in two places
    for path, pattern, found, table in places(changed, bodies.read_fields(operation.body)):
        dotted = f"{path}." if path else ""
        seen += 1
        if pattern and pattern in known:
            continue  # looked at in the first body of the route
        for name, neutral in table.refused.items():
            for value in (*neutral, None):
                found[name] = value
                assert await answer(running, operation.path, changed) == before, (path, name, value)
            found[name] = {"x": "y"}
            refused = await running.post(operation.path, changed)
            assert refused.status_code == 400 and error_of(refused)["param"] == dotted + name, refused.text
            del found[name]
            if not path:
                break  # those of the whole body are looked at in test_http_errors
        strange = "".join(rng.choices(string.ascii_lowercase, k=12))
        near = next(iter(table.served)) + "s"
        for name in (strange, near):
            found[name] = 5
            told = await running.post(operation.path, changed)
            if table.closed or (name == near and name not in table.elsewhere):
                assert told.status_code == 400 and error_of(told)["param"] == dotted + name, told.text
            else:
                assert await answer(running, operation.path, changed) == before, (path, name)
            del found[name]
        for name in list(found):
            if not path or name in HINTS or f"{pattern}.{name}" in SAID_TWICE or isinstance(found[name], (dict, list)):
                continue
            kept, found[name] = found[name], {"no": "such"}
            after = await answer(running, operation.path, changed)
            assert after[0] == 400 or after[1] != before[1], (f"{dotted}{name} is served and changes nothing", after)
            found[name] = kept
    assert changed == body and seen >= (2 if "cache" in body else 1)


async def test_every_place_of_the_table_is_in_a_body_above():
    for operation in ROUTES:
        if operation.body is None or operation.path == "/detokenize":
            continue
        fields = bodies.read_fields(operation.body)
        known = set(list_paths(fields))
        told = {
            pattern
            for body in ALSO.get(operation.path, WHOLE[operation.path])
            for _, pattern, _, _ in places(body, fields)
        }
        assert told == known, operation.path
    inside = {path for route in ROUTES if route.body for path in list_paths(bodies.read_fields(route.body))}
    assert set(intake.REFUSED_INSIDE) <= inside


async def test_unknown_names_without_number_are_refused():
    turns = [{"role": "user", "content": "x", f"unknown{i}": 1} for i in range(200)]
    with pytest.raises(intake.InvalidRequestError, match="unknown fields"):
        bodies.read_fields(bodies.ChatBody).check_object({"messages": turns}, "", set())
    known = {"messages": [{**turn, "timestamp": 1} for turn in turns[:100]]}
    bodies.read_fields(bodies.ChatBody).check_object(known, "", set())
