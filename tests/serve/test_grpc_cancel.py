"""Requests that end early: client cancel, deadline, timeout, Abort, readers that stop. No work and no memory stays."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
from contextlib import nullcontext

import grpc
import psutil
import pytest
from fakes import FAKE_INFO
from google.protobuf.duration_pb2 import Duration
from serving import TOKENIZER, failure, make_engine, request, rest_of, serving, stats_now, steps_of, until

from wicore_trt.core.text_engine import Tally, TextStream
from wicore_trt.core.times import Times
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.types import FinishReason, TextRequest, TokenLogprob, TokenOutput, Usage

STEP_S = 0.01


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog):
    """A client that leaves is no error."""
    yield
    assert not [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]


async def steps_stop(engine, within: int) -> None:
    """Fails unless at most `within` further steps run."""
    before = steps_of(engine)
    await asyncio.sleep(20 * STEP_S)
    assert steps_of(engine) - before <= within


async def test_client_cancel_stops_the_engine_within_a_step_or_so():
    async with serving(make_engine(step_s=STEP_S)) as running:
        call = running.stub.Generate(request(max_tokens=900))
        for _ in range(3):
            await call.read()
        call.cancel()
        await until(lambda: running.server.service.open.total() == 0)
        await steps_stop(running.engine, within=2)
        assert stats_now(running.engine).requests_running == 0


async def test_cancel_before_the_first_token_stops_the_engine_too():
    async with serving(make_engine(step_s=STEP_S)) as running:
        calls = [running.stub.Generate(request(str(i), 900)) for i in range(5)]
        await until(lambda: running.server.service.open.total() == 5)
        for call in calls:
            call.cancel()
        await until(lambda: running.server.service.open.total() == 0)
        await steps_stop(running.engine, within=2)


async def test_a_broken_connection_stops_the_engine():
    async with serving(make_engine(step_s=STEP_S)) as running:
        call = running.stub.Generate(request(max_tokens=900))
        await call.read()
        await running.channel.close(0)
        await until(lambda: running.server.service.open.total() == 0)
        await steps_stop(running.engine, within=2)


async def test_the_call_deadline_ends_work_and_call():
    async with serving(make_engine(step_s=STEP_S)) as running:
        code, _, _ = await failure(running.stub.Generate(request(max_tokens=900), timeout=0.2))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: running.server.service.open.total() == 0)
        await steps_stop(running.engine, within=2)
        assert steps_of(running.engine) < 450  # of 900


async def test_the_timeout_field_ends_the_sequences_and_keeps_their_output():
    ahead_s = 0.0
    async with serving(make_engine(step_s=STEP_S, clock=lambda: time.monotonic() + ahead_s)) as running:
        call = running.stub.Generate(request(max_tokens=900, n=2, timeout=Duration(seconds=200)), timeout=280)
        begun = set()
        while len(begun) < 2:
            begun.add((await call.read()).index)
        ahead_s = 201.0
        steps = steps_of(running.engine)  # no sooner: from here on one step more ends it
        finishes = [r.finish for r in await rest_of(call) if r.HasField("finish")]
        assert [f.reason for f in finishes] == [pb2.FINISH_REASON_DEADLINE] * 2
        assert all(0 < f.usage.completion_tokens <= steps + 2 for f in finishes)
        await steps_stop(running.engine, within=1)


async def test_abort_from_another_call_ends_the_stream_with_cancelled():
    async with serving(make_engine(step_s=STEP_S)) as running:
        call = running.stub.Generate(request(max_tokens=900, request_id="victim"))
        await call.read()
        assert (await running.stub.Abort(pb2.AbortRequest(request_id="victim"))).aborted
        rest = await rest_of(call)
        assert rest[-1].finish.reason == pb2.FINISH_REASON_CANCELLED
        assert await call.code() is grpc.StatusCode.OK
        await steps_stop(running.engine, within=1)
        assert not (await running.stub.Abort(pb2.AbortRequest(request_id="victim"))).aborted
        code, _, details = await failure(running.stub.Abort(pb2.AbortRequest()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details["BadRequest"].field_violations[0].field == "request_id"


async def test_a_thousand_cancelled_streams_leave_nothing_behind():
    rng = random.Random(7)
    async with serving(make_engine(step_s=0.0005, max_waiting=1000)) as running:

        async def one(i: int) -> None:
            call = running.stub.Generate(request(f"stream {i}", 500, n=rng.choice((1, 2))))
            if rng.random() < 0.5:
                await call.read()
            elif rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.02)
            call.cancel()

        async def rest() -> tuple[int, int]:
            await until(lambda: running.server.service.open.total() == 0)
            await until(
                lambda: stats_now(running.engine).requests_running + stats_now(running.engine).requests_waiting == 0
            )
            gc.collect()
            return len(asyncio.all_tasks()), psutil.Process().num_fds()

        await asyncio.gather(*map(one, range(50)))
        tasks, files = await rest()
        for start in range(50, 1050, 50):
            await asyncio.gather(*map(one, range(start, start + 50)))

        async def no_more() -> bool:
            tasks_after, files_after = await rest()
            return tasks_after <= tasks + 2 and files_after <= files + 2

        await until(no_more)  # gRPC ends its own tasks when it gets to them
        assert not running.engine._streams and not running.engine.engine._loop._live
        assert all(pool.used_pages == 0 for pool in stats_now(running.engine).pools)


class FloodEngine:
    """Gives each request `count` one-token outputs as fast as the event loop turns, read or not."""

    tokenizer = TOKENIZER
    info = FAKE_INFO
    dead = None

    def __init__(self, count: int, alternatives: int) -> None:
        self.count, self.top = count, tuple((t, -1.0) for t in range(alternatives))
        self.pushed = 0
        self.stream: TextStream | None = None
        self.times = Times()

    async def start(self) -> None: ...

    async def close(self) -> None:
        self.task.cancel()

    def turn(self, tenant: str, priority: int, size: int | None):
        return nullcontext()

    async def encode_long_prompt(self, message: TextRequest) -> TextRequest:
        return message

    def find_tally(self, tenant: str) -> Tally:
        return Tally()

    async def submit(self, message: TextRequest) -> TextStream:
        self.stream = TextStream(self, "0", message, TOKENIZER)
        self.task = asyncio.create_task(self._flood(self.stream))
        return self.stream

    async def _flood(self, stream: TextStream) -> None:
        for i in range(self.count):
            token = i % 90 + 2
            last = i == self.count - 1
            stream.push_output(
                TokenOutput(
                    stream.request_id,
                    0,
                    (token,),
                    (TokenLogprob(token, -0.5, self.top),),
                    FinishReason.LENGTH if last else None,
                    None,
                    Usage(1, i + 1),
                )  # fmt: skip
            )
            self.pushed += 1
            await asyncio.sleep(0)

    def forget_stream(self, stream: TextStream) -> None: ...


@pytest.mark.parametrize("alternatives", [0, 20])
async def test_a_reader_that_stops_holds_up_nobody_and_gets_everything_merged(alternatives):
    count = 6000
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with serving(FloodEngine(count, alternatives), options=options) as running:
        call = running.stub.Generate(request())
        first = await call.read()
        await until(lambda: running.engine.pushed == count)  # the engine went on although nobody read
        responses = [first, *await rest_of(call)]
        deltas = [r.finish.delta if r.HasField("finish") else r.delta for r in responses]
        ids = [t for d in deltas for t in d.token_ids]
        assert ids == [i % 90 + 2 for i in range(count)]
        assert TOKENIZER.decode(ids) == "".join(d.text for d in deltas)
        assert [len(d.logprobs) for d in deltas] == [len(d.token_ids) for d in deltas]
        assert responses[-1].finish.usage.completion_tokens == count
        assert len(responses) < count / 2, "nothing was merged"
        assert max(len(d.token_ids) for d in deltas) <= 512 and max(r.ByteSize() for r in responses) < 1 << 20


async def test_a_reader_that_stops_and_leaves_is_forgotten():
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with serving(FloodEngine(50_000, 0), options=options) as running:
        call = running.stub.Generate(request())
        await call.read()
        await until(lambda: running.engine.pushed > 5000)
        call.cancel()
        await until(lambda: running.server.service.open.total() == 0)
