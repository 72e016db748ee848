"""Servers of real weights that `kill -9` ends amid requests, again and again, each chain of them on one disk folder.

`python -m benchmarks.answers.kills ENGINE --chains 4 --seconds 200` first asks a server without a prefix cache. Then
each chain serves those prompts by host memory and disk, pages coded if --coded, and kills all processes or the engine's
alone. Exit code 1 when an answer differs, a server does not come back, or a process is left behind.

Knows the wire contract and processes; not executors. Invariant: an answer counts only when it is whole.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc
import psutil

from benchmarks.answers.oracle import tokenize_prompts
from benchmarks.answers.prompts import LONG
from benchmarks.answers.serve import IN_FLIGHT, ROOMY, TIGHT, TURN_OUTPUT, TURN_TOKENS, TURNS, Server
from benchmarks.common import say
from wicore_trt.errors import WicoreError
from wicore_trt.text.tokenizer import Tokenizer

BACK_S, GONE_S = 120.0, 5.0
"""Times for a server to serve again, and for processes to end behind their parent."""
BETWEEN_S = 0.1, 3.0
ENGINE_ALONE = 0.5
"""Share of kills that end the engine's process, which the supervisor starts again."""
Asked = list[tuple[list[int], list[int]]]


async def ask_reference(engine: Path, device: str, home: Path) -> Asked:
    """Ask a server that computes everything: prompts and greedy answers, turn by turn."""
    names, prompts = tokenize_prompts(Tokenizer.from_dir(engine))
    so_far = [list(p) for name, p in zip(names, prompts, strict=True) if name != LONG][:12]
    server, found = Server(engine, ROOMY, device, home / "roomy", {"WICORE_KV__PREFIX_CACHE": "false"}), Asked()
    server.start()
    try:
        await server.ready()
        for turn in range(TURNS):
            answers = await asyncio.gather(*(server.generate(p, TURN_OUTPUT) for p in so_far))
            for number, (prompt, (tokens, _)) in enumerate(zip(so_far, answers, strict=True)):
                found.append((list(prompt), tokens))
                other = prompts[(number + turn + 1) % len(so_far)]
                prompt += tokens + (other[1:] * TURN_TOKENS or [5])[:TURN_TOKENS]
    finally:
        server.kill()
    return found


class Chain:
    """Servers on one disk folder, one after the other."""

    def __init__(self, args: argparse.Namespace, number: int, home: Path, asked: Asked, until: float) -> None:
        self._rng, self._home, self._asked, self._until = random.Random(f"{args.seed}/{number}"), home, asked, until
        self._engine, self._device = args.engine, args.device
        self._settings = {"WICORE_KV__COMPRESSION": "lossless" if args.coded else "none"}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self) -> None:
        while time.monotonic() < self._until and not self.wrong:
            flags = [*TIGHT, "--kv-disk", str(self._home / "disk")]
            server = Server(self._engine, flags, self._device, self._home / "log", self._settings)
            server.start()
            workers: list[asyncio.Task[None]] = []
            try:
                await server.ready()
                self.counts["servers"] += 1
                workers = [asyncio.create_task(self._ask_on(server)) for _ in range(IN_FLIGHT)]
                await self._kill_until_gone(server)
            except WicoreError as error:
                self.wrong.append(f"no server: {error}")
            finally:
                server.kill()
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
                say(f"kills: {dict(sorted(self.counts.items()))} so far; {len(self.wrong)} wrong")
                await server.channel.close()

    async def _ask_on(self, server: Server) -> None:
        while True:
            prompt, right = self._rng.choice(self._asked)
            try:
                tokens, cached = await server.generate(prompt, TURN_OUTPUT)
            except grpc.aio.AioRpcError:
                self.counts["errors"] += 1
                await asyncio.sleep(0.05)
                continue
            self.counts["answers"] += 1
            self.counts["cached tokens"] += cached
            if tokens != right:
                self.wrong.append(f"{tokens} for {right}")

    async def _kill_until_gone(self, server: Server) -> None:
        """Kill the engine's process until the turn of all processes comes."""
        while not self.wrong:
            await asyncio.sleep(self._rng.uniform(*BETWEEN_S))
            await self._count_hits(server)
            if time.monotonic() > self._until:
                return
            root = psutil.Process(server.process.pid)
            family = root.children(recursive=True)
            engines = [p for p in family if "engine" in " ".join(p.cmdline()[4:5])]
            alone = bool(engines) and self._rng.random() < ENGINE_ALONE
            for process in engines if alone else [root]:
                process.kill()
            self.counts["engines killed" if alone else "servers killed"] += 1
            if not alone:
                _, left = await asyncio.to_thread(psutil.wait_procs, family, GONE_S)
                self.wrong += [f"left behind: {p.cmdline()[:6]}" for p in left]
                return
            answers, end = self.counts["answers"], time.monotonic() + BACK_S
            while self.counts["answers"] == answers:
                if time.monotonic() > end:
                    self.wrong.append("an engine does not come back")
                    return
                await asyncio.sleep(0.1)

    async def _count_hits(self, server: Server) -> None:
        try:
            tiers = (await server.stats()).kv.tiers
        except grpc.aio.AioRpcError:
            return
        self.counts.update({f"tokens of {tier.tier}": tier.hit_tokens for tier in tiers})


async def run_chains(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        asked = await ask_reference(args.engine, args.device, home)
        say(f"kills: {len(asked)} answers without tiers")
        until = time.monotonic() + args.seconds
        homes = [home / str(number) for number in range(args.chains)]
        for folder in homes:
            folder.mkdir()
        chains = [Chain(args, number, folder, asked, until) for number, folder in enumerate(homes)]
        await asyncio.gather(*(chain.run() for chain in chains))
    total: Counter[str] = sum((chain.counts for chain in chains), Counter())
    wrong = [line for chain in chains for line in chain.wrong]
    for line in wrong[:8]:
        say(f"WRONG: {line}")
    say(f"kills: {dict(sorted(total.items()))}; {len(wrong)} wrong")
    return int(bool(wrong) or not total["tokens of disk"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--coded", action="store_true")
    return asyncio.run(run_chains(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
