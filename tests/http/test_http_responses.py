"""The Responses API through OpenAI's client: answers, events, calls, schemas, what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import pytest
from constrained_web import PAINT, make_constrained_engine
from lazy import LazyModule
from pydantic import BaseModel
from web import error_of, make_engine, serving

from wicore_trt.text.turns import render_turns

openai = LazyModule("openai")

pytestmark = pytest.mark.asyncio(loop_scope="module")
make_one = make_constrained_engine
TOOLS = [
    {"type": "function", "name": "paint", "description": "Paint.", "parameters": PAINT, "strict": True},
    {"type": "function", "name": "stop", "parameters": {"type": "object"}, "strict": False},
]
PAINTING = {"type": "function", "name": "paint"}
LIST = {str(ord("[") - 32): 100, str(ord(",") - 32): 2}
"""Makes the model open a list of calls, and go on with it as often as not."""
QUIET = {"temperature": 0, "extra_body": {"ignore_eos": True}}


class Wall(BaseModel):
    color: Literal["red", "blue"]
    wet: bool


async def chat_text(running, messages, count: int) -> str:
    body = {"messages": messages, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return (await running.post("/v1/chat/completions", body)).json()["choices"][0]["message"]["content"]


async def test_a_text_is_answered_as_by_chat(client, running):
    found = await client.responses.create(
        model="fake", input="hello", instructions="be kind", max_output_tokens=9, metadata={"a": "b"}, **QUIET
    )
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert found.output_text == await chat_text(running, turns, 9)
    assert found.object == "response" and found.id.startswith("resp_") and found.model == "fake" and not found.error
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (12, 9, 21)
    assert found.metadata == {"a": "b"} and found.instructions == "be kind" and found.tool_choice == "auto"
    [item] = found.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")


async def test_the_synchronous_client_is_served_too(running):
    def ask():
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            whole = client.responses.create(model="fake", input="hello", max_output_tokens=9, **QUIET)
            stream = client.responses.create(model="fake", input="hello", max_output_tokens=9, stream=True, **QUIET)
            return whole.output_text, "".join(e.delta for e in stream if e.type == "response.output_text.delta")

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed and len(whole) == 9


async def test_items_become_turns(client, running):
    items = [
        {"role": "developer", "content": "S"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": "b"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "call_id": "x1", "name": "paint", "arguments": '{"size": 1}'},
        {"type": "function_call", "call_id": "x2", "name": "stop", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "x1", "output": "wet"},
        {"type": "function_call_output", "call_id": "x2", "output": [{"type": "input_text", "text": "dry"}]},
        {"role": "user", "content": "d"},
    ]  # fmt: skip
    calls = [
        {"id": name, "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in (("x1", "paint", '{"size": 1}'), ("x2", "stop", "{}"))
    ]
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "x1", "content": "wet"},
        {"role": "tool", "tool_call_id": "x2", "content": "dry"},
        {"role": "user", "content": "d"},
    ]
    found = await client.responses.create(model="fake", input=items, max_output_tokens=5, store=False, **QUIET)
    assert found.usage.input_tokens == len(render_turns(turns, (), add_generation_prompt=True))
    assert found.output_text == await chat_text(running, turns, 5)


async def test_events_of_a_text(client):
    stream = await client.responses.create(
        model="fake", input="hello", max_output_tokens=20, stream=True, top_logprobs=2,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"], **QUIET,
    )  # fmt: skip
    events = [event async for event in stream]
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events))) and deltas
    text = "".join(event.delta for event in deltas)
    done, part, item, last = events[-4:]
    assert text == done.text == part.part.text == item.item.content[0].text == last.response.output_text
    assert len({e.item_id for e in deltas} | {item.item.id, last.response.output[0].id}) == 1
    assert len({e.response.id for e in (events[0], events[1], last)}) == 1
    assert events[0].response.output == [] and events[0].response.usage is None and last.response.usage.output_tokens
    tokens = [entry for event in deltas for entry in event.logprobs]
    assert "".join(entry.token for entry in tokens) == text and all(len(e.top_logprobs) == 2 for e in tokens)
    assert [entry.token for entry in part.part.logprobs] == [entry.token for entry in tokens]


async def test_calls_are_items(client):
    for seed in range(3):
        extra = {"extra_body": {"seed": seed}}
        found = await client.responses.create(
            model="fake", input="hello", tools=TOOLS, tool_choice=PAINTING, parallel_tool_calls=False, **extra
        )
        assert found.status == "completed"
        [call] = found.output
        assert (call.type, call.name, call.status) == ("function_call", "paint", "completed")
        assert call.call_id.startswith("call_") and json.loads(call.arguments)["color"] in ("red", "blue")


async def test_events_of_calls(client):
    several = 0
    for seed in (0, 5):  # of several calls, and of one
        stream = await client.responses.create(
            model="fake",
            input="hello",
            tools=TOOLS,
            tool_choice=PAINTING,
            stream=True,
            extra_body={"seed": seed, "logit_bias": LIST},
        )
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        output = events[-1].response.output
        several += len(output) > 1
        for i, item in enumerate(output):
            own = [e for e in events[2:-1] if e.output_index == i]
            assert own[0].type == "response.output_item.added" and own[0].item.arguments == ""
            parts = [e.delta for e in own if e.type == "response.function_call_arguments.delta"]
            assert own[-2].type == "response.function_call_arguments.done" and own[-1].item == item
            assert "".join(parts) == own[-2].arguments == item.arguments
            assert own[0].item.call_id == item.call_id and own[0].item.id == item.id
    assert several, "some answer has several calls"


async def test_a_call_that_is_cut_off_says_so(client):
    found = await client.responses.create(
        model="fake", input="hello", tools=TOOLS, tool_choice=PAINTING, max_output_tokens=45, extra_body={"seed": 1}
    )
    assert found.status == "incomplete" and found.output[-1].status == "incomplete"


async def test_streaming_helper_and_schemas_of_the_client(client):
    parsed = await client.responses.parse(model="fake", input="hello", text_format=Wall, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Wall)
    async with client.responses.stream(model="fake", input="hello", text_format=Wall) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert isinstance(final.output_parsed, Wall) and final.status == "completed"
    anything = await client.responses.create(
        model="fake", input="hello", text={"format": {"type": "json_object"}, "verbosity": "low"},
        max_output_tokens=300, extra_body={"seed": 3},
    )  # fmt: skip
    assert anything.output_text.startswith("{")


async def test_what_changes_nothing_is_taken(running):
    harmless = {
        "store": True, "user": "me", "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s",
        "reasoning": {"effort": "low"}, "truncation": "auto", "background": False, "previous_response_id": None,
        "stream_options": None, "max_tool_calls": 3, "include": ["reasoning.encrypted_content"], "tools": [],
    }  # fmt: skip
    found = await running.post("/v1/responses", {"input": "hello", "max_output_tokens": 3, **harmless})
    assert found.status_code == 200, found.text
    assert found.json()["store"] is False, "nothing is kept"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ""}, "input"),
        ({"input": "x" * 2000}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "y", "arguments": "{"}]}, "input"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": 5}}, "text.format"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": TOOLS, "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"instruction": "x"}, "instruction"),
    ],
)
async def test_what_cannot_be_is_400_with_the_field(running, fields, param):
    found = await running.post("/v1/responses", {"input": "hello", "max_output_tokens": 3, **fields})
    assert found.status_code == 400 and error_of(found)["param"] == param, found.text


async def test_a_stream_that_breaks_has_failed():
    engine = make_engine()
    async with serving(engine) as running:
        engine.engine._loop._core.executor.fail_at = 6
        body = {"input": "hello", "stream": True, "temperature": 0, "ignore_eos": True}
        found = await running.post("/v1/responses", body)
    *_, last, rest = found.text.split("\n\n")
    kind, data = last.split("\n")
    told = json.loads(data.removeprefix("data: "))
    assert found.status_code == 200 and rest == "" and kind == "event: response.failed"
    assert told["response"]["status"] == "failed" and told["response"]["error"]["code"] == "server_error"
    assert "device lost" in told["response"]["error"]["message"]
    assert told["sequence_number"] == found.text.count("event: ") - 1
