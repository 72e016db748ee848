"""The measuring clients against a real server over the fake engine, and against answers that lie."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from bench.made_requests import ask_at_once, ask_in_turn, make_requests
from fakes import Gate
from serve.serving import executor_of, make_engine, serving, until

from wicore_trt.bench.client import GrpcTarget, LocalTarget
from wicore_trt.bench.workload import BenchRequest
from wicore_trt.errors import ConfigError, UnavailableError, WicoreError
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc


def requests(count: int, *, seed: int = 0, shared_prefix: int = 0) -> list[BenchRequest]:
    return make_requests(97, count, 20, 12, seed=seed, shared_prefix=shared_prefix)


async def test_a_server_is_measured_by_its_usage():
    async with serving(make_engine(step_s=0.002)) as running:
        target = await GrpcTarget.connect(running.address)
        assert target.info == running.engine.info
        records = await ask_at_once(target, requests(9))
        await target.close()
    for record in records:
        assert record.error is None
        assert (record.prompt_tokens, record.output_tokens) == (20, 12)
        assert record.started < record.arrivals[0][0] <= record.arrivals[-1][0] <= record.finished
        assert len(record.gaps_s()) == 11
        assert record.e2e_s >= 12 * 0.002  # 20 prompt tokens are two steps of 16, then 11 more


async def test_an_engine_in_this_process_gives_the_same_records():
    engine = make_engine(step_s=0.002)
    await engine.start()
    target = LocalTarget(engine)
    records = await ask_at_once(target, requests(9))
    await target.close()
    assert [(r.error, r.prompt_tokens, r.output_tokens) for r in records] == [(None, 20, 12)] * 9
    assert all(r.e2e_s >= 12 * 0.002 and len(r.gaps_s()) == 11 for r in records)


async def test_a_shared_prefix_shows_as_cached_tokens():
    engine = make_engine()
    await engine.start()
    target = LocalTarget(engine)
    own = await ask_in_turn(target, requests(5, seed=1))
    shared = await ask_in_turn(target, requests(5, seed=2, shared_prefix=16))
    await target.close()
    assert [r.cached_tokens for r in own] == [0] * 5
    assert [r.cached_tokens for r in shared][0] == 0 and min(r.cached_tokens for r in shared[1:]) > 0


async def test_errors_are_records_and_not_exceptions():
    engine = make_engine(max_waiting=2, max_sequences=1)
    async with serving(engine) as running:
        target = await GrpcTarget.connect(running.address)
        codes = running.server.service.admission.counts.grpc
        with Gate(executor_of(engine)):
            asked = asyncio.ensure_future(ask_at_once(target, requests(8)))
            await until(lambda: codes["Generate", "RESOURCE_EXHAUSTED"])
        records = await asked
        await target.close()
    kinds = Counter((r.error or "ok").partition(":")[0] for r in records)
    assert set(kinds) == {"ok", "RESOURCE_EXHAUSTED"} and kinds["ok"] >= 2
    assert all(r.output_tokens == 0 for r in records if r.error)


async def test_local_errors_are_records_too():
    engine = make_engine()
    await engine.start()
    target = LocalTarget(engine)
    too_long = BenchRequest((5,) * 2000, 4)
    record = await target.generate(too_long)
    await target.close()
    assert record.error.startswith("INVALID_ARGUMENT: This model's maximum context length is 1024 tokens")


async def test_no_server_bad_key_and_bad_ca_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr("wicore_trt.bench.client.CONNECT_TIMEOUT_S", 0.3)
    with pytest.raises(UnavailableError, match="No server answers at 127.0.0.1:1"):
        await GrpcTarget.connect("127.0.0.1:1")
    async with serving(api_key="secret") as running:
        with pytest.raises(WicoreError, match="UNAUTHENTICATED"):
            await GrpcTarget.connect(running.address)
        target = await GrpcTarget.connect(running.address, api_key="secret")
        assert (await target.generate(requests(1)[0])).error is None
        await target.close()
    with pytest.raises(ConfigError, match="ca.pem cannot be read"):
        await GrpcTarget.connect("127.0.0.1:1", tls_ca=tmp_path / "ca.pem")


class Liar(inference_pb2_grpc.InferenceServiceServicer):
    """Streams the tokens and the usage that it was told to."""

    def __init__(self, sent: list[int], usage: int | None) -> None:
        self.sent, self.usage = sent, usage

    async def GetModelInfo(self, request, context):
        return pb2.GetModelInfoResponse(model_id="liar", vocab_size=97, max_context_tokens=100)

    async def Generate(self, request, context):
        for count in self.sent:
            yield pb2.GenerateResponse(delta=pb2.Delta(token_ids=[1] * count))
        if self.usage is not None:
            finish = pb2.Finish(delta=pb2.Delta(token_ids=[1]), usage=pb2.Usage(completion_tokens=self.usage))
            yield pb2.GenerateResponse(finish=finish)


@pytest.mark.parametrize(
    ("sent", "usage", "error"),
    [
        ([1, 4, 6], 12, None),  # 12 tokens in 4 messages
        ([1, 1, 1], 4, "INCOMPLETE: asked for 12 tokens, usage says 4, 4 came"),  # ended early
        ([1, 10], 11, "INCOMPLETE: asked for 12 tokens, usage says 11, 12 came"),  # counts differ
        ([0, 0, 3], 12, "INCOMPLETE: asked for 12 tokens, usage says 12, 4 came"),
        ([12], None, "INCOMPLETE: the stream ended without usage"),
    ],
)
async def test_a_record_is_good_only_with_every_token_accounted_for(sent, usage, error):
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Liar(sent, usage), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = await GrpcTarget.connect(f"127.0.0.1:{port}")
    assert target.info.bos_token_id is None and target.info.quantization is None
    record = await target.generate(requests(1)[0])
    await target.close()
    await server.stop(0)
    assert record.error == error
    if error is None:
        assert [tokens for _, tokens in record.arrivals] == [1, 4, 6, 1] and record.output_tokens == 12


@asynccontextmanager
async def answering(answers: dict[str, bytes]) -> AsyncIterator[str]:
    """A server whose methods answer with these bytes; gives its address."""

    async def whole(request: bytes, context: object) -> bytes:
        return answers["GetModelInfo"]

    async def stats(request: bytes, context: object) -> bytes:
        return answers["GetStats"]

    async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield answers["Generate"]

    server = grpc.aio.server()
    methods = {
        "GetModelInfo": grpc.unary_unary_rpc_method_handler(whole),
        "GetStats": grpc.unary_unary_rpc_method_handler(stats),
        "Generate": grpc.unary_stream_rpc_method_handler(stream),
    }
    service = pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_half_a_message_is_a_record_and_ends_no_run():
    info = pb2.GetModelInfoResponse(model_id="half", vocab_size=97, max_context_tokens=100).SerializeToString()
    message = pb2.GenerateResponse(delta=pb2.Delta(token_ids=[1] * 12)).SerializeToString()[:-1]
    async with answering({"GetModelInfo": info, "GetStats": b"\xff", "Generate": message}) as address:
        target = await GrpcTarget.connect(address)
        assert await target.tier_hits() == {}
        records = await ask_at_once(target, requests(2))
        await target.close()
    assert [record.status for record in records] == ["INVALID"] * 2


@pytest.mark.parametrize("info", [b"\xff", b"", pb2.GetModelInfoResponse(model_id="none").SerializeToString()])
async def test_a_server_that_tells_no_model_is_none_of_ours(info):
    async with answering({"GetModelInfo": info}) as address:
        with pytest.raises(WicoreError, match="does not answer as our servers do"):
            await GrpcTarget.connect(address)
