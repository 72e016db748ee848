"""Streams of clients who mean well, each token checked, with the longest pause between two events of one stream.

    python honest.py '{"a": {"grpc": ADDRESS, "http": URL}, "b": {...}}' STREAMS

A process of its own, so that nothing delays its clocks. Reads several servers at the same time until its input ends,
then prints JSON: for each server and way in how streams ended, events, and the pauses in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent.parent)]

import grpc  # noqa: E402
import websockets  # noqa: E402

from benchmarks.serve.endurance import right  # noqa: E402
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2  # noqa: E402
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc  # noqa: E402

STUCK_S = 60.0


class Seen:
    """What streams of one way into one server came to."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.pauses: list[float] = []
        self.worst: list[tuple[float, float]] = []  # seconds, and when

    def pause(self, last: float) -> float:
        now = time.monotonic()
        self.pauses.append(now - last)
        if now - last > 0.1:
            self.worst.append((round(now - last, 3), round(now, 2)))
        return now

    def told(self) -> dict[str, object]:
        found = sorted(self.pauses) or [0.0]
        at = lambda share: round(1e3 * found[int(share * (len(found) - 1))], 1)  # noqa: E731
        return {
            "ends": dict(self.ends),
            "events": len(self.pauses),
            "median_ms": at(0.5),
            "p999_ms": at(0.999),
            "max_ms": at(1),
            "long": sorted(self.worst)[-5:],
        }


async def over_grpc(address: str, prompt: str, count: int, seen: Seen) -> str:
    text, last = "", 0.0
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        sampling = pb2.SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
        try:
            async for message in stub.Generate(pb2.GenerateRequest(text=prompt, sampling=sampling)):
                last = seen.pause(last) if last else time.monotonic()
                text += message.delta.text or message.finish.delta.text
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} after {'some' if text else 'none'}"
    return "ok" if right(text, prompt, count) else "wrong"


async def over_http(url: str, prompt: str, count: int, seen: Seen) -> str:
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0, "stream": True}
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n"
    try:
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + raw)
        status = (await reader.readline()).split()
        if not status or status[1] != b"200":
            return status[1].decode() if status else "closed"
        text, last, done = "", 0.0, False
        while line := await reader.readline():
            done |= line.startswith(b"data: [DONE]")
            if line.startswith(b"data: {"):
                last = seen.pause(last) if last else time.monotonic()
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return f"{chunk['error']['type']} after {'some' if text else 'none'}"
                text += chunk["choices"][0]["text"]
        return "ok" if done and right(text, prompt, count) else "wrong"
    finally:
        writer.close()


async def over_socket(url: str, prompt: str, count: int, seen: Seen) -> str:
    async with websockets.connect(url.replace("http", "ws", 1) + "/v1/stream") as connection:
        ask = {
            "type": "generate",
            "id": "a",
            "prompt": prompt,
            "max_tokens": count,
            "ignore_eos": True,
            "temperature": 0,
        }
        await connection.send(json.dumps(ask))
        text, last = "", 0.0
        async for raw in connection:
            frame = json.loads(raw)
            if frame["type"] == "delta":
                last = seen.pause(last) if last else time.monotonic()
                text += frame["text"]
            elif frame["type"] == "error":
                return f"{frame['error']['type']} after {'some' if text else 'none'}"
            else:
                return "ok" if right(text, prompt, count) else "wrong"
    return "closed"


WAYS = {"grpc": ("grpc", over_grpc), "http": ("http", over_http), "socket": ("http", over_socket)}


async def main(servers: dict[str, dict[str, str]], streams: int) -> None:
    rng, over = random.Random(1), asyncio.Event()
    found = {name: {way: Seen() for way in WAYS} for name in servers}

    async def client(name: str, way: str) -> None:
        target, one = WAYS[way]
        while not over.is_set():
            seen, count = found[name][way], rng.randint(30, 150)
            try:
                async with asyncio.timeout(STUCK_S):
                    end = await one(servers[name][target], "p" * rng.randint(1, 24), count, seen)
            except TimeoutError:
                end = "stuck"
            except (OSError, websockets.WebSocketException) as error:
                end = type(error).__name__
            seen.ends[end] += 1
            if end != "ok":
                await asyncio.sleep(0.05)

    clients = [asyncio.ensure_future(client(name, way)) for name in servers for way in WAYS for _ in range(streams)]
    await asyncio.to_thread(sys.stdin.read)
    over.set()
    await asyncio.wait(clients, timeout=STUCK_S)
    print(
        json.dumps({name: {way: seen.told() for way, seen in ways.items()} for name, ways in found.items()}), flush=True
    )


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2])))
