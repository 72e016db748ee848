"""Bad requests: each has INVALID_ARGUMENT, the field's path and a sentence, and the server goes on."""

from __future__ import annotations

import math
import random

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from serving import MAX_CONTEXT, SERVICE, expected, failure, make_engine, request, serving, steps_of

from wicore_trt.errors import InvalidRequestError
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.text.chat import checked_messages

SAMPLING = {
    "max_tokens": [0, 2**32 - 1],
    "min_tokens": [2**32 - 1, 11],
    "temperature": [math.nan, math.inf, -0.1, 1e300],
    "top_k": [2**32 - 1],
    "top_p": [math.nan, 0.0, -1.0, 1.0001, math.inf],
    "min_p": [math.nan, -0.1, 1.1],
    "repetition_penalty": [0.0, -1.0, math.inf, math.nan, 101.0],
    "presence_penalty": [math.nan, 2.1, -math.inf],
    "frequency_penalty": [math.nan, -2.1, 1e308],
    "n": [0, 33, 2**32 - 1],
    "logprobs": [21, 2**32 - 1],
    "prompt_logprobs": [0, 21],  # this engine has none
    "logit_bias": [{5: math.nan}, {5: 101.0}, {97: 1.0}, {2**32 - 1: 1.0}, dict.fromkeys(range(1025), 0.0)],
    "stop": [[""], ["x" * 257], ["a"] * 17],
    "stop_token_ids": [[97], [2**32 - 1]],
}
REQUEST = {
    "text": [{"text": ""}, {"text": "x" * MAX_CONTEXT}],
    "token_ids": [
        {"token_ids": pb2.TokenIds()},
        {"token_ids": pb2.TokenIds(ids=[1, 97])},
        {"token_ids": pb2.TokenIds(ids=[2**32 - 1])},
        {"token_ids": pb2.TokenIds(ids=[5] * MAX_CONTEXT)},
    ],
    "chat.messages": [{"chat": pb2.Chat()}],
    "request_id": [{"request_id": ""}, {"request_id": "a b"}, {"request_id": "x" * 129}, {"request_id": "é"}],
    "timeout": [{"timeout": Duration()}, {"timeout": Duration(seconds=-1)}, {"timeout": Duration(nanos=2 * 10**9)}],
    "cache_salt": [{"cache_salt": "s" * 257}],
}
CASES = [(f"sampling.{name}", {name: value}) for name, values in SAMPLING.items() for value in values]
CASES += [(path, kwargs) for path, variants in REQUEST.items() for kwargs in variants]


async def test_each_bad_field_is_named_and_costs_no_engine_step():
    async with serving(make_engine()) as running:
        for path, kwargs in CASES:
            code, message, details = await failure(running.stub.Generate(request(**kwargs)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (path, kwargs, message)
            (violation,) = details["BadRequest"].field_violations
            assert violation.field == path and violation.description == message, (kwargs, violation)
            assert details["ErrorInfo"].reason == "INVALID_REQUEST" and 0 < len(message) <= 512
        assert steps_of(running.engine) == 0 and running.server.service.open.total() == 0
        finish = [r async for r in running.stub.Generate(request("still fine", 5))][-1].finish
        assert finish.usage.completion_tokens == 5


async def test_texts_of_clients_are_quoted_short():
    long = "r" * 300_000
    with pytest.raises(InvalidRequestError) as error:
        checked_messages([{"role": long, "content": "hi"}])
    assert len(str(error.value)) < 250
    async with serving() as running:
        for message in (request(model=long), request(request_id=long)):
            assert len((await failure(running.stub.Generate(message)))[1]) < 250


async def test_no_prompt_and_an_unknown_model():
    async with serving() as running:
        code, _, details = await failure(running.stub.Generate(pb2.GenerateRequest()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details["BadRequest"].field_violations[0].field == "prompt"
        code, message, _ = await failure(running.stub.Generate(request(model="gemma-9")))
        assert code is grpc.StatusCode.NOT_FOUND and "'gemma-9'" in message and "'fake'" in message
        assert [r async for r in running.stub.Generate(request(model="fake"))]


def raw_call(running, method: str = "Generate"):
    kind = running.channel.unary_stream if method == "Generate" else running.channel.unary_unary
    return kind(SERVICE + method)  # without serializers: bytes in, bytes out


@pytest.mark.parametrize(
    "raw",
    [
        b"\x1a\x02\xff\xfe",  # field 3 (text), two bytes that are no UTF-8
        b"\x0a\x01\x80",  # field 1 (request_id)
        b"\x1a\x7fshort",  # a length that goes beyond the end
        b"\x3a\x05\x72\x03\xc3\x28\x41",  # sampling.stop with a broken sequence
        b"\xff\xff\xff\xff\xff\xff",
    ],
)
async def test_bytes_that_are_no_message_are_a_clean_error(raw):
    async with serving() as running:
        code, message, details = await failure(raw_call(running)(raw))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "not a valid message" in message
        assert details["BadRequest"].field_violations[0].field == "request"
        code, _, _ = await failure(raw_call(running, "Tokenize")(b"\x0a\x02\xff\xfe"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("seed", range(2))
async def test_random_bytes_never_do_worse_than_a_status_of_ours(seed):
    rng = random.Random(seed)
    async with serving() as running:
        for _ in range(100):
            raw = bytearray(request("mutate me", 3).SerializeToString())
            for _ in range(rng.randint(1, 4)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            call = raw_call(running)(bytes(raw), timeout=60)
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), error
        assert [r async for r in running.stub.Generate(request("still fine", 5))]


async def test_unknown_fields_are_ignored():
    async with serving() as running:
        unknown = b"\xc2\x3e\x05extra" + b"\x80\x7d\x07"  # fields 1000 (bytes) and 2000 (varint)
        call = raw_call(running)(request("as if", 6).SerializeToString() + unknown)
        got = [pb2.GenerateResponse.FromString(r) async for r in call]
        assert "".join((r.delta.text or r.finish.delta.text) for r in got) == expected("as if", 6)[0]


async def test_a_message_over_the_limit_is_refused():
    async with serving(max_message_mb=1) as running:
        code, message, _ = await failure(running.stub.Generate(request("x" * (1 << 20))))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message
        assert [r async for r in running.stub.Generate(request())]
