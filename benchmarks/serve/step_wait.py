"""How long the engine's thread waits for Python's interpreter lock beside streams that clients read.

    python -m benchmarks.serve.step_wait [--streams 128,512] [--step-ms 20] [--seconds 10]

An engine of fixed step time (`benchmarks.serve.paced`) behind the gRPC server, once in one process with it and once as
`wicore serve` runs it, read by clients in processes of their own. Prints, by streams: milliseconds a step that the
thread waited for the lock (mean, p99). Needs a C compiler.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import say
from benchmarks.serve.paced import OPTIONS, load_engine, load_tokenizer, serve

WARM = 0.3
"""Share of the steps that are left out at the beginning, while streams come."""
CLIENTS = 4


def serve_in_one_process() -> None:
    """As tests do: engine and server in this process."""
    from wicore_trt.config import ServerSettings
    from wicore_trt.core.port import LocalEngine
    from wicore_trt.core.text_engine import TextEngine
    from wicore_trt.serve.lifecycle import Servers, ServingProcess

    class Local(ServingProcess):
        def begin_watching(self, servers: Servers) -> None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop_serving)

        def find_engine(self) -> TextEngine:
            core, info = load_engine()
            return TextEngine(LocalEngine(core, max_waiting=4096), load_tokenizer(), info)  # type: ignore[arg-type]

        def report_serving(self, address: str, url: str | None) -> None:
            print(address, flush=True)

    Local(ServerSettings(port=0, http_port=None)).run()


async def read_streams(address: str, streams: int) -> None:
    """Read so many streams until this process is killed."""
    import grpc

    from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
    from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]

        async def read() -> None:
            sampling = pb2.SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
            while True:
                async for _ in stub.Generate(pb2.GenerateRequest(text="some words", sampling=sampling)):
                    pass

        await asyncio.gather(*(read() for _ in range(streams)))


def stop(server: subprocess.Popen[str], clients: list[subprocess.Popen[str]]) -> None:
    """End the clients at once, and the server as an operator does."""
    for process in clients:
        process.kill()
        process.wait()
    server.send_signal(signal.SIGTERM)
    server.wait()


def child(*arguments: str, module: str = __spec__.name, **more: Any) -> subprocess.Popen[str]:
    """This or another module in another process."""
    return subprocess.Popen([sys.executable, "-m", module, *arguments], text=True, **more)


def measure(how: str, streams: int, step_s: float, seconds: float) -> dict[str, float]:
    """Waits of one engine beside so many streams, in milliseconds a step."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "waits"
        os.environ[OPTIONS] = json.dumps({"step_s": step_s, "report": str(report)})
        server = child(f"--{how}", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        share = [streams // CLIENTS] * CLIENTS if streams else []
        clients = [child("--read", address, "--streams", str(n)) for n in share]
        try:
            time.sleep(seconds)
        finally:
            stop(server, clients)
        steps = json.loads(report.read_text())
    steps = steps[int(len(steps) * WARM) :]
    waits = sorted(1e3 * waited for _, waited, _ in steps)
    return {
        "steps": len(steps),
        "sequences": statistics.median(count for _, _, count in steps),
        "mean": statistics.mean(waits),
        "p99": waits[int(0.99 * (len(waits) - 1))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="128,512")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--thread", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        asyncio.run(read_streams(given.read, int(given.streams)))
    elif given.thread:
        serve_in_one_process()
    elif given.process:
        serve(http_port=None)
    else:
        say("streams, engine in: sequences a step, wait for the lock a step in ms (mean, p99)")
        for streams in map(int, given.streams.split(",")):
            for how, words in (("thread", "one process"), ("process", "its own process")):
                got = measure(how, streams, given.step_ms / 1e3, given.seconds)
                say(f"{streams:5d} {words:>16}: {got['sequences']:5.0f} {got['mean']:8.3f} {got['p99']:8.3f}")


if __name__ == "__main__":
    main()
