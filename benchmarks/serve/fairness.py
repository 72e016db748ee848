"""What a polite client keeps of its rate beside another one that has hundreds of streams open.

    python -m benchmarks.serve.fairness [--streams 200] [--tokens 500] [--requests 6] [--itl 1.1,1.5,none]

`wicore serve`'s own processes over an engine whose steps take what those of Gemma 3 27B take on an H200, one behind the
other (9 ms of weights, 0.1 ms a sequence, 55 us a token: `benchmarks.serve.paced`). The polite client has one stream at
a time, first alone and then beside a client with another key that opens `--streams` at once and a new one for each that
ends. `--itl` is `scheduler.target_itl_ms`, which says how long a step may be, in times of what a token of a lone stream
takes: that is measured first, without a target. `none` sets none. Prints tokens a second of the polite client, alone
and beside the flood, from sending to the last token, medians of `--requests`. Exits with 1 unless the first target
keeps 0.9 of the lone rate. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import say
from benchmarks.serve.paced import OPTIONS, serve
from benchmarks.serve.step_wait import child, stop
from wicore_trt.runtime.options import GPU_SLICE_TOKENS

KEYS = {"polite": "polite-key-of-sixteen", "flood": "flood-key-of-sixteen"}
SEQUENCES = 64
STEP_S, ROW_S, TOKEN_S = 9e-3, 1e-4, 5.5e-5


async def request(address: str, name: str, prompt: int, tokens: int, count: list[int]) -> bool:
    """One request over a channel of its own; adds each token's number to `count`. False when it was refused."""
    import grpc

    from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
    from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        sampling = pb2.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        metadata = (("authorization", f"Bearer {KEYS[name]}"),)
        try:
            async for message in stub.Generate(
                pb2.GenerateRequest(text="p" * prompt, sampling=sampling), metadata=metadata
            ):
                count[0] += len(message.delta.text or message.finish.delta.text)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return False
    return True


async def flood(address: str, streams: int, tokens: int) -> None:
    """Keep so many streams open until this process is killed; prints the tokens so far, once a second."""
    count = [0]

    async def one(number: int) -> None:
        while True:
            if not await request(address, "flood", 10 + 7 * number % 2000, tokens, count):
                await asyncio.sleep(0.05)

    tasks = [asyncio.ensure_future(one(number)) for number in range(streams)]
    while not any(task.done() for task in tasks):
        print(count[0], flush=True)
        await asyncio.sleep(1.0)
    await asyncio.gather(*tasks)


async def polite(address: str, requests: int, tokens: int) -> None:
    """One request after the other; prints the tokens a second of each."""
    found = []
    for _ in range(requests):
        begun, count = time.monotonic(), [0]
        assert await request(address, "polite", 200, tokens, count), "the polite one is never refused"
        assert count[0] == tokens, f"{count[0]} tokens came of {tokens}"
        found.append(tokens / (time.monotonic() - begun))
    print(json.dumps(found), flush=True)


def rates(address: str, given: argparse.Namespace) -> list[float]:
    """Of the polite client, in a process of its own."""
    other = child(
        "--polite", "--target", address, "--requests", str(given.requests), "--tokens", str(given.tokens),
        module=__spec__.name, stdout=subprocess.PIPE,
    )  # fmt: skip
    said = other.communicate()[0]
    assert other.returncode == 0, "the polite client failed"
    return list(json.loads(said))


def measure(itl: str, keys: str, given: argparse.Namespace, token_s: float | None = None) -> float:
    """Of its lone rate, what the polite client keeps beside the flood; `token_s` is what a token took alone. Without it
    that is measured."""
    target = None if token_s is None or itl == "none" else float(itl) * token_s
    step: dict[str, Any] = {"step_s": STEP_S, "row_s": ROW_S, "token_s": TOKEN_S, "slice_tokens": GPU_SLICE_TOKENS}
    options = step | {"sequences": SEQUENCES, "ahead": True, "target_itl_s": target}
    os.environ[OPTIONS] = json.dumps(options)
    server = child("--serve", "--keys", keys, module=__spec__.name, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert server.stdout is not None
    address = server.stdout.readline().split()[0]
    clients: list[subprocess.Popen[str]] = []
    try:
        rates(address, argparse.Namespace(requests=1, tokens=100))  # the engine knows its steps
        alone = rates(address, given)
        if token_s is None:
            return 1.0 / statistics.median(alone)
        share = [given.streams // 2, given.streams - given.streams // 2]
        clients += [
            child("--flood", str(streams), "--target", address, "--tokens", "400", module=__spec__.name,
                  stdout=subprocess.PIPE)
            for streams in share
        ]  # fmt: skip
        for client in clients:
            assert client.stdout is not None
            while not int(client.stdout.readline()):
                pass
        beside = rates(address, given)
        assert not any(client.poll() is not None for client in clients), "the flood ended"
    finally:
        stop(server, clients)
    kept = statistics.median(beside) / statistics.median(alone)
    say(
        f"target {itl if target is None else f'{1e3 * target:.1f} ms'}: {statistics.median(alone):.1f} tokens/s alone, "
        f"{statistics.median(beside):.1f} beside {given.streams} streams ({min(beside):.1f} to {max(beside):.1f}): "
        f"{kept:.3f} kept"
    )
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--itl", default="1.1,1.5,none")
    for name in ("--serve", "--polite"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--flood", "--target", "--keys"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(None, keys_file=given.keys)
    elif given.flood:
        asyncio.run(flood(given.target, int(given.flood), given.tokens))
    elif given.polite:
        asyncio.run(polite(given.target, given.requests, given.tokens))
    else:
        with tempfile.TemporaryDirectory() as folder:
            keys = Path(folder) / "keys"
            keys.touch(0o600)
            keys.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
            say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
            token_s = measure("none", str(keys), given)
            kept = [measure(itl, str(keys), given, token_s) for itl in given.itl.split(",")]
        sys.exit(0 if kept[0] >= 0.9 else 1)


if __name__ == "__main__":
    main()
