"""Start-up: `wicore serve` as a user runs it, from the start of its process until health says that it serves.

It must not know documents. Invariant: the server has answered one request over gRPC with the tokens that were asked
for, or there is no figure.
"""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.peer import end_group, last_words

ANSWER_TOKENS, PROMPT_TOKENS = 16, 32
POLL_S = 0.02
GREETING = "ready on "
FLAGS = (
    "--host", "127.0.0.1", "--grpc-port", "0", "--http-port", "none", "--max-sequences", "8", "--max-batch-tokens",
    "2048", "--max-context", "2048", "--kv-bytes", "6GiB",
)  # fmt: skip


def command(engine: Path) -> list[str]:
    return [sys.executable, "-m", "wicore_trt.cli.main", "serve", str(engine), *FLAGS]


def measure_startup(arguments: Sequence[str], vocab: int, log: Path, timeout_s: float) -> dict[str, Any]:
    """Start a server, wait until it serves, let it answer, end it. `arguments` is `command(engine)`.

    Raises RuntimeError, with the end of its log, when it does not serve within `timeout_s` seconds or answers wrongly.
    """
    with log.open("wb") as stream:
        begun = time.monotonic()
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=stream, start_new_session=True, env=_environment()
        )
        try:
            address = _address(process, begun + timeout_s)
            _until_serving(process, address, begun + timeout_s)
            ready = time.monotonic() - begun
            tokens = asyncio.run(asyncio.wait_for(_answer(address, vocab), timeout_s))
            return {"ready_s": ready, "first_answer_s": time.monotonic() - begun, "tokens": tokens}
        except Exception as error:
            raise RuntimeError(f"{error or type(error).__name__}; the log ends: {last_words(log)}") from error
        finally:
            end_group(process)


def _environment() -> dict[str, str]:
    """Without settings of whoever runs the benchmark."""
    return {k: v for k, v in os.environ.items() if not k.startswith("WICORE_")} | {"PYTHONUNBUFFERED": "1"}


def _address(process: subprocess.Popen[bytes], deadline: float) -> str:
    """The address that the server prints when it serves."""
    assert process.stdout is not None
    lines: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=lambda: lines.put(process.stdout.readline()), daemon=True).start()  # type: ignore[union-attr]
    try:
        line = lines.get(timeout=max(deadline - time.monotonic(), 0.0)).decode()
    except queue.Empty:
        raise RuntimeError("the server does not serve") from None
    if not line.startswith(GREETING):
        raise RuntimeError(f"the server said {line!r} in place of its address")
    return line.removeprefix(GREETING).strip()


def _until_serving(process: subprocess.Popen[bytes], address: str, deadline: float) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with code {process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError("the server did not become ready in time")
            try:
                status = stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0).status
                if status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass  # it listens, and answers a moment later
            time.sleep(POLL_S)


async def _answer(address: str, vocab: int) -> int:
    """Tokens of one answer."""
    from wicore_trt.bench.client import GrpcTarget
    from wicore_trt.bench.workload import BenchRequest, PromptPart, WordList

    target = await GrpcTarget.connect(address)
    try:
        prompt = WordList(vocab, seed=0).tokens(PromptPart("startup", PROMPT_TOKENS))
        record = await target.generate(BenchRequest(prompt, ANSWER_TOKENS))
    finally:
        await target.close()
    if record.error is not None:
        raise RuntimeError(record.error)
    assert record.output_tokens == ANSWER_TOKENS
    return ANSWER_TOKENS
