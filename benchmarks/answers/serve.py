"""Serves an engine with `wicore serve` in processes of its own and asks it over gRPC: same tokens, tiers, cancel, stop.

Knows the wire contract and the command line; not executors. Two servers in batch-invariant mode: one with room and no
prefix cache, so it computes everything, and one whose device pool holds a few conversations, with host memory and a
disk. Invariant: every comparison is token by token, and a tier that nothing was read from does not count as tested.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.answers.data import Oracle
from benchmarks.answers.prompts import LONG
from wicore_trt.errors import WicoreError
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc

SERVING = pb2.SERVER_STATE_SERVING
START_S, STOP_S, CALL_S = 180.0, 30.0, 300.0
SEQUENCES, BATCH_TOKENS, CONTEXT = 32, 256, 2048
ROOMY = ["--kv-bytes", "2GiB", "--max-context", str(CONTEXT)]
TIGHT_CONTEXT = 768
TIGHT = [
    *("--kv-bytes", "24MiB", "--kv-host-bytes", "28MiB", "--kv-disk-bytes", "2GiB"),
    *("--max-context", str(TIGHT_CONTEXT)),
]
"""A conversation of Gemma 3 270M comes to 8 MB: twelve take four times the device pool, and more than the host has."""
TURNS, TURN_TOKENS, TURN_OUTPUT, IN_FLIGHT = 3, 100, 24, 3
CANCEL_AFTER = 5
Say = Callable[[str], None]


@dataclass
class Server:
    """A `wicore serve` process. Raises WicoreError when it does not come up."""

    engine: Path
    flags: Sequence[str]
    device: str
    log: Path
    settings: dict[str, str] = field(default_factory=dict)
    address: str = ""
    begun: float = 0.0

    def start(self) -> None:
        command = [sys.executable, "-m", "wicore_trt.cli.main", "serve", str(self.engine)]
        command += ["--grpc-port", "0", "--http-port", "none", "--device", self.device]
        command += ["--max-sequences", str(SEQUENCES), "--max-batch-tokens", str(BATCH_TOKENS), *self.flags]
        env = {**os.environ, "WICORE_EXECUTOR__BATCH_INVARIANT": "true", **self.settings}
        self.begun = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log.open("wb"), env=env)

    async def ready(self) -> float:
        """Wait until the server takes requests; return the seconds since its process began."""
        lines: queue.Queue[bytes] = queue.Queue()
        assert self.process.stdout is not None
        out = self.process.stdout
        threading.Thread(target=lambda: lines.put(out.readline()), daemon=True).start()
        line = await asyncio.to_thread(lines.get, timeout=START_S)
        if not line.startswith(b"ready on "):
            raise WicoreError(f"the server did not start: {self.log.read_text(errors='replace')[-2000:]}")
        self.address = line.decode().split()[-1]
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]
        while time.monotonic() - self.begun < START_S:
            if self.process.poll() is not None:
                raise WicoreError(f"the server ended: {self.log.read_text(errors='replace')[-2000:]}")
            info = await self.stub.GetServerInfo(pb2.GetServerInfoRequest(), timeout=CALL_S, wait_for_ready=True)
            if info.state == SERVING:
                return time.monotonic() - self.begun
            await asyncio.sleep(0.02)
        raise WicoreError(f"the server is not ready: {self.log.read_text(errors='replace')[-2000:]}")

    async def generate(self, prompt: Sequence[int], count: int) -> tuple[list[int], int]:
        """Generate greedy tokens; return them and how many of the prompt's were cached."""
        tokens: list[int] = []
        cached = 0
        async for response in self.stub.Generate(_request(prompt, count), timeout=CALL_S):
            ended = response.HasField("finish")
            tokens += (response.finish.delta if ended else response.delta).token_ids
            cached = response.finish.usage.cached_tokens if ended else cached
        return tokens, cached

    async def cancel_amid(self, prompt: Sequence[int]) -> list[int]:
        """Hang up amid a long answer; return the tokens that came before."""
        call = self.stub.Generate(_request(prompt, CONTEXT - len(prompt)), timeout=CALL_S)
        tokens: list[int] = []
        async for response in call:
            tokens += response.delta.token_ids
            if len(tokens) >= CANCEL_AFTER:
                call.cancel()
                break
        return tokens

    async def stats(self) -> Any:
        return await self.stub.GetStats(pb2.GetStatsRequest(), timeout=CALL_S)

    async def stop(self) -> tuple[int, float]:
        """Send SIGTERM; return the exit code and the seconds it took."""
        await self.channel.close()
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.to_thread(self.process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return -1, time.monotonic() - begun
        return code, time.monotonic() - begun

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def serve_all(engine: Path, oracle: Oracle, alone: np.ndarray, device: str, say: Say) -> list[str]:
    """Serve and ask; return sentences on faults. `alone` [P, T]: greedy tokens of the executor alone."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch)
        roomy = Server(engine, ROOMY, device, log / "roomy", {"WICORE_KV__PREFIX_CACHE": "false"})
        tight = Server(engine, [*TIGHT, "--kv-disk", str(log / "disk")], device, log / "tight")
        roomy.start()
        try:
            return asyncio.run(_ask(roomy, tight, oracle, alone, say))
        except (WicoreError, grpc.aio.AioRpcError, queue.Empty) as error:
            return [f"serving failed: {error!r}", *(_tail(s) for s in (roomy, tight))]
        finally:
            for server in (roomy, tight):
                if server.begun:
                    server.kill()


async def _ask(roomy: Server, tight: Server, oracle: Oracle, alone: np.ndarray, say: Say) -> list[str]:
    problems: list[str] = []
    say(f"serve: ready {await roomy.ready():.1f} s after the start of the process")
    tight.start()
    coming = asyncio.create_task(tight.ready())
    begun = time.monotonic()
    long = oracle.prompts[oracle.names.index("prose")]
    hung_up = asyncio.create_task(roomy.cancel_amid(long))
    answers = await asyncio.gather(*(roomy.generate(prompt, alone.shape[1]) for prompt in oracle.prompts))
    partial = await hung_up
    seconds = time.monotonic() - begun
    wrong = [oracle.names[i] for i, (tokens, _) in enumerate(answers) if tokens != alone[i].tolist()]
    say(
        f"serve: {len(answers)} prompts at once, {alone.size / seconds:.0f} tokens/s over gRPC, {len(wrong)} answers "
        f"are not those of the executor alone{': ' + ', '.join(wrong) if wrong else ''}"
    )
    problems += [f"served answers differ: {wrong}"] if wrong else []
    problems += await _check_cancel(roomy, partial, alone[oracle.names.index("prose")].tolist(), say)
    conversations = [p for name, p in zip(oracle.names, oracle.prompts, strict=True) if name != LONG][:12]
    expected = await _conversations(roomy, conversations, None)
    say(f"tiers: ready {await coming:.1f} s after the start, beside the other server's requests")
    problems += await _compare_tiers(tight, conversations, expected, say)
    for name, server in (("no tiers", roomy), ("tiers", tight)):
        code, took = await server.stop()
        say(f"serve: {name}: exit code {code}, {took:.1f} s after SIGTERM")
        problems += [f"{name}: exit code {code}"] if code else []
        if "Traceback" in server.log.read_text(errors="replace"):
            problems.append(f"{name}: a traceback in the log: {_tail(server)}")
    return problems


async def _check_cancel(server: Server, partial: list[int], whole: list[int], say: Say) -> list[str]:
    """Check that a call which the client ended takes nothing any more, and that its tokens were right."""
    begun = time.monotonic()
    while (stats := await server.stats()).requests_running or stats.streams_open:
        if time.monotonic() - begun > STOP_S:
            return [f"a cancelled call still runs after {STOP_S} s"]
        await asyncio.sleep(0.01)
    finished = dict(stats.requests_finished)
    used = {pool.group: pool.used_pages for pool in stats.pools}
    say(f"serve: cancelled after {len(partial)} tokens; finished {finished}, pages in use {used}")
    problems = [] if finished.get("cancelled") == 1 else [f"no cancelled request in {finished}"]
    problems += [f"pages are still in use: {used}"] if any(used.values()) else []
    count = min(len(partial), len(whole))
    return problems if partial[:count] == whole[:count] else [*problems, "the cancelled call said other tokens"]


async def _conversations(
    server: Server, prompts: Sequence[Sequence[int]], expected: list[list[list[int]]] | None
) -> list[list[list[int]]]:
    """Ask for turns of conversations, round robin, each the whole conversation so far; return tokens by turn and
    conversation. Conversations go on with `expected` answers, if any, so one wrong token does not hide the next."""
    so_far = [list(p) for p in prompts]
    said: list[list[list[int]]] = []
    for turn in range(TURNS):
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def one(prompt: list[int], gate: asyncio.Semaphore = gate) -> list[int]:
            async with gate:
                return (await server.generate(prompt, TURN_OUTPUT))[0]

        said.append(await asyncio.gather(*(one(prompt) for prompt in so_far)))
        for i, prompt in enumerate(so_far):
            other = prompts[(i + turn + 1) % len(prompts)]
            user = (list(other[1:]) * TURN_TOKENS or [5])[:TURN_TOKENS]
            prompt += (expected or said)[turn][i] + user
    return said


async def _compare_tiers(
    server: Server, prompts: Sequence[Sequence[int]], expected: list[list[list[int]]], say: Say
) -> list[str]:
    """Hold the conversations twice: the second time all of them lie somewhere in the tiers."""
    problems = []
    for again in range(2):
        said = await _conversations(server, prompts, expected)
        wrong = [(t, i) for t, turn in enumerate(said) for i, tokens in enumerate(turn) if tokens != expected[t][i]]
        say(f"tiers: round {again + 1}, {sum(map(len, said))} answers, {len(wrong)} not those of the other server")
        problems += [f"answers differ with tiers, (turn, conversation): {wrong}"] if wrong else []
    stats = await server.stats()
    hits = {tier.tier: tier.hit_tokens for tier in stats.kv.tiers}
    failures = {tier.tier: dict(tier.failures) for tier in stats.kv.tiers if tier.failures}
    read = {tier.tier: tier.read_bytes for tier in stats.kv.tiers}
    say(
        f"tiers: {stats.prompt_tokens} prompt tokens, saved by {hits}; bytes read {read}; preemptions "
        f"{stats.preemptions}; failures {failures or 'none'}"
    )
    problems += [f"nothing was read from the {tier} tier" for tier in ("host", "disk") if not read.get(tier)]
    return problems + ([f"failures in the tiers: {failures}"] if failures else [])


def _request(prompt: Sequence[int], count: int) -> Any:
    sampling = pb2.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return pb2.GenerateRequest(token_ids=pb2.TokenIds(ids=prompt), sampling=sampling)


def _tail(server: Server) -> str:
    if not server.begun:
        return "not started"
    return server.log.read_text(errors="replace")[-1500:]
