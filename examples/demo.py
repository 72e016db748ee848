"""From nothing to served text in one go: fetch Gemma 3 270M, convert, build, serve, ask over gRPC.

Run by `make demo`. Everything goes through the public commands and the public gRPC API. A second run finds the
checkpoint and the engine and goes straight to serving. On a terminal the server stays until Ctrl-C, so that the curl
line and the page that are printed last can be tried; otherwise they are tried here, and it is shut down.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc as rpc

CACHE = Path.home() / ".cache" / "wicore"
GGUF = CACHE / "gemma-3-270m-q4_k_m.gguf"
CHECKPOINT = CACHE / "demo" / "gemma3-270m-checkpoint"
ENGINE = CACHE / "demo" / "gemma3-270m-engine"
WICORE = [sys.executable, "-m", "wicore_trt.cli.main"]

# Longer than one KV page, so that the second request finds whole pages to reuse.
STORY = (
    "The lighthouse keeper wrote in his log every evening. He noted the wind, the height of the waves, the ships that "
    "passed and the birds that rested on the railing. In forty years he had missed only two entries: one when the "
    "storm of the century broke his window, and one when his daughter was born. On the last page of the last book he"
)


def step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def wicore(*arguments: str | Path) -> None:
    """Run a wicore command, showing it."""
    print("$ wicore", *arguments, flush=True)
    subprocess.run([*WICORE, *map(str, arguments)], check=True)


def build() -> None:
    """Make the engine, or reuse what an earlier run made."""
    step("Fetch Gemma 3 270M (Gemma terms of use apply)")
    wicore("fetch", "gemma3-270m", "--output", GGUF)
    step("Convert to the unified checkpoint, build the engine")
    if ENGINE.exists():
        print(f"{ENGINE} is there already.")
        wicore("inspect", ENGINE, "--verify")
        return
    if not CHECKPOINT.exists():
        wicore("convert", GGUF, CHECKPOINT, "--dtype", "bfloat16")
    wicore("build", CHECKPOINT, ENGINE)


def serve() -> tuple[subprocess.Popen[str], str, str]:
    """Start the server on free ports; returns it, its address and its URL once it is ready."""
    step("Serve")
    command = [*WICORE, "serve", str(ENGINE), "--grpc-port", "0", "--http-port", "0", "--log-level", "warning"]
    print("$ wicore", *command[len(WICORE) :], flush=True)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = ""
    for line in server.stdout:
        print(line, end="", flush=True)
        if match := re.search(r"HTTP on (http://\S+)", line):
            return server, address, match[1]
        if match := re.search(r"(127\.0\.0\.1:\d+)", line):
            address = match[1]
    raise SystemExit(f"the server ended with exit code {server.wait()}")


def wait_until_serving(channel: grpc.Channel, server: subprocess.Popen[str], started: float) -> None:
    """Ask the standard health service until the engine is loaded and warm."""
    check = health_pb2_grpc.HealthStub(channel).Check
    while server.poll() is None:
        if check(health_pb2.HealthCheckRequest(), timeout=10).status == health_pb2.HealthCheckResponse.SERVING:
            print(f"ready after {time.perf_counter() - started:.1f} s")
            return
        time.sleep(0.1)
    raise SystemExit(f"the server ended with exit code {server.returncode}")


def ask(stub: rpc.InferenceServiceStub, prompt: str) -> None:
    """Send one prompt, print the text as it streams, then what the server measured."""
    request = pb.GenerateRequest(text=prompt, sampling=pb.SamplingParams(max_tokens=48, temperature=0.0))
    started, first = time.perf_counter(), None
    print(f"{prompt}\033[1m" if sys.stdout.isatty() else prompt, end="", flush=True)
    for response in stub.Generate(request):
        first = first or time.perf_counter()
        delta = response.delta if response.HasField("delta") else response.finish.delta
        print(delta.text, end="", flush=True)
    ended = time.perf_counter()
    print("\033[0m" if sys.stdout.isatty() else "", flush=True)
    usage = response.finish.usage
    rate = (usage.completion_tokens - 1) / (ended - (first or ended))
    print(
        f"-- TTFT {1000 * ((first or ended) - started):.0f} ms, {rate:.1f} tokens/s, {usage.completion_tokens} tokens; "
        f"KV cache: {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens reused"
    )


def show(stats: pb.GetStatsResponse) -> None:
    print(f"{stats.steps} steps, {stats.step_time.ToTimedelta().total_seconds():.2f} s in them")
    print(f"{stats.prompt_tokens} prompt tokens, {stats.cached_prompt_tokens} of them from the KV cache")
    for pool in stats.pools:
        size = pool.total_pages * pool.page_bytes / 2**20
        print(f"{pool.group} pages: {pool.cached_pages} hold reusable KV, {pool.total_pages} in all ({size:.0f} MiB)")


def try_it(url: str, server: subprocess.Popen[str]) -> None:
    """Print a curl line and the page's address: for somebody at a terminal, until Ctrl-C; otherwise ask both here."""
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
    curl = ["curl", "-s", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", body]
    print(shlex.join(curl))
    print(f"page: {url}/", flush=True)
    if sys.stdin.isatty() and sys.stdout.isatty():
        print("Ctrl-C shuts the server down.", flush=True)
        with suppress(KeyboardInterrupt):
            server.wait()
        return
    asked = urllib.request.Request(curl[2], body.encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        print(json.load(answer)["choices"][0]["text"])
    with urllib.request.urlopen(f"{url}/") as page:
        assert b"WiCore-TRT" in page.read()


def main() -> None:
    began = time.monotonic()
    build()
    started = time.perf_counter()
    server, address, url = serve()
    try:
        with grpc.insecure_channel(address) as channel:
            wait_until_serving(channel, server, started)
            stub = rpc.InferenceServiceStub(channel)
            step("First request")
            ask(stub, STORY)
            step("Second request: same beginning, so its KV pages are in the cache")
            ask(stub, STORY + " wrote")
            step("What the engine did")
            show(stub.GetStats(pb.GetStatsRequest()))
        step("Try it yourself")
        try_it(url, server)
    finally:
        step("Shut down")
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=60)
    print(f"The server ended with exit code {code}. Demo took {time.monotonic() - began:.0f} s.")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
