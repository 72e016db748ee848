"""Requests that come all at once, most of which cannot be met: how soon are they told?

    python -m benchmarks.serve.burst [--requests 500] [--over http,chat,grpc] [--step-ms 20] [--sequences 32]
                                     [--ttft-ms 450] [--clients N] [--connections 4] [--rounds 1]

`wicore serve`'s own processes over an engine of fixed step time (`benchmarks.serve.paced`) that runs so many sequences
at once and promises a first token within `--ttft-ms`. Clients in processes of their own, half of the cores unless
`--clients` says, open their connections, wait for each other and send everything at once; over gRPC each has so many
`--connections`, and a front gets the requests of those that the system gives it. Prints, for each surface, how many
were served with their first token in time, how many later, how many were refused and how long after sending they knew,
and that no other end came. The floor is the same burst on servers that look at nothing and refuse everything, as many
as there are fronts: what this machine, these clients and, over gRPC, the library take. CPU is the fronts' alone, or
those servers', for each request, and what the busiest of them took in all: no burst is told sooner. With `--rounds` all
of it in turn, so that what else the machine does meets everything alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.common import say
from benchmarks.serve.front_cost import cpu_s, front_of
from benchmarks.serve.paced import OPTIONS, serve
from benchmarks.serve.step_wait import child, stop

MUST_S = 0.5
TOKENS = 64
PROMPT = "p" * 600
REFUSED = {"429", "RESOURCE_EXHAUSTED"}


async def over_http(how: str, port: int, start: asyncio.Event, ready: asyncio.Semaphore) -> tuple[str, float]:
    """(status, seconds to the answer's first event, or to the refusal)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    path, said = "completions", dict[str, Any](prompt=PROMPT)
    if how == "chat":
        path, said = "chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}
    body = {**said, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    raw = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n"
    ready.release()
    await start.wait()
    sent = time.monotonic()
    writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + raw)
    status = (await reader.readline()).split()[1].decode()
    while status == "200" and not (line := await reader.readline()).startswith(b"data: "):
        assert line, "the stream ended before its first event"
    taken = time.monotonic() - sent
    await reader.read()
    writer.close()
    return ("ok" if status == "200" else status), taken


async def over_grpc(channel: Any, start: asyncio.Event, ready: asyncio.Semaphore) -> tuple[str, float]:
    """The same over a channel that others share."""
    import grpc

    from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
    from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc

    stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
    sampling = pb2.SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    ready.release()
    await start.wait()
    sent, taken = time.monotonic(), 0.0
    try:
        async for message in stub.Generate(pb2.GenerateRequest(text=PROMPT, sampling=sampling)):
            if not taken and message.delta.text:
                taken = time.monotonic() - sent
    except grpc.aio.AioRpcError as error:
        return str(error.code().name), time.monotonic() - sent
    return "ok", taken


class RefusesAll(asyncio.Protocol):
    """One connection of the floor over HTTP."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self._transport.close()


async def refuse_all(ports: list[int]) -> None:
    """The floor: prints its two addresses, as `serve` does. Others may listen at the same ports."""
    import grpc

    async def refuse(_: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, call: object) -> Any:
            return grpc.stream_stream_rpc_method_handler(refuse)

    server = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port(f"127.0.0.1:{ports[0]}")
    await server.start()
    web = await asyncio.get_running_loop().create_server(
        RefusesAll, "127.0.0.1", ports[1], backlog=2048, reuse_port=True
    )
    print(f"127.0.0.1:{port} http://127.0.0.1:{web.sockets[0].getsockname()[1]}", flush=True)
    await server.wait_for_termination()


async def clients(how: str, target: str, connections: int, requests: int) -> None:
    """One request first, so that the engine knows its steps; then all at once when a line comes."""
    import grpc

    loop, ready = asyncio.get_running_loop(), asyncio.Semaphore(0)
    options = [[("wicore.n", n)] for n in range(connections if how == "grpc" else 0)]
    channels = [grpc.aio.insecure_channel(target, options=some) for some in options]
    port = int(target.rpartition(":")[2])

    def one(number: int, start: asyncio.Event) -> Any:
        return (
            over_grpc(channels[number % connections], start, ready) if channels else over_http(how, port, start, ready)
        )

    at_once, start = asyncio.Event(), asyncio.Event()
    at_once.set()
    await asyncio.gather(*(one(n, at_once) for n in range(connections)))
    tasks = [asyncio.ensure_future(one(n, start)) for n in range(requests)]
    for _ in range(requests + connections):
        await ready.acquire()
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    start.set()
    print(json.dumps(await asyncio.gather(*tasks)), flush=True)


def started(*, floor: bool) -> tuple[subprocess.Popen[str], str, str, int]:
    """A server, its addresses over gRPC and HTTP, and the process that clients talk to."""
    more: dict[str, Any] = {"module": __spec__.name, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    server = child("--floor" if floor else "--serve", **more)
    assert server.stdout is not None
    address, url = server.stdout.readline().split()
    return server, address, url, server.pid if floor else front_of(server.pid)


def measure(how: str, given: argparse.Namespace, *, floor: bool = False) -> bool:
    """One burst; whether every request was served or refused."""
    limits = {"sequences": given.sequences, "target_ttft_s": given.ttft_ms / 1e3}
    os.environ[OPTIONS] = json.dumps({"step_s": given.step_ms / 1e3, **limits})
    server, address, url, pid = started(floor=floor)
    each = [given.requests // given.clients + (n < given.requests % given.clients) for n in range(given.clients)]
    target = url if how in ("http", "chat") else address
    ask = ("--client", how, "--target", target, "--connections", str(given.connections), "--requests")
    more: dict[str, Any] = {"module": __spec__.name, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    others = [child(*ask, str(share), **more) for share in each]
    try:
        for other in others:
            assert other.stdout is not None and other.stdout.readline().strip() == "ready"
        begun = cpu_s(pid)
        for other in others:
            assert other.stdin is not None
            other.stdin.write("\n")
            other.stdin.flush()
        found = [tuple(end) for other in others if other.stdout for end in json.loads(other.stdout.readline())]
        took = cpu_s(pid) - begun
    finally:
        stop(server, others)
    refused = sorted(seconds for end, seconds in found if end in REFUSED)
    served = [seconds for end, seconds in found if end == "ok"]
    late = sum(seconds > given.ttft_ms / 1e3 for seconds in served)
    rest = Counter(end for end, _ in found if end not in (*REFUSED, "ok"))
    told = [f"{1e3 * refused[int(part * (len(refused) - 1))]:.0f}" for part in (0.5, 0.99, 1)] if refused else []
    soon = sum(seconds <= MUST_S for seconds in refused)
    name = f"{how}, {'floor' if floor else 'front'}"
    if not floor:
        say(
            f"{name}: {len(served) - late} served in time, {late} late, {len(refused)} refused; "
            f"other ends: {dict(rest)}"
        )
    say(
        f"{name}: ms from sending to a refusal, p50, p99, longest: {', '.join(told)}; "
        f"{soon} within {1e3 * MUST_S:.0f}; "
        f"{1e6 * took / len(found):.0f} us of CPU a request"
    )
    return not rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--ttft-ms", type=float, default=450.0)
    parser.add_argument("--over", default="http,grpc")
    parser.add_argument("--clients", type=int, default=max(2, (os.cpu_count() or 2) // 2), help="processes")
    parser.add_argument("--connections", type=int, default=4, help="of each client process over gRPC")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--floor", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(0)
    elif given.floor:
        import uvloop

        uvloop.run(refuse_all([0, 0]))
    elif given.client:
        asyncio.run(clients(given.client, given.target, given.connections, given.requests))
    else:
        say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {given.clients} client processes")
        results = [
            measure(how, given, floor=floor)
            for _ in range(given.rounds)
            for how in given.over.split(",")
            for floor in (True, False)
        ]
        sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
