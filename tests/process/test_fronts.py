"""A server of several fronts at the same ports, as real processes over the fake engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from contextlib import AsyncExitStack, suppress

import grpc
import httpx
import pytest
from process.test_admin import administered, until
from process.test_reload import ALICE, BOB, log_line, write_keys
from process.test_supervisor import ENDED, Server, answer, runs, serving, supervised
from prometheus_client.parser import text_string_to_metric_families
from serve.serving import expected, request

from wicore_trt.config import ServerSettings
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2

FRONTS = 3
CHANNELS = 24
"""Of so many connections each front has some, but once in 10,000 times."""


async def stubs(stack: AsyncExitStack, server: Server, count: int = CHANNELS) -> list:
    """Clients with a connection each."""
    return [await stack.enter_async_context(server.stub()) for _ in range(count)]


def alive(server: Server) -> list[int]:
    return sorted(server.alive("front"))


async def counted(client: httpx.AsyncClient, name: str) -> Counter[str]:
    """The samples of a metric by front."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels.get("front", "")] += int(sample.value)
    return found


async def test_all_of_them_serve_and_are_counted_and_told_to_end(tmp_path):
    async with administered(tmp_path, server={"fronts": FRONTS, "grace_s": 60.0}, step_s=0.01) as (server, client):
        assert len(alive(server)) == FRONTS
        async with AsyncExitStack() as stack:
            clients = await stubs(stack, server)
            texts = await asyncio.gather(*(answer(stub, f"prompt {i}", 20) for i, stub in enumerate(clients)))
            assert texts == [expected(f"prompt {i}", 20)[0] for i in range(CHANNELS)]
            calls = await counted(client, "wicore_grpc_calls_total")
            assert set(calls) == {"1", "2", "3"} and min(calls.values()) > 0 and calls.total() == CHANNELS
            first = await counted(client, "wicore_time_to_first_token_seconds_count")
            assert first.total() == CHANNELS and first == await counted(
                client, "vllm:time_to_first_token_seconds_count"
            )
            assert await counted(client, "wicore_generated_tokens_total") == {"": 20 * CHANNELS}
            ups = (await client.get("/metrics")).text
            assert all(f'wicore_process_up{{process="{name}"}} 1.0' in ups for name in ("front", "front-2", "front-3"))
            assert all(f'wicore_process_resident_bytes{{process="front{n}"}}' in ups for n in ("", "-2", "-3"))
            await ids_are_of_all(clients)
            await one_that_hangs(server, client, clients)
            last = [asyncio.ensure_future(answer(stub, "the last one", 100)) for stub in clients]
            while (await clients[0].GetStats(pb2.GetStatsRequest())).streams_open < CHANNELS:  # of all fronts
                await asyncio.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)
            assert set(await asyncio.gather(*last)) == {expected("the last one", 100)[0]}
        code, log = await server.end()
        assert code == 0 and "Traceback" not in log, log


async def test_one_that_is_killed_ends_its_own_streams_alone(tmp_path):
    """While others go on, whichever it is, the first one too."""
    async with supervised(tmp_path, server={"fronts": FRONTS}, step_s=0.002) as server, AsyncExitStack() as stack:
        await serving(server)
        over, outcomes = False, Counter[object]()

        async def client(number: int) -> None:
            stub, turn = await stack.enter_async_context(server.stub()), 0
            while not over:
                turn += 1
                try:
                    text = await answer(stub, f"{number} {turn}", 30)
                except grpc.aio.AioRpcError as error:
                    outcomes[error.code()] += 1
                    await asyncio.sleep(0.02)
                else:
                    assert text == expected(f"{number} {turn}", 30)[0]
                    outcomes["whole"] += 1

        clients = [asyncio.ensure_future(client(number)) for number in range(CHANNELS)]
        for victim in range(FRONTS):
            before = alive(server)
            await asyncio.sleep(0.3)
            whole, os_id = outcomes["whole"], before[victim % FRONTS]
            os.kill(os_id, signal.SIGKILL)
            while runs(os_id):
                await asyncio.sleep(0.005)
            async with asyncio.timeout(60):
                while len(alive(server)) < FRONTS or outcomes["whole"] < whole + 2 * CHANNELS:
                    await asyncio.sleep(0.02)
            assert set(alive(server)) > set(before) - {os_id}, "the others are the same"
        over = True
        async with asyncio.timeout(60):
            await asyncio.gather(*clients)
        await joined_to_the_next_engine(server, await stubs(stack, server))
        failed = outcomes.total() - outcomes["whole"]
        assert set(outcomes) <= {"whole", *ENDED} and 0 < failed < outcomes["whole"], outcomes
        server.process.send_signal(signal.SIGTERM)
        code, log = await server.end()
        assert code == 0 and log.count("starting it again") == FRONTS + 1, log


async def test_all_that_begin_anew_with_their_template_listen_together(tmp_path):
    """None takes another one for a stranger who has the port."""
    async with supervised(tmp_path, server={"fronts": FRONTS + 1, "http_port": 0}) as server:
        url = await server.line("bound")
        await server.line("ready on")
        for turn in range(4):
            [template], before = server.alive("template"), alive(server)
            os.kill(template, signal.SIGKILL)
            await until(lambda gone=before: not_any(server, gone))
            await until(lambda: whole(server, url))
            assert len(alive(server)) == FRONTS + 1, turn
        server.process.send_signal(signal.SIGTERM)
        code, log = await server.end()
        assert code == 0 and "is in use" not in log, log
        assert log.count("starting it again") == 4 * (FRONTS + 2), log


async def not_any(server: Server, gone: list[int]) -> bool:
    now = alive(server)
    return len(now) == FRONTS + 1 and not set(now) & set(gone)


async def joined_to_the_next_engine(server: Server, clients: list) -> None:
    """All of them are, and none of them ends."""
    fronts, [engine] = alive(server), server.alive("engine")
    os.kill(engine, signal.SIGKILL)

    async def served(stub) -> None:
        while True:
            with suppress(grpc.aio.AioRpcError):
                assert await answer(stub, "again", 9) == expected("again", 9)[0]
                if server.alive("engine") not in ([], [engine]):
                    return
            await asyncio.sleep(0.05)

    async with asyncio.timeout(60):
        await asyncio.gather(*map(served, clients))
    assert alive(server) == fronts


async def ids_are_of_all(clients: list) -> None:
    """A request has its id at every front."""
    stream = clients[0].Generate(request("mine", 3000, request_id="mine"))
    await stream.read()

    async def again(stub) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request("mine", 5, request_id="mine")).read()
        return caught.value.code().name

    assert {await again(stub) for stub in clients} == {"ALREADY_EXISTS"}
    assert not (await clients[1].Abort(pb2.AbortRequest(request_id="another"))).aborted
    for stub in clients[1:]:  # of each front: the first one ends it, and it is found until its end was told
        found = (await stub.Abort(pb2.AbortRequest(request_id="mine"))).aborted
        if stub is clients[1]:
            assert found
    async with asyncio.timeout(60):
        while (message := await stream.read()) is not grpc.aio.EOF:
            last = message
    assert last.finish.reason == pb2.FINISH_REASON_CANCELLED

    for turn in range(2 * CHANNELS):  # a name is free as soon as its request has ended, however it did
        stub, fields = clients[turn % CHANNELS], {"request_id": "mine", "stop": ["zzz"]}
        [_ async for _ in stub.Generate(request(f"turn {turn}", 4, **fields))]
    leaver = clients[0].Generate(request("leaves", 3000, request_id="mine"))
    await leaver.read()
    leaver.cancel()
    async with asyncio.timeout(60):
        while await ask_named(clients[-1]) != "whole":
            await asyncio.sleep(0.01)


async def ask_named(stub) -> str:
    try:
        [_ async for _ in stub.Generate(request("free", 3, request_id="mine"))]
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        return "taken"
    return "whole"


async def test_rates_are_of_all_together(tmp_path):
    """Also when one ended and the next one has come, and after they were changed."""
    recipe, keys = tmp_path / "server.yaml", tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(f"alice:{ALICE}\nbob:{BOB}:requests=5\n")
    recipe.write_text("server:\n  requests_per_minute: 12\n")
    options = {"keys_file": str(keys), "fronts": FRONTS, "http_port": 0}
    # of a minute as long as this nothing comes back while the test runs, however slow the machine is
    async with supervised(tmp_path, server=options, recipe=str(recipe), minute_s=60_000.0) as server:
        url = await server.line("bound")
        await server.line("ready on")

        async def ask(key: str) -> httpx.Response:
            async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=60) as client:  # a connection of its own
                body = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True}
                return await client.post(f"{url}/v1/completions", json=body)

        async def ends(key: str, count: int) -> Counter[int]:
            found = await asyncio.gather(*(ask(key) for _ in range(count)))
            return Counter(one.status_code for one in found)

        assert await ends(ALICE, 8) == {200: 8}
        left = [int((await ask(ALICE)).headers["x-ratelimit-remaining-requests"]) for _ in range(2)]
        assert left == [3, 2]
        os.kill(alive(server)[0], signal.SIGKILL)
        await until(lambda: three(server))
        await until(lambda: whole(server, url))
        assert await ends(ALICE, 10) == {200: 2, 429: 8}
        assert await ends(BOB, 9) == {200: 5, 429: 4}, "a key's own"
        recipe.write_text("server:\n  requests_per_minute: 60000000\n")
        server.process.send_signal(signal.SIGHUP)
        await log_line(server, "were read again")
        await until(lambda: equal(ends(ALICE, 12), {200: 12}))


@pytest.mark.parametrize("fronts", [1, 2])
async def test_rates_outlive_fronts_and_template(tmp_path, fronts):
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(f"alice:{ALICE}\nbob:{BOB}:requests=3\n")
    options = {"keys_file": str(keys), "fronts": fronts, "http_port": 0, "requests_per_minute": 3}
    async with supervised(tmp_path, server=options) as server:
        url = await server.line("bound")
        await server.line("ready on")

        async def ask(key: str) -> int:
            async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=60) as client:
                body = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True}
                return (await client.post(f"{url}/v1/completions", json=body)).status_code

        async def back(name: str) -> None:
            before = alive(server)[: 1 if name == "front" else None]
            os.kill(before[0] if name == "front" else server.alive("template")[0], signal.SIGKILL)
            await until(lambda: gone(server, before, fronts))
            await until(lambda: whole(server, url))

        assert [await ask(key) for key in (ALICE, BOB, ALICE, BOB)] == [200] * 4
        await back("front")
        assert [await ask(key) for key in (ALICE, BOB, ALICE, BOB)] == [200, 200, 429, 429]
        await back("template")
        assert [await ask(key) for key in (ALICE, BOB)] == [429, 429]


async def test_a_template_that_cannot_fork_ends_no_front(tmp_path):
    """The memory or the number of processes may not allow it for a while."""
    async with supervised(tmp_path, server={"fronts": 2}, fork_fails=[3, 5]) as server, AsyncExitStack() as stack:
        await serving(server)
        before, [template] = alive(server), server.alive("template")
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: gone(server, before[:1], 2))
        assert before[1] in alive(server) and server.alive("template") == [template]
        clients = await stubs(stack, server)
        assert set(await asyncio.gather(*(answer(stub, "back", 5) for stub in clients))) == {expected("back", 5)[0]}
        server.process.send_signal(signal.SIGTERM)
        code, log = await server.end()
        assert code == 0 and log.count("No front can be made: [Errno 12]") == 3, log


async def test_a_server_whose_first_front_cannot_be_forked_says_so(tmp_path):
    async with supervised(tmp_path, fork_fails=[1, 99]) as server:
        code, log = await server.end()
        assert code == 4 and log.strip().splitlines()[-1].startswith("error: No front can be made: [Errno 12]"), log


async def gone(server: Server, before: list[int], fronts: int) -> bool:
    now = alive(server)
    return len(now) == fronts and not set(now) & set(before)


async def three(server: Server) -> bool:
    return len(alive(server)) == FRONTS


async def whole(server: Server, url: str) -> bool:
    """Whether each of some connections finds a front that serves."""
    for _ in range(CHANNELS):
        with suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=60) as client:
                if (await client.get(f"{url}/ready")).status_code == 200:
                    continue
        return False
    return True


async def test_keys_that_are_read_again_and_draining_reach_all(tmp_path):
    keys = tmp_path / "keys"
    write_keys(keys, ALICE)
    headers = {"x-api-key": ALICE}
    options = {"keys_file": str(keys), "fronts": FRONTS, "api_key": "o" * 20}
    async with administered(tmp_path, server=options, step_s=0.01) as (server, client), AsyncExitStack() as stack:
        client.headers["x-api-key"] = "o" * 20
        clients = await stubs(stack, server)

        async def codes(key: str) -> set[grpc.StatusCode]:
            found = set()
            for stub in clients:
                try:
                    await stub.GetModelInfo(pb2.GetModelInfoRequest(), metadata=[("x-api-key", key)])
                    found.add(grpc.StatusCode.OK)
                except grpc.aio.AioRpcError as error:
                    found.add(error.code())
            return found

        assert await codes(BOB) == {grpc.StatusCode.UNAUTHENTICATED}
        write_keys(keys, ALICE, BOB)
        assert (await client.post("/reload")).status_code == 200
        await until(lambda: equal(codes(BOB), {grpc.StatusCode.OK}))
        said = list(headers.items())
        streams = [stub.Generate(request(f"{i}", 120), metadata=said) for i, stub in enumerate(clients)]
        await asyncio.gather(*(stream.read() for stream in streams))
        assert (await client.post("/drain")).json() == {"state": "draining", "idle": False}
        waiting = asyncio.ensure_future(client.post("/drain", params={"wait": 60}))

        async def refused() -> bool:
            found = set()
            for stub in clients:
                try:
                    await stub.Generate(request("late", 1), metadata=list(headers.items())).read()
                    return False
                except grpc.aio.AioRpcError as error:
                    found.add(error.code())
            return found == {grpc.StatusCode.UNAVAILABLE}

        await until(refused)
        assert not waiting.done()
        for stream in streams:
            while (message := await stream.read()) is not grpc.aio.EOF:
                last = message
            assert last.finish.reason == pb2.FINISH_REASON_LENGTH
        assert (await waiting).json()["idle"] is True
        told = await asyncio.gather(*(stub.GetStats(pb2.GetStatsRequest(), metadata=said) for stub in clients))
        assert {(found.generated_tokens, found.streams_open) for found in told} == {(120 * CHANNELS, 0)}


async def equal(found, wanted) -> bool:
    return await found == wanted


async def one_that_hangs(server: Server, client: httpx.AsyncClient, clients: list) -> None:
    """It holds up no scrape and no statistics."""
    generated = (await clients[0].GetStats(pb2.GetStatsRequest())).generated_tokens
    [first, *_] = alive(server)
    os.kill(first, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):
            calls = await counted(client, "wicore_grpc_calls_total")
        assert len(calls) == FRONTS - 1
        told = await asyncio.gather(
            *(stub.GetStats(pb2.GetStatsRequest(), timeout=5) for stub in clients), return_exceptions=True
        )
        whole = [found for found in told if not isinstance(found, BaseException)]
        assert 0 < len(whole) < CHANNELS and {found.generated_tokens for found in whole} == {generated}
    finally:
        os.kill(first, signal.SIGCONT)
    await until(lambda: equal(number(counted(client, "wicore_grpc_calls_total")), FRONTS))
    assert alive(server)[0] == first


async def number(found) -> int:
    return len(await found)


def test_a_unix_socket_is_one_front_s():
    with pytest.raises(ValueError, match="fronts"):
        ServerSettings(host="unix:/tmp/x", fronts=2)
    with pytest.raises(ValueError, match="fronts"):
        ServerSettings(http_host="unix:/tmp/x", fronts=2)
    assert json.dumps(ServerSettings(host="unix:/tmp/x").fronts) == "1"
