"""The Messages API through Anthropic's client: answers, events, tools, errors, counts."""

from __future__ import annotations

import asyncio
import json

import pytest
from constrained_web import PAINT, make_constrained_engine
from fakes import greedy
from lazy import LazyModule
from web import TOKENIZER, error_of, make_engine, serving

from wicore_trt.text.turns import render_turns

anthropic = LazyModule("anthropic")

pytestmark = pytest.mark.asyncio(loop_scope="module")
make_one = make_constrained_engine
TOOLS = [
    {"name": "paint", "description": "Paint.", "input_schema": PAINT, "strict": True},
    {"name": "stop", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]
PAINTING = {"type": "tool", "name": "paint", "disable_parallel_tool_use": True}
USER = [{"role": "user", "content": "hello"}]
ASKED = {"model": "fake", "messages": USER, "max_tokens": 300}
QUIET = {"extra_body": {"temperature": 0, "ignore_eos": True}}
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "c"},
            {"type": "tool_use", "id": "x1", "name": "paint", "input": {"size": 1}},
            {"type": "tool_use", "id": "x2", "name": "stop", "input": {}},
            {"type": "text", "text": "e"},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "x1", "content": "wet"},
            {"type": "tool_result", "tool_use_id": "x2", "is_error": True, "content": [{"type": "text", "text": "no"}]},
            {"type": "text", "text": "d"},
        ],
    },
]
RENDERED = [
    {"role": "system", "content": "S\n\nT"},
    {"role": "user", "content": "a\n\nb"},
    {
        "role": "assistant",
        "content": "c",
        "tool_calls": [
            {"id": "x1", "function": {"name": "paint", "arguments": {"size": 1}}},
            {"id": "x2", "function": {"name": "stop", "arguments": {}}},
        ],
    },
    {"role": "assistant", "content": "e"},
    {"role": "tool", "tool_call_id": "x1", "content": "wet"},
    {"role": "tool", "tool_call_id": "x2", "content": "Error: no"},
    {"role": "user", "content": "d"},
]


@pytest.fixture
def claude(running):
    plain = anthropic.DefaultAsyncHttpxClient(verify=False)  # as `client` of conftest.py
    return anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0, http_client=plain)


async def test_a_text_is_answered_as_by_chat(claude, running):
    found = await claude.messages.create(model="fake", system="be kind", messages=USER, max_tokens=9, **QUIET)
    turns = [{"role": "system", "content": "be kind"}, *USER]
    body = {"messages": turns, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    chat = (await running.post("/v1/chat/completions", body)).json()
    [block] = found.content
    assert (block.type, block.text) == ("text", chat["choices"][0]["message"]["content"])
    assert (found.type, found.role, found.model, found.stop_reason) == ("message", "assistant", "fake", "max_tokens")
    assert found.id.startswith("msg_") and found._request_id
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == 12 and found.usage.output_tokens == 9


async def test_cached_tokens_are_counted_apart(claude):
    turns = [{"role": "user", "content": "a prompt of several pages that nobody else sends"}]
    size = len(turns[0]["content"])
    for cached in (0, (size - 1) // 4 * 4):
        found = await claude.messages.create(model="fake", messages=turns, max_tokens=3, **QUIET)
        assert (found.usage.input_tokens, found.usage.cache_read_input_tokens) == (size - cached, cached)


async def test_the_synchronous_client_streams_too(running):
    def ask():
        with anthropic.Anthropic(base_url=running.url, api_key="none") as client:
            whole = client.messages.create(model="fake", messages=USER, max_tokens=12, **QUIET)
            with client.messages.stream(model="fake", messages=USER, max_tokens=12, **QUIET) as stream:
                text = "".join(stream.text_stream)
                final = stream.get_final_message()
        return whole, text, final

    whole, text, final = await asyncio.to_thread(ask)
    assert whole.content[0].text == text == final.content[0].text and len(text) == 12
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, 12)


async def test_events_of_a_text(running):
    body = {"messages": USER, "max_tokens": 9, "stream": True, "temperature": 0, "ignore_eos": True}
    found = await running.post("/v1/messages", body)
    assert found.headers["content-type"].startswith("text/event-stream")
    *events, rest = found.text.split("\n\n")
    told = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    assert [event.partition("\n")[0] for event in events] == [f"event: {each['type']}" for each in told] and rest == ""
    deltas = [each for each in told if each["type"] == "content_block_delta"]
    assert [each["type"] for each in told] == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * len(deltas), "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert deltas and all(each["delta"]["type"] == "text_delta" for each in deltas)
    start, end = told[0]["message"], told[-2]
    usage = start["usage"]  # a short answer may have ended by then, and tell what the cache had
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 5
    assert start["content"] == [] and start["stop_reason"] is None
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None} and end["usage"]["output_tokens"] == 9


async def test_blocks_become_turns(claude, running):
    system = [{"type": "text", "text": "S"}, {"type": "text", "text": "T"}]
    found = await claude.messages.create(model="fake", system=system, messages=TURNS, max_tokens=9, **QUIET)
    body = {"messages": RENDERED, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    chat = (await running.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
    assert found.content[0].text == chat["content"]
    size = len(render_turns(RENDERED, (), add_generation_prompt=True))
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == size
    counted = await claude.messages.count_tokens(model="fake", system=system, messages=TURNS)
    assert counted.input_tokens == size
    with_tools = await claude.messages.count_tokens(model="fake", system=system, messages=TURNS, tools=TOOLS)
    assert with_tools.input_tokens > size + 100


async def test_stop_sequences_are_told(claude):
    plain = await claude.messages.create(model="fake", messages=USER, max_tokens=30, **QUIET)
    text = plain.content[0].text
    found = await claude.messages.create(
        model="fake", messages=USER, max_tokens=30, stop_sequences=["\x7f\x7f", text[5:8]], **QUIET
    )
    assert found.content[0].text == text[: text.index(text[5:8])]
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", text[5:8])


async def test_a_turn_of_a_base_model_ends_in_streams_too():
    """Whose prompt is counted before the first event."""
    tokens = greedy(TOKENIZER.encode("hello"), 12)
    engine = make_engine()
    engine.tokenizer = type("Base", (type(TOKENIZER),), {"turn_end": tokens[6]})()
    async with serving(engine) as running:
        body = {"messages": USER, "max_tokens": 12, "temperature": 0}
        whole = (await running.post("/v1/messages", body)).json()
        streamed = (await running.post("/v1/messages", {**body, "stream": True})).text
    assert whole["stop_reason"] == "end_turn" and whole["usage"]["output_tokens"] <= 7
    assert '"stop_reason":"end_turn"' in streamed, "the turn ends before max_tokens"


async def test_tools_are_used(claude):
    for seed in range(3):
        found = await claude.messages.create(**ASKED, tools=TOOLS, tool_choice=PAINTING, extra_body={"seed": seed})
        [block] = found.content
        assert (found.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "paint")
        assert block.input["color"] in ("red", "blue") and block.id.startswith("toolu_")
    found = await claude.messages.create(**ASKED, tools=TOOLS[:1], tool_choice={"type": "any"}, extra_body={"seed": 1})
    assert {block.name for block in found.content} == {"paint"}
    found = await claude.messages.create(**{**ASKED, "max_tokens": 5}, tools=TOOLS, tool_choice={"type": "none"})
    assert found.content[0].type == "text"


async def test_tools_are_streamed(claude):
    lists = {str(ord("[") - 32): 100, str(ord(",") - 32): 2}
    several = 0
    for seed in range(2):
        async with claude.messages.stream(
            **{**ASKED, "max_tokens": 900}, tools=TOOLS, tool_choice={"type": "tool", "name": "paint"},
            extra_body={"seed": seed, "logit_bias": lists},
        ) as stream:  # fmt: skip
            events = [event async for event in stream]
            final = await stream.get_final_message()
        starts = [e for e in events if e.type == "content_block_start"]
        parts: dict[int, str] = {}
        for event in events:
            if event.type == "content_block_delta":
                parts[event.index] = parts.get(event.index, "") + event.delta.partial_json
        assert [start.content_block.input for start in starts] == [{}] * len(starts)
        assert final.stop_reason == "tool_use" and [json.loads(p) for p in parts.values()] == [
            block.input for block in final.content
        ]
        assert [start.content_block.id for start in starts] == [block.id for block in final.content]
        several += len(starts) > 1
    assert several, "some answer has several calls"


async def test_a_call_that_is_cut_off_is_none(claude):
    found = await claude.messages.create(
        **{**ASKED, "max_tokens": 45}, tools=TOOLS, tool_choice=PAINTING, extra_body={"seed": 1}
    )
    assert found.stop_reason == "max_tokens" and found.content == []


async def test_schemas_are_kept(claude):
    config = {"format": {"type": "json_schema", "schema": PAINT}}
    found = await claude.messages.create(**ASKED, output_config=config)
    assert found.stop_reason == "end_turn" and json.loads(found.content[0].text)["color"] in ("red", "blue")


async def test_errors_reach_the_client_as_its_own(claude, running):
    with pytest.raises(anthropic.BadRequestError) as caught:
        await claude.messages.create(**ASKED, extra_body={"temperature": -1})
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.body["error"]["param"] == "temperature" and caught.value.request_id
    assert caught.value.body["request_id"] == caught.value.request_id
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.messages.create(**{**ASKED, "model": "claude"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert "error" in (await running.post("/v1/completions", {})).json(), "others keep their shape"


async def test_the_key_may_be_in_its_own_header(tmp_path):
    async with serving(make_engine(), api_key="a" * 20) as running:
        async with anthropic.AsyncAnthropic(base_url=running.url, api_key="a" * 20, max_retries=0) as good:
            assert (await good.messages.create(**{**ASKED, "max_tokens": 3})).content
        async with anthropic.AsyncAnthropic(base_url=running.url, api_key="b" * 20, max_retries=0) as bad:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await bad.messages.create(**ASKED)
        assert caught.value.body["error"]["type"] == "authentication_error"


async def test_what_changes_nothing_is_taken(running):
    harmless = {
        "metadata": {"user_id": "me"}, "service_tier": "auto", "thinking": {"type": "disabled"}, "container": None,
        "context_management": {"edits": []}, "output_config": {"effort": "low"}, "mcp_servers": [], "tools": [],
    }  # fmt: skip
    body = {"messages": USER, "max_tokens": 3, "top_k": 5, **harmless}
    found = await running.client.post("/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
    assert found.status_code == 200, found.text


def turn(*blocks) -> list[dict]:
    return [{"role": "user", "content": list(blocks)}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [*USER, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": turn({"type": "image", "source": {}})}, "messages[0].content[0]"),
        ({"messages": turn({"type": "text"})}, "messages[0].content[0]"),
        ({"messages": turn("x")}, "messages[0].content[0]"),
        ({"messages": turn({"type": "tool_use", "id": "x", "name": "y", "input": {}})}, "messages[0].content[0]"),
        ({"messages": turn({"type": "tool_result", "tool_use_id": "x"})}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": ["x"]}, "stop"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": {}}}, "tool_choice"),
        ({"messages": turn({"type": {}})}, "messages[0].content[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": TOOLS, "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
         "output_config.format"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_400_with_the_field(running, fields, param):
    found = await running.post("/v1/messages", {"messages": USER, "max_tokens": 3, **fields})
    assert found.status_code == 400 and error_of(found)["param"] == param, found.text


async def test_a_stream_that_breaks_says_so():
    engine = make_engine()
    async with serving(engine) as running:
        engine.engine._loop._core.executor.fail_at = 6
        async with anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError, match="device lost") as caught:
                async with client.messages.stream(**ASKED, **QUIET) as stream:
                    async for _ in stream:
                        pass
        assert caught.value.body["error"]["type"] == "overloaded_error"
