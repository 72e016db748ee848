"""Two engines behind one address, as processes over the fake engine: who gets a request, and what a death costs."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import httpx
import pytest
from process.test_supervisor import Server, supervised
from serve.serving import expected, until
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from wicore_trt.serve.gen.wicore.inference.v1 import kv_pb2

WORDS = "abcdefgh"


@asynccontextmanager
async def replicated(tmp_path, **options) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    options["server"] = {"http_port": 0, "replicas": 2, **options.get("server", {})}
    async with supervised(tmp_path, **options) as server:
        server.address = (await server.log_line("loading the engine for")).split(" for ")[1].split(" and ")[0]
        url = await server.line("bound")
        await server.line("ready on")
        async with httpx.AsyncClient(base_url=url) as client:
            yield server, client


async def read_counts(client: httpx.AsyncClient, name: str) -> dict[int, float]:
    """A metric by replica."""
    text = (await client.get("/metrics")).text
    return {int(i): float(n) for i, n in re.findall(rf'^{name}{{replica="(\d)"}} (\S+)$', text, re.M)}


async def ask(client: httpx.AsyncClient, prompt: str, count: int = 4) -> int:
    """Check an answer; return how many of its prompt's tokens were cached, -1 for an error after the engine's death."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    reply = await client.post("/v1/completions", json=body, timeout=60)
    if reply.status_code != 200:
        assert reply.status_code == 503 and "engine stopped" in reply.json()["error"]["message"], reply.text
        return -1
    assert reply.json()["choices"][0]["text"] == expected(prompt, count)[0]
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_prefix_stays_where_it_is_until_that_replica_is_loaded(tmp_path):
    hold = tmp_path / "hold"
    async with replicated(tmp_path, hold=str(hold)) as (server, client):
        assert len(server.alive("engine")) == 2
        long = "the same beginning of all " * 20
        for i in range(6):  # takes turns otherwise
            assert (await ask(client, f"{long}{i}") > 400) == (i > 0)
        prompts = await read_counts(client, "wicore_prompt_tokens_total")
        assert sorted(n > 0 for n in prompts.values()) == [False, True]
        for i in range(4):
            assert await ask(client, f"{i} another") == 0
        assert all((await read_counts(client, "wicore_prompt_tokens_total")).values())
        # 30 at once: what a prefix of 500 tokens saves is worth some sequences, not all
        before = await read_counts(client, "wicore_generated_tokens_total")
        hold.touch()
        asked = [asyncio.ensure_future(ask(client, f"{long}{i}", 30)) for i in range(30)]
        await until(lambda: is_open(client, 30))
        hold.unlink()
        hits = await asyncio.gather(*asked)
        after = await read_counts(client, "wicore_generated_tokens_total")
        assert min(after[i] - before[i] for i in range(2)) >= 10 * 30 and sum(hit > 400 for hit in hits) > 20
        text = (await client.get("/metrics")).text
        assert 'vllm:num_requests_running{engine="1",model_name=' in text
        assert len(re.findall(r'process_resident_bytes{process="engine-[01]"}', text)) == 2
        stats = (await client.get("/v1/stats")).json()
        assert stats["prompt_tokens"] == sum((await read_counts(client, "wicore_prompt_tokens_total")).values())


async def is_open(client: httpx.AsyncClient, count: int) -> bool:
    """Whether so many requests have come and not ended."""
    return (await client.get("/status")).json()["requests_open"] == count


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.long)])
async def test_a_killed_replica_takes_its_requests_with_it_and_no_others(tmp_path, kills):
    rng, ends = random.Random(7), Counter[str]()
    hold = tmp_path / "hold"
    async with replicated(tmp_path, step_s=0.003, quick_s=0.0, hold=str(hold)) as (server, client):
        stop = False

        async def computes(number: int) -> bool:
            """Whether it has a request, which counts as one that waits until its first step is over."""
            names = ("wicore_requests_running", "wicore_requests_waiting")
            return sum([(await read_counts(client, name)).get(number, 0) for name in names]) > 0

        async def load(number: int) -> None:
            own = random.Random(number)
            while not stop:
                prompt = "".join(own.choices(WORDS, k=own.randrange(1, 40))) * own.choice((1, 9))
                ends["error" if await ask(client, prompt, own.randrange(1, 60)) < 0 else "answer"] += 1

        loads = [asyncio.ensure_future(load(i)) for i in range(12)]
        for kill in range(kills):
            await until(lambda: len(server.alive("engine")) == 2)
            await until(lambda: is_in(client, "serving"))
            await asyncio.sleep(rng.random() / 3)
            hold.touch()  # until its end was seen: none of its requests ends by itself, and the next one does not serve
            for number in (0, 1):
                await until(lambda number=number: computes(number))
            victim = server.alive("engine")[kill % 2]
            os.kill(victim, signal.SIGKILL)
            await until(lambda: is_in(client, "degraded"))
            ready = await client.get("/ready")
            assert ready.status_code == 200 and ready.json() == {"status": "degraded"}
            told = (await client.get("/status")).json()["replicas"]
            assert told.count("serving") == 1 and "serving" not in told[1 - told.index("serving")]
            hold.unlink()
            answers = ends["answer"]
            await until(lambda so_far=answers: ends["answer"] > so_far + 20 or loads[0].done())
        await until(lambda: is_in(client, "serving"))
        stop = True
        async with asyncio.timeout(60):
            await asyncio.gather(*loads)
        assert kills <= ends["error"] <= kills * 12 and ends["answer"] > 20, ends
        up = {int(i): up for i, up in (await read_counts(client, "wicore_engine_up")).items()}
        assert up == {0: 1, 1: 1}
        [front] = server.alive("front")
        os.kill(front, signal.SIGKILL)  # the next one links to both
        await until(lambda: server.alive("front") not in ([], [front]))
        await until(lambda: is_in(client, "serving"))
        assert await ask(client, "after all") == 0
        server.process.terminate()
        assert (await server.end())[0] == 0


async def is_in(client: httpx.AsyncClient, state: str) -> bool:
    with suppress(httpx.HTTPError):
        return (await client.get("/status")).json()["state"] == state
    return False


async def test_each_replica_has_its_own_events_and_ranks_of_the_worker_protocol(tmp_path):
    async with (
        replicated(tmp_path, step_s=0.002, quick_s=0.0) as (server, client),
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        worker, held = vllm_engine_pb2_grpc.VllmEngineStub(channel), {0: set(), 1: set()}
        assert (await worker.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())).data_parallel_size == 2

        async def follow() -> None:
            async for batch in worker.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()):
                assert batch.HasField("dp_rank")
                for event in batch.events:
                    if event.HasField("cleared"):
                        held[batch.dp_rank].clear()
                    held[batch.dp_rank].update(b.block_hash for b in event.stored.blocks)

        following = asyncio.ensure_future(follow())
        for rank in (0, 1):
            tokens = vllm_engine_pb2.TokenizedInput(input_ids=[10 + rank] * 40)
            asked = vllm_engine_pb2.GenerateRequest(tokenized=tokens, data_parallel_rank=rank)
            asked.sampling_params.max_tokens = 2
            async for _ in worker.Generate(asked):
                pass
            await until(lambda rank=rank: held[rank])
            assert bool(held[1 - rank]) == bool(rank)
        loads = (await worker.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads
        assert [load.dp_rank for load in loads] == [0, 1]
        loads = (await worker.GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=1))).loads
        assert [load.dp_rank for load in loads] == [1]
        async with server.stub() as stub:
            first = stub.SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest())
            try:
                await first.read()
                raise AssertionError
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "2 replicas" in error.details()
            epochs = set()
            for replica in (0, 1):
                asked = kv_pb2.SubscribeKVEventsRequest(replica=replica)
                epochs.add((await stub.SubscribeKVEvents(asked).read()).epoch)
            assert len(epochs) == 2
        told = (await client.get("/status")).json()["replicas"]
        assert told == ["serving", "serving"]
        os.kill(server.alive("engine")[0], signal.SIGKILL)
        await until(lambda: not held[0] or not held[1])
        assert (held[0] or held[1]) and not following.done()
        await until(lambda: is_in(client, "serving"))
        following.cancel()
