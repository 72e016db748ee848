"""What a streamed token costs the front process, in CPU time.

    python -m benchmarks.serve.front_cost [--streams 128] [--step-ms 20] [--seconds 8]

`wicore serve`'s own processes over an engine of fixed step time (`benchmarks.serve.paced`), a tokenizer of the library
and decoder that Gemma's has, and clients in processes of their own that read their sockets and throw away what comes.
Prints the microseconds of the front's CPU time (user and system, all threads) for each token that the engine generated,
over HTTP and over gRPC: text work, framing and the socket to the engine included. Needs a C compiler and Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

from benchmarks.common import say
from benchmarks.serve.paced import OPTIONS, VOCAB, serve
from benchmarks.serve.step_wait import child, read_streams, stop
from wicore_trt.config import Settings
from wicore_trt.text.tokenizer import Tokenizer

CLIENTS = 2
SETTLE_S = 3.0
BODY = {"prompt": "some words", "max_tokens": 3000, "ignore_eos": True, "temperature": 0, "stream": True}
PACKAGES = ("uvloop", "uvicorn", "httptools", "grpcio", "tokenizers", "msgspec")


def load_tokenizer(settings: Settings | None = None, checked_build: str | None = None) -> Tokenizer:
    """As `serve.front.load_tokenizer`: words for the ids that the engine gives, and the decoder of SentencePiece."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [chr(97 + i) for i in range(26)]
    words = [f"\u2581word{i}" for i in range(VOCAB - 3 - len(letters))]
    pieces = ["<pad>", "<eos>", "\u2581", *letters, *words, *bytes_]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend, bos_id=None, eos_ids=(1,))


async def read_http(url: str, streams: int) -> None:
    """Read so many streams until this process is killed."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    raw = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"

    async def read() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        while True:
            writer.write(head % len(raw) + raw)
            while b"[DONE]" not in await reader.read(1 << 16):
                pass

    await asyncio.gather(*(read() for _ in range(streams)))


def front_of(supervisor: int) -> int:
    """The front's process id."""
    return child_of(supervisor, "serve.front")


def child_of(supervisor: int, module: str) -> int:
    """The process id of the child that runs a module."""
    found = [pid for pid in children_of(supervisor) if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found[0]


def children_of(pid: int) -> list[int]:
    """Processes that this one has started."""
    return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tokens_of(url: str) -> int:
    """Tokens that the engine has generated."""
    with urllib.request.urlopen(f"{url}/v1/stats") as answer:
        return int(json.load(answer)["generated_tokens"])


def measure(how: str, streams: int, step_s: float, seconds: float) -> tuple[float, float]:
    """Microseconds of the front for each token, and tokens a second."""
    os.environ[OPTIONS] = json.dumps({"step_s": step_s})
    server = child("--serve", module=__spec__.name, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert server.stdout is not None
    address, url = server.stdout.readline().split()
    target = url if how == "http" else address
    clients = [
        child(f"--{how}", target, "--streams", str(streams // CLIENTS), module=__spec__.name) for _ in range(CLIENTS)
    ]
    try:
        time.sleep(SETTLE_S)
        front = front_of(server.pid)
        cpu, tokens, began = cpu_s(front), tokens_of(url), time.monotonic()
        time.sleep(seconds)
        cpu, tokens, took = cpu_s(front) - cpu, tokens_of(url) - tokens, time.monotonic() - began
    finally:
        stop(server, clients)
    return 1e6 * cpu / tokens, tokens / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--http", help=argparse.SUPPRESS)
    parser.add_argument("--grpc", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(0, f"{__spec__.name}:load_tokenizer")
    elif given.http:
        asyncio.run(read_http(given.http, given.streams))
    elif given.grpc:
        asyncio.run(read_streams(given.grpc, given.streams))
    else:
        versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
        say(f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        say(f"Python {platform.python_version()}, {versions}")
        for how in ("http", "grpc"):
            cost, rate = measure(how, given.streams, given.step_ms / 1e3, given.seconds)
            say(f"{how}: {cost:6.1f} us a token, {given.streams} streams, {rate:6.0f} tokens a second")


def processor() -> str:
    """The machine's processor by its name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = next((line for line in lines if line.startswith("model name")), "")
    return found.partition(":")[2].strip() or platform.machine()


if __name__ == "__main__":
    main()
