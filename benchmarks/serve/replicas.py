"""Replicas of one server: the throughput of several beside one, and what is cached beside taking turns.

    python -m benchmarks.serve.replicas ENGINE [--replicas 2] [--device cpu] [--open 96] [--conversations 24]

`throughput`: `wicore serve --replicas N` under N processes of `wicore bench serve`, with N of 1, on each GPU in turn,
and of --replicas. Requests never run out, since replicas whose last ones end at different times would look slower.
`affinity`: conversations whose turns the server
sends where it wants, and then conversations of which the client names the replicas in turn; cached and computed tokens
are those that the server tells. It must not know how replicas are chosen. Invariant: every request must give the tokens
that were asked for, or the run fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from benchmarks.common import installed, say
from benchmarks.serve.on_gpu import server
from wicore_trt import Client
from wicore_trt.process.replicas import find_gpus

WORDS = (8, 60)
"""Token ids of prompts, which any vocabulary has."""


def measure_throughput(given: argparse.Namespace, replicas: int, gpu: str | None) -> dict[str, Any]:
    """Tokens a second between two moments of an endless closed loop, by what the engines have counted, and the share of
    that time in which they stepped. One replica takes `gpu`."""
    with server(given, server__replicas=replicas, executor__devices=gpu) as address, Client(address) as client:
        command = [sys.executable, "-m", "wicore_trt", "bench", "serve", "--target", address, "--rate", "inf"]
        command += ["--max-concurrency", str(given.open), "--requests", str(given.requests), "--warmups", "0"]
        command += ["--input-tokens", given.prompts, "--output-tokens", given.outputs]
        loads = [subprocess.Popen([*command, "--seed", str(i)], stdout=subprocess.DEVNULL) for i in range(replicas)]
        try:
            time.sleep(given.warm_s)
            before, begun = client.stats(), time.monotonic()
            time.sleep(given.seconds)
            after, took = client.stats(), time.monotonic() - begun
            if any(load.poll() is not None for load in loads):
                raise RuntimeError("a client ended before its time: give it more --requests")
        finally:
            for load in loads:
                load.kill()
                load.wait()
    if wrong := {why: n for why, n in after.requests_finished.items() if why != "length"}:
        raise RuntimeError(f"requests ended otherwise: {wrong}")
    steps, busy = after.steps - before.steps, after.step_seconds - before.step_seconds
    tokens = after.generated_tokens - before.generated_tokens
    row = {"replicas": replicas, "gpu": gpu, "output_tok_per_s": tokens / took}
    row["prompt_tok_per_s"] = (after.prompt_tokens - before.prompt_tokens) / took
    return row | {"step_ms": 1e3 * busy / steps, "stepping": busy / took / replicas, "running": after.requests_running}


async def converse(address: str, given: argparse.Namespace, by_turns: bool) -> dict[str, Any]:
    """Tokens of the prompts of conversations with several turns, and those of them that were cached. Conversations of
    a kind share their beginning; `by_turns`: replicas are named in turn."""
    rng, counts, turn = random.Random(given.seed + by_turns), {"prompt": 0, "cached": 0}, 0
    kinds = [[rng.randrange(*WORDS) for _ in range(given.turn_tokens)] for _ in range(4)]
    async with grpc.aio.insecure_channel(address) as channel:
        stub, places = vllm_engine_pb2_grpc.VllmEngineStub(channel), asyncio.Semaphore(given.at_once)

        async def ask(tokens: list[int]) -> list[int]:
            nonlocal turn
            turn += 1
            tokenized = vllm_engine_pb2.TokenizedInput(input_ids=tokens)
            request = vllm_engine_pb2.GenerateRequest(tokenized=tokenized)
            if by_turns:
                request.data_parallel_rank = turn % given.replicas
            request.sampling_params.max_tokens, request.sampling_params.ignore_eos = given.answer_tokens, True
            [message] = [message async for message in stub.Generate(request)]
            done = message.complete
            if len(done.output_ids) != given.answer_tokens:
                raise RuntimeError(f"an answer has {len(done.output_ids)} tokens")
            counts["prompt"] += done.prompt_tokens
            counts["cached"] += done.cached_tokens
            return list(done.output_ids)

        async def hold_conversation(number: int) -> None:
            said, own = [*kinds[number % len(kinds)]], random.Random(f"{given.seed} {by_turns} {number}")
            for _ in range(given.turns):
                said += [own.randrange(*WORDS) for _ in range(given.turn_tokens)]
                async with places:
                    said += await ask(said)

        begun = time.monotonic()
        await asyncio.gather(*(hold_conversation(number) for number in range(given.conversations)))
    row = {"replicas chosen": "in turn, by the client" if by_turns else "by the server", **counts}
    row["computed"] = counts["prompt"] - counts["cached"]
    return row | {"hit_rate": counts["cached"] / counts["prompt"], "seconds": time.monotonic() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--runs", type=int, default=2, help="of each number of replicas; as many as GPUs, since these differ"
    )
    parser.add_argument(
        "--open", type=int, default=96, help="requests that are open at a time, a replica; 0: no throughput"
    )
    parser.add_argument("--requests", type=int, default=4000, help="a replica; more than the time is enough for")
    parser.add_argument("--warm-s", type=float, default=15.0, help="until tokens count")
    parser.add_argument("--seconds", type=float, default=30.0, help="in which they do")
    parser.add_argument("--prompts", default="256,512,1024")
    parser.add_argument("--outputs", default="16,48,96,160,256,384", help="mixed, so that no waves end together")
    parser.add_argument("--kv-bytes", default="30GiB")
    parser.add_argument("--conversations", type=int, default=24, help="0: no affinity")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--turn-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.long = 0
    document: dict[str, Any] = {"versions": installed(), "throughput": [], "affinity": []}
    if given.open:
        gpus: Sequence[str | None] = find_gpus(given.device, given.replicas, 1) or [None]
        for run in range(given.runs):
            for replicas, gpu in ((1, gpus[run % len(gpus)]), (given.replicas, None)):
                document["throughput"].append(measure_throughput(given, replicas, gpu))
                say(str(document["throughput"][-1]))
        speed = {
            n: statistics.mean(row["output_tok_per_s"] for row in document["throughput"] if row["replicas"] == n)
            for n in (1, given.replicas)
        }
        document["ratio"] = speed[given.replicas] / speed[1]
        say(f"{given.replicas} replicas: {document['ratio']:.3f}x the throughput of one")
    if given.conversations:
        with server(given, server__replicas=given.replicas, kv__prefix_cache="true") as address:
            for by_turns in (False, True):
                document["affinity"].append(asyncio.run(converse(address, given, by_turns)))
                say(str(document["affinity"][-1]))
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
