"""The end of a server process whose engine hangs, or breaks while it drains."""

from __future__ import annotations

import asyncio
import signal

import grpc
from serving import failure, process, request

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2


async def test_a_step_that_hangs_does_not_keep_the_process_alive():
    async with process(step_s=1000, server={"grace_s": 0.1}) as server:
        await server.until_serving()
        call = server.stub.Generate(request())
        async with asyncio.timeout(60):
            while not (await server.stub.GetStats(pb2.GetStatsRequest())).streams_open:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # into the step
        server.process.send_signal(signal.SIGTERM)
        exit_code, log = await server.end()  # not with the step
        assert exit_code == 1 and "were cancelled" in log
        call.cancel()


async def test_an_engine_that_breaks_while_draining_is_no_clean_end():
    async with process(step_s=0.05, fail_at=20) as server:
        await server.until_serving()
        call = server.stub.Generate(request(max_tokens=100))
        await anext(aiter(call))
        server.process.send_signal(signal.SIGTERM)
        code, _, _ = await failure(call)
        assert code is grpc.StatusCode.UNAVAILABLE
        exit_code, log = await server.end()
        assert exit_code == 1, log
