"""Plays hostile inputs against a server, looks at what it held before and after, and judges.

Invariant: the input of a number follows from the seed, the surface and that number alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc_inputs
import http_inputs
import ws_inputs
from grpc_inputs import Call
from http_inputs import HALF, HEAD, READ, RESET, Step

from benchmarks.serve.endurance import megabytes
from benchmarks.serve.front_cost import child_of, front_of

HERE = Path(__file__).parent
SURFACES: dict[str, dict[str, Any]] = {
    "http": http_inputs.KINDS, "grpc": grpc_inputs.KINDS, "ws": ws_inputs.KINDS,
}  # fmt: skip
READ_S, QUIET_S = 10.0, 0.25
"""How long an answer is waited for that need not come; how long nothing has to come until an answer that may go on is
whole."""
FAULT_S = 60.0
"""After this what must be taken or answered and is not is a fault, however busy the machine is."""
SETTLE_S = 120.0
BAD = ("grpc: INTERNAL", "grpc: UNKNOWN", "grpc: no answer", "takes nothing")
TYPE = re.compile(rb'"type":"([a-z_]+_error)"')
STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")


def input_of(surface: str, seed: int, number: int) -> tuple[str, Call | list[Step], bool]:
    """Kind and input of a number, and whether it asks for a time that may be over."""
    rng = Random(f"{surface} {seed} {number}")
    kinds = SURFACES[surface]
    kind = os.environ.get("HOSTILE_KIND") or list(kinds)[number % len(kinds)]
    made = kinds[kind](rng)
    raw = b"".join(s for s in made if isinstance(s, bytes)) if isinstance(made, list) else b""
    return kind, made, b"timeout" in raw or surface == "ws"


@dataclass
class Server:
    """A server of `parts`."""

    step_s: float
    settings: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the server
        options = json.dumps({"step_s": self.step_s, "server": self.settings})
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "parts.py"), options], stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        assert line, self.log()
        self.grpc, self.http, self._report = line

    @property
    def front(self) -> int:
        return front_of(self.process.pid)

    @property
    def engine(self) -> int:
        return child_of(self.process.pid, "process.engine")

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def held(self) -> dict[str, int]:
        """What the front holds: tasks, places, file descriptors; sequences and pages of the engine."""
        path = Path(self._report)
        path.unlink(missing_ok=True)
        os.kill(self.front, signal.SIGUSR1)
        end = time.monotonic() + 60
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.02)
        found: dict[str, int] = json.loads(path.read_text())
        with urllib.request.urlopen(f"{self.http}/v1/stats", timeout=60) as answer:
            stats = json.load(answer)
        found |= {"running": stats["requests_running"], "waiting": stats["requests_waiting"]}
        found |= {"pages": sum(pool["used_pages"] for pool in stats["pools"])}
        found["front's fds"] = len(os.listdir(f"/proc/{self.front}/fd"))
        found["front's threads"] = len(os.listdir(f"/proc/{self.front}/task"))
        found["engine's fds"] = len(os.listdir(f"/proc/{self.engine}/fd"))
        return found

    def memory(self) -> tuple[int, int]:
        return megabytes(self.front), megabytes(self.engine)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


class Honest:
    """The process of `honest.py`."""

    def __init__(self, servers: dict[str, Server], streams: int) -> None:
        targets = {name: {"grpc": server.grpc, "http": server.http} for name, server in servers.items()}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "honest.py"), json.dumps(targets), str(streams)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self) -> dict[str, Any]:
        told, _ = self._process.communicate("", timeout=120)
        return json.loads(told)


async def play(address: tuple[str, int], script: list[Step], surface: str) -> str:
    """One connection of a script; what came of it in a word."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    got = b""
    try:
        await loop.sock_connect(sock, address)
        try:
            for step in script:
                if isinstance(step, bytes):
                    async with asyncio.timeout(FAULT_S):
                        await loop.sock_sendall(sock, step)
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                elif step == HEAD:
                    async with asyncio.timeout(FAULT_S):
                        while b"\r\n\r\n" not in got and (piece := await loop.sock_recv(sock, 1 << 16)):
                            got += piece
                elif step == READ:
                    got += await answer(sock, surface)
                elif step == HALF:
                    sock.shutdown(socket.SHUT_WR)
                    got += await answer(sock, surface)
                elif step == RESET:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except TimeoutError:
            return "takes nothing"
        except OSError:
            got += await answer(sock, surface, 0.1)
        return outcome(got, surface)
    except OSError as error:
        return f"connection: {type(error).__name__}"
    finally:
        sock.close()


async def answer(sock: socket.socket, surface: str, share: float = 1.0) -> bytes:
    """What comes until the end, until it looks whole, or until nothing more comes for a while."""
    limit = share * READ_S
    loop, got, end = asyncio.get_running_loop(), bytearray(), time.monotonic() + limit
    while len(got) < 1 << 22 and time.monotonic() < end:
        waiting = QUIET_S if got else (limit if surface == "http" else 1.0)
        try:
            async with asyncio.timeout(waiting):
                piece = await loop.sock_recv(sock, 1 << 16)
        except (TimeoutError, OSError):
            break
        if not piece:
            break
        got += piece
        tail = bytes(got[-200:])
        if surface == "http" and (tail.endswith(b"}") or b"[DONE]" in tail):
            break
    return bytes(got)


def outcome(got: bytes, surface: str) -> str:
    if surface == "grpc":
        if not got:
            return "http2: closed or silent"
        kinds, at = [], 0
        while at + 9 <= len(got):
            size, kind = int.from_bytes(got[at : at + 3], "big"), got[at + 3]
            kinds.append({0: "DATA", 1: "HEADERS", 3: "RST", 4: "SETTINGS", 7: "GOAWAY"}.get(kind, ""))
            at += 9 + size
        last = [k for k in kinds if k not in ("", "SETTINGS")]
        return f"http2: {last[-1] if last else 'SETTINGS'}"
    statuses, types = STATUS.findall(got), TYPE.findall(got)
    if not statuses:
        return "closed or silent"
    found = max(statuses, key=int).decode()
    if found == "101":
        rest = got.partition(b"\r\n\r\n")[2]
        closes = re.findall(rb"\x88[\x02-\x7d](..)", rest, re.DOTALL)
        what = [f"close {int.from_bytes(closes[-1], 'big')}"] if closes else []
        what += sorted({t.decode() for t in types})
        return "101 " + ", ".join(what or ["done" if b'"type":"done"' in rest else "frames" if rest else "silent"])
    return " ".join([found, *sorted({t.decode() for t in types})])


async def ring(channel: grpc.aio.Channel, call: Call) -> str:
    """One call of a gRPC client."""
    made = channel.stream_stream(call.path, request_serializer=None, response_deserializer=None)
    extra = grpc.Compression.Gzip if call.gzip else None
    try:
        stream = made(timeout=call.timeout, metadata=call.metadata, compression=extra)
    except (ValueError, TypeError) as error:
        return f"grpc client: {type(error).__name__}"

    async def talk() -> str:
        with suppress(Exception):  # the call has ended, which the library tells in several ways
            for message in call.messages:
                await stream.write(message)
            await stream.done_writing()
        code = await stream.code()
        details = await stream.details() or ""
        own = any(words in details for words in ("Deadline Exceeded", "Internal error from Core"))
        return f"grpc: {code.name}" + (" by the client" if own else "")

    async def read() -> None:
        with suppress(Exception):
            while await stream.read() is not grpc.aio.EOF:
                pass

    reading = asyncio.ensure_future(read())
    try:
        async with asyncio.timeout(call.leave if call.leave is not None else FAULT_S + call.timeout):
            return await talk()
    except TimeoutError:
        stream.cancel()
        return "grpc: left" if call.leave is not None else "grpc: no answer"
    finally:
        stream.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@dataclass
class Report:
    """What a campaign came to."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: list[tuple[float, int, str, str]] = field(default_factory=list)
    spans: list[tuple[float, float, int, str]] = field(default_factory=list)  # when an input was played

    def add(self, number: int, kind: str, result: str, late: bool, began: float) -> None:
        now = time.monotonic()
        self.outcomes[kind, result] += 1
        self.spans.append((began, now, number, kind))
        seconds = now - began
        self.slowest = sorted([*self.slowest, (round(seconds, 2), number, kind, result)])[-8:]
        server = re.match(r"5\d\d", result)
        bad = server is not None and not (result.startswith("503") or (result.startswith("504") and late))
        if bad or result in BAD or "server_error" in result:
            self.failures.append(f"input {number} ({kind}): {result}")

    def during(self, seconds: float, now: float) -> str:
        """Inputs that were under way in a pause of so many seconds that ended now, the latest first."""
        found = [(b, f"{n} {kind}") for b, end, n, kind in self.spans if b < now and end > now - seconds]
        return ", ".join(what for _, what in sorted(found, reverse=True))

    def table(self) -> str:
        total: Counter[str] = Counter()
        for (_, result), count in self.outcomes.items():
            total[result] += count
        lines = [f"{count:6d}  {result}" for result, count in total.most_common()]
        return "\n".join([*lines, "slowest: " + ", ".join(map(str, self.slowest))])


async def run(server: Server, surface: str, seed: int, numbers: range, lanes: int) -> Report:
    """Play inputs, `lanes` at a time."""
    report, todo = Report(), iter(numbers)
    http = (server.http.removeprefix("http://").rpartition(":")[0], int(server.http.rpartition(":")[2]))
    rpc = (server.grpc.rpartition(":")[0], int(server.grpc.rpartition(":")[2]))
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]

    async def lane() -> None:
        channel = grpc.aio.insecure_channel(server.grpc, options=options)
        for number in todo:
            kind, made, late = input_of(surface, seed, number)
            began = time.monotonic()
            if isinstance(made, Call):
                result = await ring(channel, made)
            else:
                result = await play(rpc if surface == "grpc" else http, made, surface)
            report.add(number, kind, result, late, began)
        await channel.close()

    await asyncio.gather(*(lane() for _ in range(lanes)))
    return report


FAULTS = ("Traceback", "failed unexpectedly", "ended (", "broke", "hung", "never retrieved", "Exception")


def judge(
    server: Server, report: Report, before: dict[str, int], pids: tuple[int, int], settle_s: float = SETTLE_S
) -> dict[str, int]:
    """Add what is wrong with the server after a campaign; returns what it holds once it has settled."""
    end, after = time.monotonic() + settle_s, before
    try:
        if (server.front, server.engine) != pids:
            report.failures.append("a process ended")
        while True:
            after = server.held()
            more = {k: (before.get(k, 0), n) for k, n in after.items() if n > before.get(k, 0) + SLACK.get(k, 0)}
            if not more or time.monotonic() > end:
                break
            time.sleep(0.5)
        report.failures += [f"{name}: {was} before, {now} after" for name, (was, now) in more.items()]
    except (OSError, StopIteration, IndexError, ValueError) as error:
        report.failures.append(f"the server does not answer: {error!r}")
    lines = server.log().splitlines()
    for i, line in enumerate(lines):
        told = "\n".join(lines[i : i + (8 if "Traceback" in line else 1)])
        if any(fault in line for fault in FAULTS) and not any(known in told for known in KNOWN):
            report.failures.append(f"log: {told}")
    return after


KNOWN = ("a call that cannot be decoded", "_server_main_loop", "UnicodeDecodeError('utf-8', b'/")
"""How gRPC tells of a path that is not UTF-8, which costs one of four listeners its place for a moment."""
SLACK = {"front's fds": 8, "front's threads": 4, "engine's fds": 2, "pages": 0}
"""What a library opens once and keeps: threads of gRPC and tokenizers, the socket of the checker."""
