"""The end of a server process whose engine hangs."""

from __future__ import annotations

import asyncio
import signal

from serving import process, request

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2


async def test_a_step_that_hangs_does_not_keep_the_process_alive():
    async with process(step_s=1000, server={"grace_s": 0.5}) as server:  # time to get into the step
        await server.until_serving()
        call = server.stub.Generate(request())
        async with asyncio.timeout(60):
            while not (await server.stub.GetStats(pb2.GetStatsRequest())).streams_open:
                await asyncio.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        exit_code, log = await server.end()  # not with the step
        assert exit_code == 1 and "were cancelled" in log
        call.cancel()
