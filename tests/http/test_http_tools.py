"""Tools through OpenAI's client: calls, streams of calls, choices, turns that bring results."""

from __future__ import annotations

import json

import pytest
import websockets
from constrained_web import PAINT, make_constrained_engine
from web import error_of

from wicore_trt.text.turns import render_turns

pytestmark = pytest.mark.asyncio(loop_scope="module")
make_one = make_constrained_engine
USER = [{"role": "user", "content": "hello"}]
TOOLS = [
    {"type": "function", "function": {"name": "paint", "description": "Paint.", "parameters": PAINT, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
BRACE = {str(ord("{") - 32): 100}
"""Makes the model open a call, and nothing else where nothing else begins so."""


def asking(**more) -> dict:
    return {"model": "fake", "messages": USER, "max_tokens": 400, "tools": TOOLS, **more}


def check_paint(call) -> None:
    arguments = json.loads(call.function.arguments)
    assert call.type == "function" and call.id.startswith("call_") and call.function.name == "paint"
    assert arguments["color"] in ("red", "blue") and 1 <= arguments["size"] <= 9


async def test_a_named_function_is_called(client):
    choice = {"type": "function", "function": {"name": "paint"}}
    for seed in range(2):
        found = await client.chat.completions.create(
            **asking(tool_choice=choice, seed=seed, parallel_tool_calls=False, n=2)
        )
        for answer in found.choices:
            assert answer.finish_reason == "tool_calls" and answer.message.content is None
            [call] = answer.message.tool_calls
            check_paint(call)
        ids = [c.message.tool_calls[0].id for c in found.choices]
        assert len(set(ids)) == 2


async def test_calls_are_streamed_in_parts(client):
    choice = {"type": "function", "function": {"name": "paint"}}
    for seed in range(2):
        calls, reasons, role = {}, [], []
        stream = await client.chat.completions.create(**asking(tool_choice=choice, seed=seed, stream=True))
        async for chunk in stream:
            [answer] = chunk.choices
            role += [answer.delta.role] if answer.delta.role else []
            reasons += [answer.finish_reason] if answer.finish_reason else []
            assert not answer.delta.content
            for part in answer.delta.tool_calls or ():
                call = calls.setdefault(part.index, {"ids": [], "name": "", "arguments": []})
                call["ids"] += [part.id] if part.id else []
                call["name"] += part.function.name or ""
                call["arguments"].append(part.function.arguments or "")
        assert role == ["assistant"] and reasons == ["tool_calls"] and calls
        for call in calls.values():
            assert len(call["ids"]) == 1 and call["name"] == "paint" and len(call["arguments"]) > 3
            assert json.loads("".join(call["arguments"]))["color"] in ("red", "blue")


async def test_streaming_helper_of_the_client_agrees(client):
    fields = asking(tool_choice={"type": "function", "function": {"name": "paint"}}, parallel_tool_calls=False)
    async with client.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    check_paint(final.choices[0].message.tool_calls[0])


async def test_calls_come_over_the_websocket(running):
    choice = {"type": "function", "function": {"name": "paint"}}
    asked = {"messages": USER, "tools": TOOLS, "tool_choice": choice, "max_tokens": 400, "seed": 1}
    async with websockets.connect(running.url.replace("http", "ws", 1) + "/v1/stream") as connection:
        await connection.send(json.dumps({"type": "generate", "id": "a", "parallel_tool_calls": False, **asked}))
        frames = [json.loads(await connection.recv())]
        while frames[-1]["type"] == "delta":
            frames.append(json.loads(await connection.recv()))
    *deltas, done = frames
    parts = [part for frame in deltas for part in frame.get("tool_calls", ())]
    assert done["type"] == "done" and deltas[-1]["finish_reason"] == "tool_calls"
    assert parts[0]["id"].startswith("call_") and parts[0]["function"]["name"] == "paint"
    assert json.loads("".join(part["function"]["arguments"] for part in parts))["color"] in ("red", "blue")
    assert not any(frame["text"] for frame in deltas)


async def test_required_calls_something(client):
    for seed in range(2):
        found = await client.chat.completions.create(**asking(tool_choice="required", seed=seed))
        [answer] = found.choices
        assert answer.message.tool_calls and {c.function.name for c in answer.message.tool_calls} <= {"paint", "stop"}
        if answer.finish_reason == "tool_calls":
            for call in answer.message.tool_calls:
                json.loads(call.function.arguments)


async def test_auto_calls_or_says(client):
    found = await client.chat.completions.create(**asking(seed=1, max_tokens=20, logit_bias={"40": 50}))
    [answer] = found.choices
    assert answer.message.content and not answer.message.tool_calls and answer.finish_reason in ("stop", "length")
    paint = TOOLS[:1]
    found = await client.chat.completions.create(**asking(tools=paint, seed=1, logit_bias=BRACE))
    [answer] = found.choices
    assert answer.finish_reason == "tool_calls"
    check_paint(answer.message.tool_calls[0])


async def test_none_leaves_tools_out(client, running):
    plain = await client.chat.completions.create(model="fake", messages=USER, max_tokens=9, temperature=0)
    found = await client.chat.completions.create(**asking(tool_choice="none", max_tokens=9, temperature=0))
    assert found.choices[0].message.content == plain.choices[0].message.content
    assert found.usage.prompt_tokens == plain.usage.prompt_tokens


async def test_results_and_neighbours_are_taken(client):
    call = {"id": "call_7", "type": "function", "function": {"name": "paint", "arguments": '{"color":"red","size":1}'}}
    turns = [
        {"role": "system", "content": "S"},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_7", "content": "done"},
        {"role": "user", "content": "and?"},
    ]
    found = await client.chat.completions.create(model="fake", messages=turns, max_tokens=3)
    assert found.usage.prompt_tokens == len(render_turns(turns, (), add_generation_prompt=True))
    with_tools = await client.chat.completions.create(**asking(messages=turns, max_tokens=3))
    assert with_tools.usage.prompt_tokens > found.usage.prompt_tokens + 100


async def test_usage_and_logprobs_go_with_calls(client):
    choice = {"type": "function", "function": {"name": "stop"}}
    found = await client.chat.completions.create(
        **asking(tool_choice=choice, logprobs=True, top_logprobs=2, max_tokens=60, seed=2)
    )
    entries = found.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries).startswith("{") or entries[0].token == "["
    stream = await client.chat.completions.create(
        **asking(tool_choice=choice, max_tokens=60, seed=2, stream=True, stream_options={"include_usage": True})
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens == found.usage.completion_tokens and chunks[-1].choices == []


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]", "of type function"),
        ({"tools": [{"type": "mcp", "function": {"name": "a"}}]}, "tools[0]", "of type function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]", "letters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools[0]",
         "schema of an object"),
        ({"tools": TOOLS[:1] * 2}, "tools", "twice"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools", "at most 128"),
        ({"tools": TOOLS, "tool_choice": "paint"}, "tool_choice", "required or a function"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "Beside tools"),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "Beside tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"required": 3}}}]}, "tools",
         "required"),
        ({"functions": [{"name": "a"}]}, "functions", "not supported"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_400_with_the_field(running, fields, param, said):
    answer = await running.chat(**fields)
    assert answer.status_code == 400 and error_of(answer)["param"] == param
    assert said in error_of(answer)["message"]


async def test_a_call_that_is_cut_off_says_so(running):
    choice = {"type": "function", "function": {"name": "paint"}}
    answer = await running.chat(tools=TOOLS, tool_choice=choice, max_tokens=45, temperature=1, seed=1)
    [found] = answer.json()["choices"]
    assert found["finish_reason"] == "length" and found["message"]["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_a_stop_string_cuts_is_not_whole(client, stream):
    choice = {"type": "function", "function": {"name": "paint"}}
    found = await client.chat.completions.create(**asking(tool_choice=choice, stop=["size"], seed=3, stream=stream))
    reasons = [c.choices[0].finish_reason async for c in found] if stream else [found.choices[0].finish_reason]
    assert [reason for reason in reasons if reason] == ["stop"]


async def test_a_call_that_is_cut_before_its_arguments_is_no_text(running):
    """The head of a call is not what the model says: nobody shows it to a user."""
    function = {"name": "paint", "parameters": PAINT}
    said = {"messages": USER, "temperature": 1, "seed": 1}
    chat = {**said, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    plain = {"input": "hello", "tools": [{"type": "function", **function}], "tool_choice": "required", "seed": 1}
    tool = {"name": "paint", "input_schema": PAINT}
    for count in (1, 12, 25):
        [choice] = (await running.post("/v1/chat/completions", {**chat, "max_tokens": count})).json()["choices"]
        assert choice["finish_reason"] == "length" and not choice["message"]["content"], choice
        told = await running.post("/v1/chat/completions", {**chat, "max_tokens": count, "stream": True})
        assert "paint" not in told.text and "name" not in told.text
        found = (await running.post("/v1/responses", {**plain, "max_output_tokens": count})).json()
        assert found["status"] == "incomplete" and "name" not in json.dumps(found["output"])
        body = {**said, "tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": count}
        found = (await running.post("/v1/messages", body)).json()
        assert found["stop_reason"] == "max_tokens" and not any(block["text"] for block in found["content"])
