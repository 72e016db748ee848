"""Tools over the WebSocket and over gRPC: the calls that /v1/chat/completions makes of the same request."""

from __future__ import annotations

import json

import grpc
import pytest
from constrained_web import make_constrained_engine
from serve.serving import failure
from serve.serving import serving as grpc_serving
from test_http_socket import answers, connect
from web import serving

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2

PAINT = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["color", "size"],
}
DONE = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}},
    "required": ["done"],
    "additionalProperties": False,
}
SAMPLING = {"temperature": 1.0, "seed": 3, "max_tokens": 300}
CALL = {"id": "call_7", "type": "function", "function": {"name": "paint", "arguments": '{"color":"red","size":1}'}}
TURNS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_7", "content": "done"},
]
CHOICES = {
    "auto": "auto",
    "required": "required",
    "none": "none",
    "paint": {"type": "function", "function": {"name": "paint"}},
}


def asking(choice: str, answer: dict | None = None) -> dict:
    """A body of /v1/chat/completions."""
    tools = [
        {"type": "function", "function": {"name": "paint", "description": "Paint.", "parameters": PAINT}},
        {"type": "function", "function": {"name": "stop", "strict": True}},
    ]
    form = {"type": "json_schema", "json_schema": {"name": "done", "schema": answer}}
    return {
        **SAMPLING,
        "messages": TURNS,
        "tools": tools,
        "tool_choice": CHOICES[choice],
        "parallel_tool_calls": choice == "auto",
        **({} if answer is None else {"response_format": form}),
    }


def message(choice: str, answer: dict | None = None) -> pb2.GenerateRequest:
    """The same for gRPC."""
    called = [pb2.ToolCall(id="call_7", name="paint", arguments=CALL["function"]["arguments"])]
    turns = [
        pb2.ChatMessage(role="user", content="hello"),
        pb2.ChatMessage(role="assistant", tool_calls=called),
        pb2.ChatMessage(role="tool", tool_call_id="call_7", content="done"),
    ]
    functions = [
        pb2.Function(name="paint", description="Paint.", parameters=json.dumps(PAINT)),
        pb2.Function(name="stop", strict=True),
    ]
    tools = pb2.Tools(functions=functions, parallel=choice == "auto")
    if choice == "paint":
        tools.function = choice
    else:
        tools.choice = getattr(pb2, f"TOOL_CHOICE_{choice.upper()}")
    sampling = pb2.SamplingParams(**SAMPLING)
    if answer is not None:
        sampling.constraint.json_schema = json.dumps(answer)
    return pb2.GenerateRequest(chat=pb2.Chat(messages=turns), tools=tools, sampling=sampling)


Answer = tuple[str, list[tuple[str, str]]]
"""The text, and name and arguments of each call."""


def put_together(deltas: list[tuple[str, list[dict]]]) -> Answer:
    calls: dict[int, list[str]] = {}
    for _, parts in deltas:
        for part in parts:
            if "id" in part:
                assert part["index"] not in calls and part["id"].startswith("call_")
                calls[part["index"]] = [part["function"]["name"], ""]
            calls[part["index"]][1] += part["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    return "".join(text for text, _ in deltas), [(name, arguments) for name, arguments in calls.values()]


async def over_http(running, body: dict) -> Answer:
    answer = await running.post("/v1/chat/completions", body)
    found = answer.json()["choices"][0]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in found.get("tool_calls", ())]
    return found["content"] or "", calls


async def over_websocket(running, body: dict) -> Answer:
    async with connect(running) as connection:
        await connection.send(json.dumps({"type": "generate", "id": "a", **body}))
        *deltas, done = (await answers(connection, "a"))["a"]
    assert done["type"] == "done", done
    found = put_together([(frame["text"], frame.get("tool_calls", [])) for frame in deltas])
    [reason] = [frame["finish_reason"] for frame in deltas if frame["finish_reason"]]
    assert reason == "length" or reason == ("tool_calls" if found[1] else "stop")
    return found


async def over_grpc(running, request: pb2.GenerateRequest) -> Answer:
    deltas = []
    async for response in running.stub.Generate(request):
        ended = response.WhichOneof("event") == "finish"
        delta = response.finish.delta if ended else response.delta
        parts = [
            {
                "index": part.index,
                "function": {"name": part.name, "arguments": part.arguments},
                **({"id": part.id} if part.HasField("id") else {}),
            }
            for part in delta.tool_calls
        ]
        deltas.append((delta.text, parts))
    return put_together(deltas)


@pytest.mark.parametrize("answer", [pytest.param(None, marks=pytest.mark.long), DONE], ids=["text", "schema"])
@pytest.mark.parametrize("choice", [*CHOICES])
async def test_every_way_gives_the_same_calls(choice: str, answer: dict | None):
    async with serving(make_constrained_engine()) as running:
        text, calls = await over_http(running, asking(choice, answer))
        assert await over_websocket(running, asking(choice, answer)) == (text, calls)
    async with grpc_serving(make_constrained_engine()) as running:
        assert await over_grpc(running, message(choice, answer)) == (text, calls)
    assert bool(text) != bool(calls)
    assert not calls if choice == "none" else calls or choice == "auto"
    if answer is not None and text:
        assert set(json.loads(text)) == {"done"}
    for name, arguments in calls:
        assert name == "paint" or choice != "paint"
        assert set(json.loads(arguments)) == {"color", "size"} or name == "stop"


async def test_either_of_calls_and_answers_comes_beside_each_other():
    kinds = set()
    async with serving(make_constrained_engine()) as running:
        for seed in range(5):
            body = asking("auto", DONE) | {"seed": seed, "temperature": 2.0}
            text, calls = await over_http(running, body)
            kinds.add(bool(calls))
            assert calls or json.loads(text).keys() == {"done"}
    assert kinds == {True, False}


BAD = [
    (pb2.Tools(functions=[pb2.Function(name="a b")]), "tools.functions[0]"),
    (pb2.Tools(functions=[pb2.Function(name="a", parameters="{")]), "tools.functions[0]"),
    (pb2.Tools(functions=[pb2.Function(name="a", parameters="[]")]), "tools.functions[0]"),
    (pb2.Tools(functions=[pb2.Function(name="a", parameters='{"required": 3}')]), "tools.functions"),
    (pb2.Tools(functions=[pb2.Function(name="a")] * 2), "tools.functions"),
    (pb2.Tools(functions=[pb2.Function(name=f"f{i}") for i in range(129)]), "tools.functions"),
    (pb2.Tools(functions=[pb2.Function(name="a")], function="b"), "tools.choice"),
    (pb2.Tools(functions=[pb2.Function(name="a")], function="a", choice=pb2.TOOL_CHOICE_AUTO), "tools.choice"),
    (pb2.Tools(functions=[pb2.Function(name="a")], choice=9), "tools.choice"),
    (pb2.Tools(choice=pb2.TOOL_CHOICE_REQUIRED), "tools.choice"),
]


async def test_what_cannot_be_names_its_field():
    turns = pb2.Chat(messages=[pb2.ChatMessage(role="user", content="hello")])
    cases = [(pb2.GenerateRequest(chat=turns, tools=tools), field) for tools, field in BAD]
    tools = pb2.Tools(functions=[pb2.Function(name="a")])
    cases.append((pb2.GenerateRequest(text="hello", tools=tools), "tools.functions"))
    regex = pb2.SamplingParams(constraint=pb2.Constraint(regex="a"))
    cases.append((pb2.GenerateRequest(chat=turns, tools=tools, sampling=regex), "sampling.constraint"))
    async with grpc_serving(make_constrained_engine()) as running:
        for request, field in cases:
            code, text, details = await failure(running.stub.Generate(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, request
            assert details["BadRequest"].field_violations[0].field == field, text
