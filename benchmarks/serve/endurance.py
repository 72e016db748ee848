"""Thousands of streams at once, each checked token by token.

    python -m benchmarks.serve.endurance [--streams 2000] [--seconds 60] [--step-ms 500] [--over http,grpc]

`wicore serve`'s own processes over an engine of fixed step time (`benchmarks.serve.paced`). Clients in processes of
their own keep so many streams open, each with a random prompt and length; some leave in the middle. A stream must end
with all of its text in order, or with an error that has a type. Prints what the streams came to and the memory of front
and engine over the time; exits with 1 when a stream was lost, doubled or out of order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import say
from benchmarks.serve.front_cost import child_of, front_of
from benchmarks.serve.paced import OPTIONS, serve, token_after
from benchmarks.serve.step_wait import child, stop

CLIENTS = 4
CHANNELS = 4
"""Connections of one client process."""
LEAVE = 0.1
"""Share of the streams whose client leaves before the end."""
STUCK_S = 120.0
SAMPLES = 12
TYPED = {"RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "429", "503", "504"}


_CHANNELS: dict[int, Any] = {}


async def over_grpc(address: str, prompt: str, count: int, leave: int | None) -> str:
    """One stream: "ok", "left", a status, or "wrong"."""
    import grpc

    from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
    from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc

    place = random.randrange(CHANNELS)
    if place not in _CHANNELS:
        _CHANNELS[place] = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    channel = _CHANNELS[place]
    stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
    sampling = pb2.SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
    call = stub.Generate(pb2.GenerateRequest(text=prompt, sampling=sampling))
    text, ended = "", False
    try:
        async for message in call:
            text += message.delta.text or message.finish.delta.text
            ended = message.HasField("finish")
            if leave is not None and len(text) >= leave:
                call.cancel()
                return "left"
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "ok" if ended and right(text, prompt, count) else "wrong"


async def over_http(url: str, prompt: str, count: int, leave: int | None) -> str:
    """The same over HTTP, by a client that reads lines."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0, "stream": True}
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n"
        )
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + raw)
        status = (await reader.readline()).split()
        if not status:
            return "closed"
        if status[1] != b"200":
            return status[1].decode()
        text, done, finish = "", False, None
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return str(chunk["error"].get("code") or chunk["error"]["type"])
                text += chunk["choices"][0]["text"]
                finish = chunk["choices"][0]["finish_reason"] or finish
            if leave is not None and len(text) >= leave:
                return "left"
        return "ok" if done and finish == "length" and right(text, prompt, count) else "wrong"
    finally:
        writer.close()


def right(text: str, prompt: str, count: int) -> bool:
    """Whether this is what the paced engine says."""
    return text == "".join(chr(32 + token_after(length)) for length in range(len(prompt), len(prompt) + count))


async def clients(how: str, target: str, streams: int, seconds: float) -> None:
    """Keep so many streams open for so long; prints the counts."""
    outcomes: Counter[str] = Counter()
    end, one = time.monotonic() + seconds, over_http if how == "http" else over_grpc
    rng = random.Random(os.getpid())

    async def client() -> None:
        await asyncio.sleep(rng.uniform(0, 2))
        while time.monotonic() < end:
            count = rng.randint(1, 60)
            leave = rng.randrange(count) if rng.random() < LEAVE else None
            try:
                async with asyncio.timeout(STUCK_S):
                    outcomes[await one(target, "p" * rng.randint(1, 24), count, leave)] += 1
            except TimeoutError:
                outcomes["stuck"] += 1
            except OSError as error:
                outcomes[type(error).__name__] += 1

    await asyncio.gather(*(client() for _ in range(streams)))
    print(json.dumps(outcomes))


def megabytes(pid: int) -> int:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) // 1024


def measure(how: str, streams: int, seconds: float, step_s: float) -> bool:
    """One campaign; whether every stream ended well."""
    os.environ[OPTIONS] = json.dumps({"step_s": step_s})
    server = child("--serve", module=__spec__.name, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert server.stdout is not None
    address, url = server.stdout.readline().split()
    target = url if how == "http" else address
    shares = [streams // CLIENTS] * CLIENTS
    others = [
        child("--client", how, "--target", target, "--streams", str(n), "--seconds", str(seconds),
              module=__spec__.name, stdout=subprocess.PIPE)
        for n in shares
    ]  # fmt: skip
    try:
        began = time.monotonic()
        time.sleep(min(10.0, seconds / 2))
        front = front_of(server.pid)
        engine = child_of(server.pid, "process.engine")
        memory = [(megabytes(front), megabytes(engine))]
        while any(other.poll() is None for other in others):
            time.sleep(1.0)
            if time.monotonic() - began >= len(memory) * max(10.0, seconds / SAMPLES):
                memory.append((megabytes(front), megabytes(engine)))
        outcomes: Counter[str] = Counter()
        for other in others:
            assert other.stdout is not None
            outcomes.update(json.loads(other.stdout.read()))
        memory.append((megabytes(front), megabytes(engine)))
    finally:
        stop(server, others)
    bad = {what: n for what, n in outcomes.items() if what not in ("ok", "left", *TYPED)}
    say(f"{how}: {streams} streams at once, {dict(outcomes)}; not allowed: {bad or 'none'}")
    say(f"{how}: memory of front and engine, MiB, over the time: {', '.join(f'{a}+{b}' for a, b in memory)}")
    return not bad and outcomes["ok"] > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step-ms", type=float, default=500.0)
    parser.add_argument("--over", default="http,grpc")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(0)
    elif given.client:
        asyncio.run(clients(given.client, given.target, given.streams, given.seconds))
    else:
        results = [measure(how, given.streams, given.seconds, given.step_ms / 1e3) for how in given.over.split(",")]
        sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
