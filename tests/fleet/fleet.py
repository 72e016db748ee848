"""Two servers of Gemma 3 270M behind a router, as processes: SMG, or Dynamo with a worker for each server."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
SMG = ROOT / ".venv-fleet-smg" / "bin" / "smg"
DYNAMO = ROOT / ".venv-fleet-dynamo" / "bin" / "python"
TEXT = " ".join(topics[name] for name in sorted(topics))
MODEL = "gemma"
PLACES, WAITING = 4, 8
"""Of a worker: requests that run, and that wait."""
LIMIT_S = 240.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass
class Part:
    """A process that can be started again, with its log."""

    name: str
    command: list[str]
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / f"{self.name}.log").open("ab") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1", **self.env}
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=env, cwd=self.folder)

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def end(self, number: int = signal.SIGKILL) -> None:
        if self.runs:
            assert self.process is not None
            self.process.send_signal(number)
        if self.process is not None:
            self.process.wait(LIMIT_S)


class Worker:
    """A server, and beside it the worker of Dynamo where that is the router."""

    def __init__(self, number: int, engine: Path, folder: Path, side: Callable[[int, int], Part | None]) -> None:
        port, http = free_port(), free_port()
        self.address, self.url = f"127.0.0.1:{port}", f"http://127.0.0.1:{http}"
        command = [sys.executable, "-m", "wicore_trt.cli.main", "serve", str(engine), "--name", MODEL]
        command += [
            "--grpc-port",
            str(port),
            "--http-port",
            str(http),
            "--kv-bytes",
            "256MiB",
            "--kv-host-bytes",
            "64MiB",
        ]
        command += ["--max-sequences", str(PLACES), "--max-waiting", str(WAITING)]
        self.server = Part(f"server{number}", command, folder)
        self.side = side(number, port)

    def start(self) -> None:
        self.server.start()

    def wait(self) -> None:
        """Until it serves; then its side is started."""
        wait_until(lambda: answers(f"{self.url}/ready"), f"{self.server.name} serves")
        if self.side is not None:
            self.side.end()  # it leaves by itself when its server ends, in its own time
            self.side.start()

    def stats(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/v1/stats", timeout=60).json()

    def end(self, number: int = signal.SIGKILL) -> None:
        self.server.end(number)
        if self.side is not None:
            self.side.end()


class Fleet:
    """Two workers behind a router of this kind."""

    def __init__(self, kind: str, engine: Path, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        if kind == "smg":
            self.workers = [Worker(number, engine, folder, lambda number, port: None) for number in range(2)]
            urls = [f"grpc://{worker.address}" for worker in self.workers]
            command = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
            command += ["--policy", "cache_aware", "--load-monitor-interval", "1"]
            command += ["--prometheus-port", str(free_port())]
            self.router = Part("router", command, folder, {"HF_HUB_OFFLINE": "1"})
        else:
            env = {"DYN_FILE_KV": str(folder / "discovery"), "XDG_CACHE_HOME": str(folder)}
            side = [str(DYNAMO), "-m", "wicore_trt.integrations.dynamo", "--discovery-backend", "file"]

            def beside(number: int, port: int) -> Part:
                return Part(f"dynamo{number}", [*side, "--server", f"127.0.0.1:{port}"], folder, env)

            self.workers = [Worker(number, engine, folder, beside) for number in range(2)]
            command = [str(DYNAMO), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
            command += ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
            command += ["--router-mode", "kv", "--migration-limit", "3"]
            command += ["--router-prefill-load-scale", "4", "--router-predicted-ttl-secs", "30"]
            self.router = Part("router", command, folder, env)

    def start(self) -> None:
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            worker.wait()
        self.router.start()
        for worker in self.workers:
            self.until_used(worker)

    def until_used(self, worker: Worker) -> None:
        """Until the router sends requests to this worker."""
        begun = worker.stats()["prompt_tokens"]

        def used() -> bool:
            asyncio.run(self.ask([f"Is anybody there? {random.random()}" for _ in range(4)], 2))
            return worker.stats()["prompt_tokens"] > begun

        wait_until(used, f"{worker.server.name} is used")

    async def ask(self, prompts: list[str], max_tokens: int, **hooks: Any) -> list[Answer]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=self.url, timeout=LIMIT_S, limits=limits) as client:
            return await asyncio.gather(*(stream(client, prompt, max_tokens, **hooks) for prompt in prompts))

    def end(self) -> None:
        self.router.end()
        for worker in self.workers:
            worker.end()


@dataclass
class Answer:
    """What came of a streamed completion. `lost`: it did not come to its end, and why."""

    text: str = ""
    status: int = 0
    lost: str | None = None
    seconds: float = 0.0


async def stream(
    client: httpx.AsyncClient, prompt: str, max_tokens: int, *, first: Callable[[], object] = lambda: None
) -> Answer:
    """`first` is called with the first text."""
    body = {"model": MODEL, "prompt": f"<bos>{prompt}", "max_tokens": max_tokens, "temperature": 0, "stream": True}
    answer, begun, end = Answer(), time.monotonic(), None
    try:
        async with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as response:
            answer.status = response.status_code
            async for line in response.aiter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                if "error" in event:
                    answer.lost = str(event)
                for choice in event.get("choices", ()):
                    if choice["text"] and not answer.text:
                        first()
                    answer.text += choice["text"]
                    end = choice.get("finish_reason") or end
    except httpx.HTTPError as error:
        answer.lost = repr(error)
    if answer.lost is None and end is None:
        answer.lost = f"no finish reason, status {answer.status}"
    answer.seconds = time.monotonic() - begun
    return answer


def new_prompts(count: int) -> list[str]:
    """Some 150 tokens each, with nothing in common but the kind of text."""
    starts = [random.randrange(len(TEXT) - 500) for _ in range(count)]
    return [f"{random.random()} {TEXT[start : start + 500]}" for start in starts]


async def converse(url: str, seed: int, conversations: int = 10, turns: int = 4) -> None:
    """Conversations in turn with one beginning in common, three at a time. Texts differ by `seed`, sizes do not."""
    sizes, texts = random.Random(1), random.Random(seed)

    def cut(size: int) -> str:
        start = texts.randrange(len(TEXT) - size)
        return TEXT[start : start + size]

    common = cut(600)
    prompts = [f"{common}\n{cut(sizes.randint(300, 1500))}" for _ in range(conversations)]
    busy, locks = asyncio.Semaphore(3), [asyncio.Lock() for _ in prompts]

    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:

        async def turn(i: int, more: int) -> None:
            async with locks[i], busy:
                answer = await stream(client, prompts[i], 12)
                assert answer.lost is None, answer
                prompts[i] += f"{answer.text}\n{cut(more)}"

        orders = (sizes.sample(range(conversations), conversations) for _ in range(turns))
        await asyncio.gather(*(turn(i, sizes.randint(40, 200)) for order in orders for i in order))
