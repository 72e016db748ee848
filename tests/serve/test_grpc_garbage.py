"""Calls leave nothing behind that only Python's collector finds: it would take longer than a refusal itself."""

from __future__ import annotations

import gc

import grpc
import pytest
from serving import make_engine, request, serving

from wicore_trt.errors import QueueFullError
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2

CALLS = 60
LIBRARY = 8
"""Objects of each call that gRPC leaves, of server and client, which is this process too."""


async def left_by(ask) -> float:
    """Objects that the collector finds for each of some calls, after some others."""
    for _ in range(5):
        await ask()
    gc.collect()
    gc.disable()
    try:
        for _ in range(CALLS):
            await ask()
        return gc.collect() / CALLS
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["refused", "wrong", "without a key", "served", "statistics"])
async def test_a_call_leaves_no_circles(how, monkeypatch):
    async with serving(make_engine(), api_key="k" * 20 if how == "without a key" else None) as running:
        port = running.engine.engine

        async def refuse(made):
            raise QueueFullError("Come later.", retry_after_s=1.0)

        if how == "refused":
            monkeypatch.setattr(port, "add", refuse)

        async def ask() -> None:
            if how == "statistics":
                await running.stub.GetStats(pb2.GetStatsRequest())
                return
            call = running.stub.Generate(request("hello", 3, top_p=9.0 if how == "wrong" else 1.0))
            try:
                while await call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError:
                pass
            code = await call.code()
            assert (code is grpc.StatusCode.OK) == (how == "served"), code

        found = await left_by(ask)
        print(how, found)
        assert found < LIBRARY, found
