"""OpenAI's Python client, `websockets` and gRPC's reflection against the real server.

In the long profile it serves the real Gemma 3 270M.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Literal

import grpc
import httpx
import pytest
import websockets
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from lazy import LazyModule
from pydantic import BaseModel, ConfigDict, Field
from real_server import Served

openai = LazyModule("openai")

PROMPT = "The capital of France is"
SERVICE = "wicore.inference.v1.InferenceService"


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["Paris", "Rome"]
    millions: int = Field(ge=0, le=40)


class paint(BaseModel):
    """Paint the wall."""

    color: Literal["red", "blue"]


@pytest.fixture
def client(served: Served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def asking(served: Served, **more) -> dict:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": served.model, "messages": messages, "max_completion_tokens": 400, "temperature": 0, **more}


def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def at_rest(served: Served) -> None:
    """Wait until nothing runs."""
    until(lambda: served.stats()["requests_running"] == served.stats()["requests_waiting"] == 0)


def test_a_parsed_answer_and_a_parsed_stream(served, client):
    found = client.chat.completions.parse(**asking(served), response_format=City)
    assert isinstance(found.choices[0].message.parsed, City)
    with client.chat.completions.stream(**asking(served), response_format=City) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == found.choices[0].message.parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_parsed_calls_beside_an_answer_of_a_schema(served, client):
    tools = [openai.pydantic_function_tool(paint)]
    found = client.chat.completions.parse(**asking(served, tools=tools, tool_choice="required"))
    assert all(call.function.parsed_arguments.color in ("red", "blue") for call in found.choices[0].message.tool_calls)
    either = client.chat.completions.parse(
        **asking(served, tools=tools, response_format=City, parallel_tool_calls=False)
    )
    [choice] = either.choices
    assert isinstance(choice.message.parsed, City) is (choice.finish_reason == "stop")
    assert bool(choice.message.tool_calls) is (choice.finish_reason == "tool_calls")


@pytest.mark.parametrize("stop", [None, "本語", "👧"])
def test_characters_come_whole_and_nothing_of_a_stop_string_comes(served, client, stop):
    """These are several tokens each, some of a byte."""
    text = "Zoë: 日本語, 👩‍👩‍👧 𓀀 done"
    fields = asking(served, stop=stop, extra_body={"guided_choice": [text]})
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**fields, stream=True)]
    assert "".join(parts) == (text.partition(stop)[0] if stop else text)
    assert not any("\ufffd" in part for part in parts)


async def test_many_at_a_time_by_the_asynchronous_client(served):
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

        async def streamed() -> tuple[str, int]:
            fields = asking(served, max_completion_tokens=8, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in await client.chat.completions.create(**fields)]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            return text, chunks[-1].usage.completion_tokens

        found = await asyncio.gather(*(streamed() for _ in range(4)))
        whole = await client.chat.completions.create(**asking(served, max_completion_tokens=8))
    assert set(found) == {(whole.choices[0].message.content, whole.usage.completion_tokens)}


def test_a_client_that_leaves_or_has_no_time_ends_its_request(served, client):
    long = asking(served, max_completion_tokens=20_000, temperature=1, extra_body={"ignore_eos": True})
    stream = client.chat.completions.create(**long, stream=True)
    next(chunk for chunk in stream if chunk.choices[0].delta.content)  # the first chunk comes before any token
    assert served.stats()["requests_running"] == 1
    stream.close()
    at_rest(served)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).chat.completions.create(**long)
    at_rest(served)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(**long | {"extra_body": {"ignore_eos": True, "timeout": 0.5}})
    assert caught.value.status_code == 504 and caught.value.code == "deadline"


def test_many_bad_schemas_hurt_nobody(served, client):
    """Each is one 400; what runs beside them goes on."""
    stream = client.chat.completions.create(
        **asking(served, max_completion_tokens=40, stream=True, extra_body={"min_tokens": 20})
    )
    next(stream)
    deep: dict = {"type": "object"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}, "not": {}}
    for schema in ({"type": "nothing"}, {"$ref": "#/none"}, {"pattern": "(", "type": "string"}, deep):
        for field in ("response_format", "tools"):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": schema}}}
            value = form if field == "response_format" else [{"type": "function", "function": function}]
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**asking(served), **{field: value})
            assert caught.value.param == field
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")


async def test_websocket_conversations_with_calls_and_schemas(served):
    tool = openai.pydantic_function_tool(paint)
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}
    frames = {
        "calls": {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
        "schema": {"response_format": form},
        "text": {"max_completion_tokens": 8},
    }
    texts, calls, ended = dict.fromkeys(frames, ""), "", {}
    async with websockets.connect(served.url.replace("http", "ws", 1) + "/v1/stream") as socket:
        for name, more in frames.items():
            await socket.send(json.dumps({"type": "generate", "id": name, **asking(served), **more}))
        while len(ended) < len(frames):
            frame = json.loads(await socket.recv())
            if frame["type"] != "delta":
                ended[frame["id"]] = frame
                continue
            texts[frame["id"]] += frame["text"]
            calls += "".join(part["function"]["arguments"] for part in frame.get("tool_calls", ()))
    assert {frame["type"] for frame in ended.values()} == {"done"}, ended
    paint.model_validate_json(calls)
    City.model_validate_json(texts["schema"])
    assert texts["text"] and not texts["calls"]


def test_a_client_that_knows_no_proto_file_asks_reflection(served):
    """As grpcurl does: the service is found, messages are made of JSON, calls are made by name."""
    with grpc.insecure_channel(served.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE in database.get_services()
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
        asked, answered = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))
        call = channel.unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=asked.SerializeToString,
            response_deserializer=answered.FromString,
        )
        request = {
            "chat": {"messages": [{"role": "user", "content": "Paint the wall."}]},
            "sampling": {"maxTokens": 400, "temperature": 0},
            "tools": {
                "functions": [{"name": "paint", "parameters": json.dumps(paint.model_json_schema())}],
                "function": "paint",
                "parallel": False,
            },
        }
        found = [json_format.MessageToDict(m) for m in call(json_format.ParseDict(request, asked()), timeout=60)]
    assert found[-1]["finish"]["reason"] == "FINISH_REASON_STOP"
    deltas = [m.get("delta", m.get("finish", {}).get("delta", {})) for m in found]
    paint.model_validate_json("".join(p.get("arguments", "") for d in deltas for p in d.get("toolCalls", ())))


@pytest.mark.long  # the engine comes back over HTTP and gRPC in tests/process
@pytest.mark.timeout(400)
def test_a_stream_that_breaks_is_an_error_of_the_client_and_the_server_comes_back(served, client):
    fields = asking(served, max_completion_tokens=20_000, temperature=1, extra_body={"ignore_eos": True})
    stream = client.chat.completions.create(**fields, stream=True)
    next(stream)
    served.child("wicore_trt.process.engine").kill()
    with pytest.raises(openai.APIError) as caught:
        for _ in stream:
            pass
    assert not isinstance(caught.value, openai.APIConnectionError) and caught.value.body["type"] == "unavailable_error"
    until(lambda: httpx.get(f"{served.url}/ready").status_code == 200, limit_s=200)  # it loads the model
    assert client.chat.completions.create(**asking(served, max_completion_tokens=4)).choices[0].message.content
