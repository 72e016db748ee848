"""Two workers of `wicore serve` behind a router of our own that speaks the worker protocol and follows KV events.

The router is the least that one can be: it sends a prompt to the healthy worker that told of its longest prefix, of
equals to the one with fewest streams, and passes on what comes, errors too.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from fleet import free_port
from serve.serving import details_of, until
from smg_grpc_proto import vllm_engine_pb2 as pb2
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tiny_source import CONFIG, write_tiny_source

from wicore_trt.engine.build import build_engine

PAGE, CONTEXT, SEQUENCES, WAITING = 8, 4096, 2, 2
QUICK = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100),
         ("grpc.use_local_subchannel_pool", 1)]  # fmt: skip
LONG = CONTEXT - 100
"""Tokens of streams that are to be there still when something else has happened."""
LIMIT_S = 60.0


class Worker:
    """A server process that can be started again at the same port."""

    def __init__(self, engine: Path, folder: Path, number: int) -> None:
        self.address, self.log = f"127.0.0.1:{(port := free_port())}", folder / f"{number}.log"
        self.command = [sys.executable, "-m", "wicore_trt.cli.main", "serve", str(engine), "--grpc-port", str(port)]
        self.command += ["--http-port", "none", "--max-sequences", str(SEQUENCES), "--max-waiting", str(WAITING)]
        self.command += ["--kv-bytes", "16MiB"]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "WICORE_KV__PAGE_TOKENS": str(PAGE)}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)

    def wait(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        assert "ready on" in self.process.stdout.readline(), self.log.read_text()

    def kill(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            assert not psutil.wait_procs(children, LIMIT_S)[1], "processes are left"
        self.process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    folder = tmp_path_factory.mktemp("fleet")
    source = write_tiny_source(folder / "source")
    (source / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": CONTEXT}))
    build_engine(source, folder / "engine")
    workers = [Worker(folder / "engine", folder, number) for number in range(2)]
    try:
        yield workers
    finally:
        for worker in workers:
            if worker.process is not None:
                worker.kill()


@pytest.fixture
def workers(started: list[Worker]) -> list[Worker]:
    """Both, serving: those that a test ended are started again."""
    ended = [worker for worker in started if worker.process is None or worker.process.poll() is not None]
    for worker in ended:
        worker.start()
    for worker in ended:
        worker.wait()
    return started


class Backend:
    """What the router knows of a worker: whether it takes requests, how many it has, and its pages by its events."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=QUICK)
        self.stub = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)
        self.healthy, self.streams, self.snapshots = False, 0, 0
        self.pages: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    async def watch(self) -> None:
        while True:
            try:
                self.healthy = (await self.stub.HealthCheck(pb2.HealthCheckRequest(), timeout=LIMIT_S)).healthy
            except grpc.aio.AioRpcError:
                self.healthy = False
            await asyncio.sleep(0.02)

    async def follow(self) -> None:
        while True:
            with suppress(grpc.aio.AioRpcError):
                async for batch in self.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()):
                    self.snapshots += batch.HasField("snapshot") and not batch.snapshot.index
                    for event in batch.events:
                        self.take(event)
            await asyncio.sleep(0.02)

    def take(self, event: common_pb2.KvCacheEvent) -> None:
        """Pages of full attention; all are on the device."""
        match event.WhichOneof("data"):
            case "cleared":
                self.pages.clear()
            case "stored" if event.stored.group_idx == 0:
                parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                for block in event.stored.blocks:
                    self.pages[block.block_hash] = parent, tuple(block.token_ids)
                    parent = block.block_hash
            case "removed" if event.removed.group_idx == 0:
                for name in event.removed.block_hashes:
                    self.pages.pop(name, None)

    def known(self, prompt: list[int]) -> int:
        """Tokens of the longest prefix whose pages it told of."""
        names = {entry: name for name, entry in self.pages.items()}
        parent, at = None, 0
        while (name := names.get((parent, tuple(prompt[at : at + PAGE])))) is not None:
            parent, at = name, at + PAGE
        return at


class Router:
    """It owns no request: a stream ends as that of its worker does."""

    def __init__(self, backends: list[Backend]) -> None:
        self.backends = backends

    def choose(self, prompt: list[int]) -> Backend:
        healthy = [backend for backend in self.backends if backend.healthy]
        return max(healthy, key=lambda backend: (backend.known(prompt), -backend.streams))

    async def ask(self, prompt: list[int], max_tokens: int, name: str, **hooks: Any) -> Answer:
        backend = self.choose(prompt)
        backend.streams += 1
        try:
            return await generate(backend, prompt, max_tokens, name, **hooks)
        finally:
            backend.streams -= 1


class Answer:
    """A stream: from whom, its tokens, and how it ended: with the last message or with an error."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.tokens = backend, list[int]()
        self.end: pb2.GenerateComplete | None = None
        self.error: grpc.aio.AioRpcError | None = None


async def generate(
    backend: Backend, prompt: list[int], max_tokens: int, name: str, began: Callable[[Answer], object] = id
) -> Answer:
    """`began` is told of the answer with its first token."""
    answer = Answer(backend)
    params = pb2.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    asked = pb2.GenerateRequest(
        request_id=name, tokenized=pb2.TokenizedInput(input_ids=prompt), sampling_params=params, stream=True
    )
    try:
        async for message in backend.stub.Generate(asked, timeout=4 * LIMIT_S):
            if message.HasField("chunk"):
                answer.tokens += message.chunk.token_ids
                if len(answer.tokens) == len(message.chunk.token_ids):
                    began(answer)
            else:
                answer.end = message.complete
    except grpc.aio.AioRpcError as error:
        answer.error = error
    return answer


@asynccontextmanager
async def routing(workers: list[Worker]) -> AsyncIterator[Router]:
    """A router that has heard of both workers."""
    backends = [Backend(worker.address) for worker in workers]
    tasks = [asyncio.ensure_future(work()) for backend in backends for work in (backend.watch, backend.follow)]
    try:
        await until(lambda: all(backend.healthy and backend.snapshots for backend in backends))
        yield Router(backends)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for backend in backends:
            await backend.channel.close()


def new_prompt(length: int) -> list[int]:
    return [2, *(random.randrange(7, 23) for _ in range(length - 1))]


async def load_of(backend: Backend) -> int:
    return (await backend.stub.GetLoads(pb2.GetLoadsRequest())).loads[0].num_total_reqs


async def begin(router: Router, count: int, max_tokens: int) -> tuple[list[asyncio.Task[Answer]], list[Answer]]:
    """Streams that all have sent something."""
    found: list[Answer] = []
    asked = [router.ask(new_prompt(20), max_tokens, f"long{i}", began=found.append) for i in range(count)]
    tasks = [asyncio.ensure_future(one) for one in asked]
    await until(lambda: len(found) == count)
    return tasks, found


async def test_tokens_are_those_of_one_worker(workers):
    async with routing(workers) as router:
        prompts = [new_prompt(random.randint(1, 60)) for _ in range(2 * WAITING)]
        answers = await asyncio.gather(*(router.ask(p, 24, f"r{i}") for i, p in enumerate(prompts)))
        assert {answer.backend for answer in answers} == {*router.backends}
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer.error is None and answer.end.finish_reason == "length" and len(answer.tokens) == 24
            assert answer.tokens == (await generate(router.backends[0], prompt, 24, f"alone{i}")).tokens


async def test_prompts_go_where_their_prefix_is_and_find_it(workers):
    async with routing(workers) as router:
        for number in range(4):
            prompt = new_prompt(6 * PAGE + 1)
            first = await router.ask(prompt, 1, f"first{number}")
            assert first.end.cached_tokens == 0
            await until(lambda backend=first.backend, prompt=prompt: backend.known(prompt) == 6 * PAGE)
            assert [backend.known(prompt) > 0 for backend in router.backends].count(True) == 1
            for turn in range(2):  # while the other one has less to do
                prompt += new_prompt(PAGE)
                found = await router.ask(prompt, 1, f"again{number}{turn}")
                assert found.backend is first.backend and found.end.cached_tokens >= 6 * PAGE
                first.backend.streams += 1


async def test_abort_and_a_client_that_leaves(workers):
    async with routing(workers) as router:
        [aborted, left], answers = await begin(router, 2, LONG)
        assert len({answer.backend for answer in answers}) == 2
        for backend in router.backends:
            await backend.stub.Abort(pb2.AbortRequest(request_ids=["long0"]))
        answer = await aborted
        assert answer.error is None and answer.end.finish_reason == "abort" and len(answer.tokens) < LONG
        left.cancel()
        for backend in router.backends:
            await until(lambda backend=backend: _idle(backend))


async def _idle(backend: Backend) -> bool:
    return await load_of(backend) == 0


async def test_overload_is_passed_on_with_the_time_to_come_back(workers):
    async with routing(workers) as router:
        room = 2 * (SEQUENCES + WAITING)
        tasks, _ = await begin(router, 2 * SEQUENCES, LONG)
        tasks += [asyncio.ensure_future(router.ask(new_prompt(20), 9, f"waits{i}")) for i in range(2 * WAITING)]

        async def full() -> bool:
            return sum([await load_of(backend) for backend in router.backends]) == room

        await until(full)
        refused = await router.ask(new_prompt(20), 9, "refused")
        assert refused.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not refused.tokens
        assert retry_ms(refused.error) > 0
        for task in tasks:
            task.cancel()
        for backend in router.backends:
            await until(lambda backend=backend: _idle(backend))


def retry_ms(error: grpc.aio.AioRpcError) -> int:
    from google.rpc import status_pb2

    packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
    return details_of(status_pb2.Status.FromString(packed))["RetryInfo"].retry_delay.ToMilliseconds()


async def test_a_worker_that_is_killed_ends_its_streams_alone_and_comes_back_with_its_share(workers):
    victim = random.randrange(2)
    async with routing(workers) as router:
        dead, alive = router.backends[victim], router.backends[1 - victim]
        known = new_prompt(4 * PAGE + 1)
        await generate(dead, known, 1, "known")
        await until(lambda: dead.known(known) > 0)
        tasks, begun = await begin(router, 2 * SEQUENCES, LONG)
        assert [answer.backend for answer in begun].count(dead) == SEQUENCES
        await asyncio.to_thread(workers[victim].kill)
        ended = [answer for answer in begun if answer.backend is dead]
        await until(lambda: not dead.healthy and all(answer.error is not None for answer in ended))
        assert all(answer.error.code() is grpc.StatusCode.UNAVAILABLE and answer.end is None for answer in ended)
        await alive.stub.Abort(pb2.AbortRequest(request_ids=[f"long{i}" for i in range(2 * SEQUENCES)]))
        for answer in await asyncio.gather(*tasks):
            assert answer.backend is dead or answer.error is None and answer.end is not None
        elsewhere = await router.ask(known, 5, "elsewhere")
        assert elsewhere.backend is alive and elsewhere.error is None
        before = dead.snapshots
        workers[victim].start()
        await asyncio.to_thread(workers[victim].wait)
        await until(lambda: dead.healthy and dead.snapshots > before)
        assert not dead.known(known), "its pages went with it"
        tasks, begun = await begin(router, 2 * SEQUENCES, 30)
        assert [answer.backend for answer in begun].count(dead) == SEQUENCES
        assert all(answer.error is None for answer in await asyncio.gather(*tasks))


async def test_a_worker_that_drains_loses_nothing(workers):
    async with routing(workers) as router:
        tasks, begun = await begin(router, 2 * SEQUENCES, 300)
        leaving, staying = router.backends
        workers[0].process.send_signal(signal.SIGTERM)
        await until(lambda: not leaving.healthy)
        assert (await router.ask(new_prompt(20), 9, "later")).backend is staying
        assert all(answer.error is None and len(answer.tokens) == 300 for answer in await asyncio.gather(*tasks))
        assert {answer.backend for answer in begun} == {leaving, staying}
        assert await asyncio.to_thread(workers[0].process.wait, LIMIT_S) == 0
