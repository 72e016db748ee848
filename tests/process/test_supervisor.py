"""Supervisor, engine and front as real processes over the fake engine, some of them killed (I24)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import signal
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serve.serving import expected, failure, request
from suspend import suspend_process

from wicore_trt import child_process
from wicore_trt.child_process import find_halt
from wicore_trt.errors import EngineDeadError
from wicore_trt.process.child import PATIENCE, QUICK_S, ChildSlot
from wicore_trt.serve.front import FIRST_TO_GO
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc

HERE = Path(__file__).parent
SERVING = health_pb2.HealthCheckResponse.SERVING
QUICK = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100),
         ("grpc.use_local_subchannel_pool", 1)]  # fmt: skip
ENDED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Server:
    """A supervised server and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, pids: Path) -> None:
        self.process, self._pids = process, pids
        self.address = ""
        self._log: list[str] = []  # lines that were read

    async def line(self, kind: str) -> str:
        async with asyncio.timeout(60):
            text = (await self.process.stdout.readline()).decode().strip()
        assert text.startswith(kind), (text, (await self.process.stderr.read()).decode() if not text else "")
        return text.removeprefix(kind).strip()

    async def log_line(self, text: str) -> str:
        """Read the log up to a line that has this text."""
        async with asyncio.timeout(60):
            while line := (await self.process.stderr.readline()).decode():
                self._log.append(line)
                if text in line:
                    return line
        raise AssertionError(f"no line says {text!r}")

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
        async with grpc.aio.insecure_channel(self.address, options=QUICK) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)

    async def until_serving(self) -> None:
        async with asyncio.timeout(60), grpc.aio.insecure_channel(self.address, options=QUICK) as channel:
            stub, wanted = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
            while True:
                with suppress(grpc.aio.AioRpcError):
                    if (await stub.Check(wanted, timeout=5, wait_for_ready=True)).status == SERVING:
                        return
                await asyncio.sleep(0.05)

    def started(self, name: str) -> list[int]:
        """Processes of this name that have begun to load."""
        return [int(path.name.rpartition("-")[2]) for path in self._pids.glob(f"{name}-*")]

    def alive(self, name: str) -> list[int]:
        """Processes of this name that run."""
        return [pid for pid in self.started(name) if runs(pid)]

    def short_of_memory(self) -> Path:
        """File while which is there no engine loads."""
        return self._pids / "short"

    async def all_gone(self) -> None:
        async with asyncio.timeout(60):
            while any(map(self.alive, ("engine", "front"))):
                await asyncio.sleep(0.05)

    async def end(self) -> tuple[int, str]:
        async with asyncio.timeout(60):
            _, log = await self.process.communicate()
        return self.process.returncode, "".join(self._log) + log.decode()


@asynccontextmanager
async def supervised(tmp_path: Path, **options) -> AsyncIterator[Server]:
    path = os.pathsep.join([str(HERE.parent), str(HERE.parent / "serve"), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "fake_parts.py"), json.dumps({"pids": str(tmp_path), **options}),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    server = Server(process, tmp_path)
    try:
        yield server
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
        await server.all_gone()


async def serving(server: Server) -> None:
    server.address = await server.line("bound")
    await server.line("ready on")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting(tmp_path_factory) -> AsyncIterator[Server]:
    """Server of the tests after which it serves as before."""
    options = {"step_s": 0.002, "slow_s": 1.0, "quick_s": 0.0, "level": "warning"}  # `slow_s`: until the next attempt
    async with supervised(tmp_path_factory.mktemp("lasting"), **options) as server:
        await serving(server)
        yield server


async def answer(stub, prompt: str, count: int) -> str:
    return "".join([r.delta.text or r.finish.delta.text async for r in stub.Generate(request(prompt, count))])


@pytest.mark.parametrize("name", ["engine", pytest.param("front", marks=pytest.mark.long)])
async def test_a_process_that_ends_whenever_it_starts_is_given_up(tmp_path, name):
    async with supervised(tmp_path, dies=name, patience=1, together_s=0.3) as server:  # the last words come last
        code, log = await server.end()
        assert code == EngineDeadError.exit_code
        assert log.splitlines()[-1].startswith(f"error: The {name} ended 2 times before it was ready (")
        assert len(list(tmp_path.glob(f"{name}-*"))) == 2
        await server.all_gone()


@pytest.mark.long
async def test_an_engine_that_is_killed_again_and_again_is_started_after_longer_and_longer_pauses(tmp_path):
    """As the system does where memory runs out each time. The log says so."""
    async with supervised(tmp_path, patience=1, together_s=0.1, quick_s=1000.0) as server:
        await serving(server)
        for _ in range(2):
            [engine] = server.alive("engine")
            os.kill(engine, signal.SIGKILL)
            async with asyncio.timeout(60):
                while server.alive("engine") in ([], [engine]):
                    await asyncio.sleep(0.03)
            await server.until_serving()
        server.process.send_signal(signal.SIGTERM)
        _, log = await server.end()
        told = re.findall(r"the engine ended \((.*)\); starting it again(.*)", log)
        assert {why for why, _ in told} == {"killed by SIGKILL, probably out of memory"}
        assert [pause for _, pause in told] == ["", " in 1 s"]


def test_pauses_grow_to_a_minute_and_end_with_a_life_that_lasts(monkeypatch):
    slot = ChildSlot()
    assert [slot.choose_pause() for _ in range(PATIENCE + 8)] == [0.0] * PATIENCE + [1, 2, 4, 8, 16, 32, 60, 60]
    slot.ready_at = now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert slot.choose_pause() == 60  # so soon after it was ready
    monkeypatch.setattr(time, "monotonic", lambda: now + QUICK_S + 1)
    assert slot.choose_pause() == 0


FEW = ("front", "engine")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "kills",
    [pytest.param(FEW, id="few"), pytest.param(("front",) * 50 + ("engine",) * 20, id="many", marks=pytest.mark.long)],
)
async def test_what_is_killed_is_started_again_and_only_its_streams_end(lasting, kills):
    """Streams under way end with an error that says so, at once; what comes later is right."""
    rng = random.Random()
    server = lasting
    outcomes: list[object] = []
    over = False

    async def client(number: int) -> None:
        while not over:
            prompt = f"{number} {rng.random()}"
            try:
                async with server.stub() as stub:
                    text = await answer(stub, prompt, 40)
            except grpc.aio.AioRpcError as error:
                outcomes.append(error.code())
                await asyncio.sleep(0.05)
            else:
                assert text == expected(prompt, 40)[0]
                outcomes.append(True)

    clients = [asyncio.ensure_future(client(i)) for i in range(4)]
    back: list[float] = []
    started = len(server.started("front") + server.started("engine"))
    for name in rng.sample(kills, len(kills)):
        await asyncio.sleep(rng.uniform(0.1, 0.4))
        async with asyncio.timeout(60):
            while True not in outcomes:
                await asyncio.sleep(0.02)
        [pid] = server.alive(name)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while server.alive(name) in ([], [pid]):
                await asyncio.sleep(0.05)
        await server.until_serving()
        back.append(time.monotonic() - killed)
    print(f"back after {statistics.median(back):.2f} s (median), {max(back):.2f} s at most")
    over = True
    async with asyncio.timeout(60):
        await asyncio.gather(*clients)
    assert True in outcomes and {o for o in outcomes if o is not True} <= set(ENDED), outcomes
    started = len(server.started("front") + server.started("engine")) - started
    assert len(kills) <= started <= len(kills) + 1 and server.process.returncode is None


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_finds_no_memory_after_one_that_served_is_started_again(lasting):
    short = lasting.short_of_memory()
    short.touch()
    os.kill(lasting.alive("engine")[0], signal.SIGKILL)
    assert "starting it again" in await lasting.log_line("could not be loaded: MemoryError")
    short.unlink()
    back = ""
    async with lasting.stub() as stub, asyncio.timeout(60):
        while not back:
            with suppress(grpc.aio.AioRpcError):
                back = await answer(stub, "back", 20)
            await asyncio.sleep(0.05)
    assert back == expected("back", 20)[0]


async def test_an_engine_that_breaks_says_why_and_the_next_one_serves(tmp_path):
    async with supervised(tmp_path, fail_at=8) as server:
        await serving(server)
        [first] = server.alive("engine")
        async with server.stub() as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer(stub, "breaks it", 50)
            assert "device lost" in caught.value.details()
            async with asyncio.timeout(60):
                while server.alive("engine") in ([], [first]):
                    await asyncio.sleep(0.05)
            await server.until_serving()
            assert await answer(stub, "a few", 5) == expected("a few", 5)[0]


@pytest.mark.parametrize("how", ["a step that does not end", "a process that stands still"])
async def test_a_stuck_engine_is_ended_with_its_stacks_and_the_next_one_serves(tmp_path, how):
    """Not while it loads, and not while it has nothing to do, for longer than the watchdog waits, which the first case
    tries. The second one is over long before a watchdog of an hour wakes up."""
    stands = how == "a process that stands still"
    options = {"quiet_s": 1.0} if stands else {"hang_at": 8, "load_s": 4.5, "dump_s": 4.0}
    async with supervised(tmp_path, server={"watchdog_s": 3600.0 if stands else 4.0}, **options) as server:
        await serving(server)
        [first] = server.alive("engine")
        async with server.stub() as stub:
            assert await answer(stub, "a few", 5) == expected("a few", 5)[0]
            await asyncio.sleep(0 if stands else 4.5)
            assert server.alive("engine") == [first]
            if stands:
                suspend_process(first)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer(stub, "hangs", 50)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            async with asyncio.timeout(60):
                while server.alive("engine") in ([], [first]):
                    await asyncio.sleep(0.05)
            await server.until_serving()
            assert await answer(stub, "a few", 5) == expected("a few", 5)[0]
        server.process.send_signal(signal.SIGTERM)
        code, log = await server.end()
        why = "its process was stopped by a signal" if stands else r"it had work and ended no step for \d+ s"
        assert code == 0 and re.search(f"stuck: {why}", log), log
        assert stands or "in hanging" in log and "most recent call first" in log, log


@pytest.mark.parametrize("how", ["was stopped by a signal", "has ended"])
async def test_requests_end_before_the_process_of_an_engine_that_will_not_go_on(tmp_path, how):
    """An engine of several ranks, or whose first thread has ended while others live: so it looks while memory is given
    back."""
    hold, far = tmp_path / "hold", 3600.0
    options = {"ranks": 2 if "signal" in how else 1, "quiet_s": far, "dump_s": far, "server": {"watchdog_s": far}}
    async with supervised(tmp_path, hold=str(hold), **options) as server:
        await serving(server)
        [first] = server.alive("engine")
        hold.touch()
        async with server.stub() as stub:
            stream = stub.Generate(request("waits", 1000))
            await stream.read()
            suspend_process(first) if "signal" in how else os.kill(first, signal.SIGUSR2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with asyncio.timeout(60):
                    while True:
                        await stream.read()
            assert f"its process {how}" in caught.value.details()
            assert len(os.listdir(f"/proc/{first}/task")) > 1
            os.kill(first, signal.SIGKILL)
            hold.unlink()
            async with asyncio.timeout(60):
                while server.alive("engine") in ([], [first]):
                    await asyncio.sleep(0.05)
            await server.until_serving()
            assert await answer(stub, "a few", 5) == expected("a few", 5)[0]


async def test_a_stop_of_an_engine_ends_requests_also_while_the_server_drains(tmp_path):
    hold = tmp_path / "hold"
    async with supervised(tmp_path, hold=str(hold), ranks=2, dump_s=0.1, server={"grace_s": 20.0}) as server:
        await serving(server)
        [engine] = server.alive("engine")
        hold.touch()
        async with server.stub() as stub:
            stream = stub.Generate(request("waits", 1000))
            await stream.read()
            server.process.send_signal(signal.SIGTERM)
            await server.log_line("draining")
            suspend_process(engine)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with asyncio.timeout(10):
                    while True:
                        await stream.read()
            assert "its process was stopped by a signal" in caught.value.details()
        code, log = await server.end()
        assert "ERROR" not in log.partition("is stuck")[2], log


async def test_an_engine_whose_first_thread_alone_has_ended_is_replaced(tmp_path):
    async with supervised(tmp_path, server={"watchdog_s": 2.0}) as server:
        await serving(server)
        [first] = server.alive("engine")
        os.kill(first, signal.SIGUSR2)
        async with asyncio.timeout(30):
            while server.alive("engine") in ([], [first]):
                await asyncio.sleep(0.05)
        await server.until_serving()


@pytest.mark.parametrize(
    ("told", "halt"),
    [
        *[(f"{state} 1 1 1 0 -1 4194560", None) for state in "RSDt"],
        ("T 1 1 1 0 -1 4194560", "was stopped by a signal"),
        *[(f"{state} 1 1 1 0 -1 4227084", "has ended") for state in "ZR"],
        ("R 1 1 1 0 -1 4195840", "has ended"),  # its first thread writes a core file
        ("I 1 1 1 0 -1 4194568", "has ended"),  # another one writes it
    ],
)
def test_a_process_that_was_stopped_or_ends_is_told_from_others(tmp_path, monkeypatch, told, halt):
    """By its line in /proc. The last one gives back the memory of its only thread."""
    (tmp_path / "stat").write_text(f"7 (T) Z) {told} 1 2")
    monkeypatch.setattr(child_process, "Path", lambda name: tmp_path / "stat" if name == "/proc/7/stat" else None)
    assert find_halt(7) == halt


async def test_an_engine_that_stands_still_while_it_loads_is_ended(tmp_path):
    server = {"watchdog_s": 0.1}
    async with supervised(tmp_path, server=server, stands=True, silence_s=0.1, patience=0) as server:
        code, log = await server.end()
        assert code and "it gave no sign of life" in log and "ended 1 times before it was ready" in log, log


async def test_an_engine_that_cannot_be_loaded_ends_the_server_with_its_error(tmp_path):
    async with supervised(tmp_path, load_fails=True) as server:
        code, log = await server.end()
        assert code == 4 and log.strip().endswith("error: engine.json is missing."), log


async def test_a_used_port_is_told_before_the_engine_was_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        async with supervised(tmp_path, load_s=60, server={"port": port}) as second:
            code, log = await second.end()
            assert code == 4 and f"Port {port}" in log


async def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path):
    async with supervised(tmp_path, load_s=0.0) as server:
        await serving(server)
        assert server.alive("engine") and server.alive("front")
        server.process.kill()
        await server.all_gone()


async def test_a_second_signal_ends_everything_at_once(tmp_path):
    async with supervised(tmp_path, step_s=0.05) as server:
        await serving(server)
        async with server.stub() as stub:
            stream = stub.Generate(request("long", 4000))
            await stream.read()
            server.process.send_signal(signal.SIGTERM)
            await server.log_line("SIGTERM received")
            server.process.send_signal(signal.SIGINT)
            code, _ = await server.end()
        assert code == 128 + signal.SIGINT
        await server.all_gone()


@pytest.mark.parametrize(
    ("number", "expected_code"), [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.long), (signal.SIGINT, 130)]
)
async def test_a_signal_while_the_engine_loads(tmp_path, number, expected_code):
    async with supervised(tmp_path, load_s=60) as server:
        server.address = await server.line("bound")
        server.process.send_signal(number)
        code, _ = await server.end()
        assert code == expected_code
        await server.all_gone()


@pytest.mark.long
async def test_a_signal_while_the_next_engine_loads(tmp_path):
    hold = tmp_path / "hold"
    async with supervised(tmp_path, hold=str(hold)) as server:
        await serving(server)
        hold.touch()
        os.kill(server.alive("engine")[0], signal.SIGKILL)
        await server.log_line("no requests are taken")
        server.process.send_signal(signal.SIGTERM)
        code, log = await server.end()
        assert code == 0 and log.count("no requests are taken") == 1, log[:2000]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("poor", "killed"),
    [("supervisor", "front"), ("engine", "front"), pytest.param("supervisor", "engine", marks=pytest.mark.long)],
)
async def test_what_ends_while_no_file_can_be_opened_is_back_when_one_can(lasting, poor, killed):
    def allow(files: int) -> None:
        most = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (files, most))

    server = lasting
    pid, before = server.process.pid if poor == "supervisor" else server.alive(poor)[0], server.alive(killed)
    allow(1)
    os.kill(before[0], signal.SIGKILL)
    if poor == "supervisor":
        await server.log_line("cannot start a process")
    else:
        async with asyncio.timeout(60):
            while server.alive(killed) in ([], before):
                await asyncio.sleep(0.05)
        await server.log_line("too many files are open here")
    allow(1024)
    async with asyncio.timeout(60):
        while server.alive(killed) in ([], before):  # before that the front may not have seen the end
            await asyncio.sleep(0.05)
    await server.until_serving()
    async with server.stub() as stub:
        assert await answer(stub, "back", 20) == expected("back", 20)[0]


@pytest.mark.parametrize("killed", ["front", pytest.param("engine", marks=pytest.mark.long)])
async def test_what_ends_while_no_thread_can_be_started_is_back_when_one_can(tmp_path, killed):
    """Where memory is short, or a container has as many tasks as it may."""
    async with supervised(tmp_path) as server:  # a new one, which has no idle thread
        await serving(server)
        pid, before = server.process.pid, server.alive(killed)
        most = resource.prlimit(pid, resource.RLIMIT_AS, (psutil.Process(pid).memory_info().vms, -1))
        os.kill(before[0], signal.SIGKILL)
        await server.log_line("cannot wait for the end")
        resource.prlimit(pid, resource.RLIMIT_AS, most)
        async with asyncio.timeout(60):
            while server.alive(killed) in ([], before):
                await asyncio.sleep(0.05)
        await server.until_serving()
        async with server.stub() as stub:
            assert await answer(stub, "back", 20) == expected("back", 20)[0]


async def test_a_signal_ends_the_server_also_where_no_thread_can_be_started(tmp_path):
    async with supervised(tmp_path) as server:
        await serving(server)
        pid = server.process.pid
        most = resource.prlimit(pid, resource.RLIMIT_AS, (psutil.Process(pid).memory_info().vms, -1))
        server.process.send_signal(signal.SIGTERM)
        await server.log_line("cannot wait for the end")
        resource.prlimit(pid, resource.RLIMIT_AS, most)
        assert (await server.end())[0] == 0


async def test_requests_are_answered_and_signals_let_them_finish(tmp_path):
    """SIGTERM to the supervisor ends the server when its requests have ended. Signals to its children do nothing: some
    service managers send what they send to every process of the service."""
    hold = tmp_path / "hold"
    async with supervised(tmp_path, hold=str(hold)) as server:
        await serving(server)
        front, engine = (Path(f"/proc/{server.alive(name)[0]}/oom_score_adj") for name in ("front", "engine"))
        assert int(front.read_text()) == FIRST_TO_GO > int(engine.read_text())
        async with server.stub() as stub:
            texts = await asyncio.gather(*(answer(stub, f"prompt {i}", 30) for i in range(40)))
            assert texts == [expected(f"prompt {i}", 30)[0] for i in range(40)]
            hold.touch()
            last = asyncio.ensure_future(answer(stub, "the last one", 200))
            async with asyncio.timeout(60):
                while (await stub.GetStats(pb2.GetStatsRequest())).streams_open != 1:
                    await asyncio.sleep(0.03)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                for child in psutil.Process(server.process.pid).children(recursive=True):
                    child.send_signal(number)
            server.process.send_signal(signal.SIGTERM)
            await server.log_line("SIGTERM received")
            hold.unlink()
            assert await last == expected("the last one", 200)[0]
        code, log = await server.end()
        assert code == 0 and "starting it again" not in log and "Traceback" not in log, log


async def test_a_front_that_was_cut_off_is_joined_to_its_engine_again(tmp_path):
    """It hung for too long: its streams end with an error, and the same two processes serve what comes later."""
    hold = tmp_path / "hold"
    async with supervised(tmp_path, backlog=1000, step_s=0.001, hold=str(hold)) as server:
        await serving(server)
        [engine], [front] = server.alive("engine"), server.alive("front")
        async with server.stub() as stub:
            streams = [stub.Generate(request(f"cut off {i}", 3000)) for i in range(8)]
            feeds = [aiter(stream) for stream in streams]
            await asyncio.gather(*map(anext, feeds))
            hold.touch()  # so that none ends before the front stands still
            files = psutil.Process(engine).num_fds()
            suspend_process(front)
            try:
                async with asyncio.timeout(60):
                    hold.unlink()
                    while psutil.Process(engine).num_fds() >= files:  # until it has closed its end
                        await asyncio.sleep(0.05)
            finally:
                os.kill(front, signal.SIGCONT)
            for feed in feeds:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in feed:
                        pass
                assert "The engine stopped" in caught.value.details()
            async with asyncio.timeout(60):
                text = ""
                while not text:
                    with suppress(grpc.aio.AioRpcError):
                        text = await answer(stub, "later", 5)
            assert text == expected("later", 5)[0]
        assert (server.alive("engine"), server.alive("front")) == ([engine], [front])


async def taken(port):
    """A listener at `port` as soon as the dying process that holds it lets go."""
    async with asyncio.timeout(60):
        while True:
            try:
                return socket.create_server(("127.0.0.1", port))
            except OSError:
                await asyncio.sleep(0.002)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_front_that_cannot_listen_for_a_while_is_tried_again(lasting):
    server = lasting
    [front] = server.alive("front")
    port = int(server.address.rpartition(":")[2])
    suspend_process(server.process.pid)  # so that the next front is not there first
    os.kill(front, signal.SIGKILL)
    try:
        listener = await taken(port)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    with listener:
        await server.log_line("is in use")
    await server.until_serving()


async def test_nothing_is_left_when_the_supervisor_is_killed_at_once(tmp_path):
    """Before its children have begun to look after it."""
    async with supervised(tmp_path, load_s=60) as server:
        supervisor = psutil.Process(server.process.pid)
        async with asyncio.timeout(60):
            while len(children := supervisor.children()) < 2:
                await asyncio.sleep(0.001)
        server.process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 60)
        assert not alive


async def test_a_call_whose_engine_ends_before_it_answers_is_unavailable(tmp_path):
    """With the time after which to ask again."""
    async with supervised(tmp_path, step_s=0.02, max_sequences=1) as server:
        await serving(server)
        async with server.stub() as stub:
            begun = stub.Generate(request("begun", 3000))
            await anext(aiter(begun))
            waiting = stub.Generate(request("waiting", 10))
            async with asyncio.timeout(60):
                while (await stub.GetStats(pb2.GetStatsRequest())).requests_waiting != 1:
                    await asyncio.sleep(0.03)
            os.kill(server.alive("engine")[0], signal.SIGKILL)
            code, text, details = await failure(waiting)
            assert code is grpc.StatusCode.UNAVAILABLE and "The engine stopped" in text
            assert details["RetryInfo"].retry_delay.seconds == 1
            assert (await failure(begun))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_front_that_stands_still_is_ended_and_the_next_one_serves(tmp_path):
    async with supervised(tmp_path, front_s=4) as server:
        await serving(server)
        [front] = server.alive("front")
        suspend_process(front)
        async with asyncio.timeout(60):
            while front in server.alive("front"):
                await asyncio.sleep(0.05)
        await server.until_serving()
        async with server.stub() as stub:
            assert await answer(stub, "hello", 5) == expected("hello", 5)[0]
        server.process.terminate()
        code, log = await server.end()
        assert code == 0 and "the front hangs" in log


async def test_front_and_engine_are_of_one_build(tmp_path):
    """The engine was built anew while it is served, and one process begins again with what is there now."""
    build = tmp_path / "build"
    build.write_text("first")
    async with supervised(tmp_path, build=str(build), quick_s=0.0) as server:
        await serving(server)
        for ends in ("engine", "front"):
            before = {name: server.alive(name) for name in ("engine", "front")}
            build.write_text(f"rebuilt before the {ends} ends")
            os.kill(before[ends][0], signal.SIGKILL)
            async with asyncio.timeout(60):
                while any(set(before[name]) & set(server.alive(name)) for name in before):
                    await asyncio.sleep(0.05)
            await server.until_serving()
            async with server.stub() as stub:
                assert await answer(stub, "hello", 5) == expected("hello", 5)[0]
        # so the tokenizer of a build that a front has loaded before is not checked again
        assert (tmp_path / "checked").read_text() == "rebuilt before the engine ends"
        server.process.terminate()
        log = (await server.end())[1]
        for other in ("front", "engine"):
            assert f"rebuilt while it is served; restarting the {other} to use it" in log
