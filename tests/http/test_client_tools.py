"""Tools that are no functions: those that clients run are called so, those that others run are left out and told."""

from __future__ import annotations

import json
import logging
from functools import partial

import pytest
from constrained_web import PAINT, make_constrained_engine
from lazy import LazyModule
from web import error_of

from wicore_trt.http.bodies import ResponsesBody
from wicore_trt.http.responses import make_chat

openai = LazyModule("openai")

pytestmark = pytest.mark.asyncio(loop_scope="module")
make_one = partial(make_constrained_engine, 4096)
LEFT_OUT = "x-wicore-tools-left-out"
SOON = {
    "seed": 5,
    "temperature": 1,
    "logit_bias": {str(ord('"') - 32): 4, str(ord("]") - 32): 4, str(ord("}") - 32): 4},
}
"""Strings and lists end soon."""
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /[a-z]+/"}
CUSTOM = {"type": "custom", "name": "patch", "description": "Patch files.", "format": GRAMMAR}
FUNCTION = {"type": "function", "name": "paint", "parameters": PAINT}
GROUP = {
    "type": "namespace",
    "name": "house",
    "description": "A house.",
    "tools": [FUNCTION, {**CUSTOM, "format": None}],
}
ACTIONS = {
    "local_shell": ("local_shell_call", "action", {"type": "exec", "command": list, "env": {}}),
    "shell": ("shell_call", "action", {"commands": list}),
    "apply_patch": ("apply_patch_call", "operation", {"type": str, "path": str}),
}
HOSTED = [
    {"type": "web_search", "external_web_access": True},
    {"type": "web_search_preview", "search_context_size": "low"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "mcp", "server_label": "deepwiki", "server_url": "https://x.invalid", "require_approval": "never"},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
    {"type": "tool_search", "execution": "client"},
    {"type": "shell", "environment": {"type": "container_auto"}},
]
ANTHROPIC_HOSTED = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
]


@pytest.fixture
def claude(running):
    import anthropic  # two seconds, which a worker that runs none of this need not take

    return anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0)


async def forced(client: openai.AsyncOpenAI, tools: list, choice: dict) -> tuple[dict, list]:
    """The item of a call that must be made, and the events of the same call as a stream."""
    asked = {"model": "fake", "input": "hello", "tools": tools, "tool_choice": choice, "max_output_tokens": 500}
    asked |= {"parallel_tool_calls": False, "extra_body": SOON}
    found = await client.responses.create(**asked)
    assert found.status == "completed", found
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    [item], [streamed] = (response.to_dict(warnings=False)["output"] for response in (found, events[-1].response))
    done = next(event.item.to_dict() for event in events if event.type == "response.output_item.done")
    unlike = ("id", "call_id")
    assert done == streamed and {k: v for k, v in item.items() if k not in unlike} == {
        k: v for k, v in streamed.items() if k not in unlike
    }
    return streamed, events


async def test_a_tool_of_free_text_is_called_with_a_text(client):
    item, events = await forced(client, [FUNCTION, CUSTOM], {"type": "custom", "name": "patch"})
    assert (item["type"], item["name"], item["id"][:4]) == ("custom_tool_call", "patch", "ctc_")
    assert isinstance(item["input"], str)
    deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    [done] = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(event.delta for event in deltas) == done.input == item["input"] and done.item_id == item["id"]


async def test_the_model_is_told_the_grammar_of_free_text():
    [told], _ = (lambda chat, forms: (chat.tools, forms))(*make_chat(ResponsesBody(input="x", tools=[CUSTOM])))
    assert told["function"]["description"] == "Patch files.\n\n`input` follows this grammar (lark):\nstart: /[a-z]+/"


async def test_tools_of_a_group_are_called_by_their_own_names(client):
    choice = {"type": "function", "name": "paint", "namespace": "house"}
    item, _ = await forced(client, [FUNCTION, GROUP], choice)
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "house", "paint")
    assert set(json.loads(item["arguments"])) == {"color", "size"}
    item, _ = await forced(client, [FUNCTION, GROUP], {**choice, "type": "custom", "name": "patch"})
    assert (item["type"], item["namespace"], item["name"]) == ("custom_tool_call", "house", "patch")
    item, _ = await forced(client, [FUNCTION, GROUP], {"type": "function", "name": "paint"})
    assert item["name"] == "paint" and not item.get("namespace")


async def test_long_names_of_a_group_are_called_by_their_own_names(client):
    names = [f"{'x' * 60}_{end}" for end in "ab"]
    group = {"type": "namespace", "name": "mcp__server", "tools": [{**FUNCTION, "name": name} for name in names]}
    for name in names:
        item, _ = await forced(client, [group], {"type": "function", "name": name, "namespace": "mcp__server"})
        assert (item["namespace"], item["name"]) == ("mcp__server", name)


@pytest.mark.parametrize("kind", ACTIONS)
async def test_shells_and_editors_of_the_client_are_called_by_their_items(client, kind):
    item, _ = await forced(client, [FUNCTION, {"type": kind}], {"type": kind})
    name, key, values = ACTIONS[kind]
    assert item["type"] == name and item["call_id"].startswith("call_") and "name" not in item
    for part, value in values.items():
        assert isinstance(item[key][part], value) if isinstance(value, type) else item[key][part] == value


async def test_calls_and_results_of_these_tools_come_back_as_history():
    items = [
        {"role": "user", "content": "go"},
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": 'x"y', "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "patched"},
        {"type": "function_call", "call_id": "b", "namespace": "house", "name": "paint", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "painted"},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c", "output": "files"},
        {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "d", "output": [{"stdout": "out", "stderr": ""}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ]
    chat, _ = make_chat(ResponsesBody(input=items))
    calls = [call["function"] for turn in chat.messages for call in turn.get("tool_calls", ())]
    assert [call["name"] for call in calls] == ["patch", "house.paint", "local_shell", "shell"]
    assert calls[0]["arguments"] == {"input": 'x"y'} and calls[2]["arguments"]["command"] == ["ls"]
    results = [turn["content"] for turn in chat.messages if turn["role"] == "tool"]
    assert results == ["patched", "painted", "files", '[{"stdout":"out","stderr":""}]']


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ({"type": "bash_20250124", "name": "bash"}, {"command": str, "restart": bool}),
        ({"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}, {"command": str, "path": str}),
        ({"type": "memory_20250818", "name": "memory"}, {"command": str}),
    ],
)
async def test_anthropics_tools_of_the_client_are_called(claude, tool, given):
    found = await claude.messages.create(
        model="fake", max_tokens=500, messages=[{"role": "user", "content": "hello"}], tools=[tool],
        tool_choice={"type": "tool", "name": tool["name"]}, extra_body=SOON,
    )  # fmt: skip
    [block] = found.content
    assert (found.stop_reason, block.type, block.name) == ("tool_use", "tool_use", tool["name"])
    assert all(isinstance(block.input[key], kind) for key, kind in given.items() if key in block.input)
    assert "command" in block.input or tool["name"] == "bash"


async def prompt_and_header(running, path: str, body: dict) -> tuple[int, str]:
    found = await running.post(path, {**body, "temperature": 0})
    assert found.status_code == 200, found.text
    usage = found.json()["usage"]
    return usage.get("input_tokens", usage.get("prompt_tokens")) + usage.get("cache_read_input_tokens", 0), (
        found.headers.get(LEFT_OUT, "")
    )


@pytest.mark.parametrize(
    ("path", "asking", "hosted", "own"),
    [
        ("/v1/responses", {"input": "hello", "max_output_tokens": 3}, HOSTED, FUNCTION),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}, ANTHROPIC_HOSTED,
         {"name": "paint", "input_schema": PAINT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}, HOSTED,
         {"type": "function", "function": {"name": "paint", "parameters": PAINT}}),
    ],
)  # fmt: skip
async def test_tools_that_others_run_are_left_out_and_told(running, caplog, path, asking, hosted, own):
    kinds = ", ".join(dict.fromkeys(tool["type"] for tool in hosted))
    for tools in ([], [own]):
        without = await prompt_and_header(running, path, {**asking, "tools": tools})
        with caplog.at_level(logging.INFO, "wicore_trt.access"):
            told = await prompt_and_header(running, path, {**asking, "tools": [*hosted, *tools]})
        assert told[0] == without[0] and without[1] == "" and told[1] == kinds
        lines = [record.facts for record in caplog.records if hasattr(record, "facts")]
        assert lines[-1]["tools_left_out"] == kinds
    stream = await running.post(path, {**asking, "tools": hosted, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream") and stream.headers[LEFT_OUT] == kinds
    if path == "/v1/messages":
        prompt = {"messages": asking["messages"], "tools": hosted}
        assert (await running.post(f"{path}/count_tokens", prompt)).headers[LEFT_OUT] == kinds


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("responses", {"tools": HOSTED, "tool_choice": {"type": "web_search_preview"}}, "web_search_preview"),
        ("responses", {"tools": HOSTED, "tool_choice": {"type": "mcp", "server_label": "deepwiki"}}, "mcp"),
        ("responses", {"tools": [HOSTED[0]], "tool_choice": "required"}, "web_search"),
        ("messages", {"tools": ANTHROPIC_HOSTED, "tool_choice": {"type": "tool", "name": "web_search"}},
         "web_search_20250305"),
        ("messages", {"tools": ANTHROPIC_HOSTED[:1], "tool_choice": {"type": "any"}}, "web_search_20250305"),
        ("chat/completions", {"tools": HOSTED, "tool_choice": {"type": "web_search"}}, "web_search"),
    ],
)  # fmt: skip
async def test_a_tool_that_is_left_out_cannot_be_forced(running, path, fields, says):
    asking = {"input": "hello"} if path == "responses" else {"messages": [{"role": "user", "content": "hello"}]}
    found = await running.post(f"/v1/{path}", {**asking, **fields, **({"max_tokens": 3} if path == "messages" else {})})
    error = error_of(found)
    assert (found.status_code, error["param"]) == (400, "tool_choice")
    assert f"asks for {says}, which this server cannot run" in error["message"]


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "functon", "name": "paint", "parameters": PAINT},
        {"type": "functon", "function": {"name": "paint"}},
        {"type": "costum", "name": "patch", "format": GRAMMAR},
        {"type": 5, "name": "x"},
        {"type": ["function"], "name": "x"},
        {"type": "web search"},
        {"type": "namespace", "name": "house"},
        {"type": "namespace", "name": "house", "tools": [HOSTED[0]]},
        {"type": "custom", "name": "patch", "format": {"type": "xml"}},
    ],
)
async def test_what_says_how_it_is_called_and_is_of_no_known_type_is_refused(running, tool):
    found = await running.post("/v1/responses", {"input": "hello", "max_output_tokens": 3, "tools": [tool]})
    assert found.status_code == 400 and error_of(found)["param"].startswith("tools[0]"), found.text
