"""A server of two ranks whose second rank is killed or stopped again and again, under load and when idle.

Each answer is whole and right, or an error that comes soon; the server comes back each time, and leaves nothing. On two
GPUs: pytest -q -s -m long tests/serve/test_rank_kills.py -k cuda; RANK_KILLS is the number of kills.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tiny_source import write_tiny_source

from wicore_trt.engine.build import build_engine
from wicore_trt.process.child import PATIENCE, QUICK_S

KILLS = int(os.environ.get("RANK_KILLS", "50"))
IDLE = KILLS // 5
"""Kills, the last of which hit an idle server. One takes some 13 s on GPUs."""
GPU_SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 384, "max_position_embeddings": 2048,
}  # fmt: skip
SOON_S = 4.0  # 2 s of silence, and what a busy machine takes
WORDS = "abcdefghijklmnop"


class RankServer:
    """`wicore serve` of an engine of two ranks, and the tokens that it gave to each prompt first."""

    def __init__(self, engine: Path, home: Path, *more: str) -> None:
        self.log = home / "log"
        command = [sys.executable, "-m", "wicore_trt.cli.main", "serve", str(engine), "--port", "0", "--grpc-port", "0",
                   "--kv-host-bytes", "4MiB", "--kv-bytes", "64KiB", "--kv-disk", str(home / "disk")]  # fmt: skip
        with self.log.open("w") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen([*command, *more], stdout=log, stderr=log, env=env)
        end = time.monotonic() + 120
        while not (found := re.search(r"http://[\w.]+:\d+", self.log.read_text())):
            assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        self.url, self.known, self.lock = found[0], dict[str, str](), threading.Lock()
        self.counts: Counter[str] = Counter()

    def ask(self, prompt: str, seed: int) -> bool:
        """Return whether an answer came; it is the first one's, and an error says why."""
        begun = time.monotonic()
        body = {"prompt": prompt, "max_tokens": 40, "seed": seed, "ignore_eos": True}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        if reply.status_code != 200:
            said = reply.json()["error"]["message"]
            assert reply.status_code == 503 and re.search("rank 1|being started|loading|its process ended", said), said
            self.counts["stopped" if "stopped" in said else "refused"] += 1
            return False
        with self.lock:
            self.counts["answered"] += 1
            self.counts["cached"] += reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            text = reply.json()["choices"][0]["text"]
            assert self.known.setdefault(f"{seed} {prompt}", text) == text, "another answer to the same request"
            self.counts["slowest ms"] = max(self.counts["slowest ms"], int(1e3 * (time.monotonic() - begun)))
        return True

    def find_ranks(self, named: str = '"rank": ') -> list[psutil.Process]:
        """Find the processes of ranks but the first, or others by what their command lines have."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if any(named in part for part in child.cmdline()):
                    found.append(child)
            except psutil.Error:
                pass
        return found

    def wait_until_ready(self) -> None:
        end = time.monotonic() + 120
        while httpx.get(f"{self.url}/ready", timeout=10).status_code != 200:
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.02)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fifty_kills_of_a_rank(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, options, flags = dict[str, int](), dict[str, Any](page_tokens=8), ("--device", device)
    if device == "cuda":
        torch = pytest.importorskip("torch")
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        target = "sm{}{}".format(*torch.cuda.get_device_capability())
        sizes, options = GPU_SIZES, {"page_tokens": 32, "backend": "triton", "targets": [target]}
        flags = *flags, "--kv-bytes", "8MiB"
        monkeypatch.setenv("WICORE_EXECUTOR__BATCH_INVARIANT", "true")
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    rng = random.Random(seed)
    build_engine(write_tiny_source(tmp_path / "source", **sizes), tmp_path / "engine", tp_size=2, **options)
    server, stop, faults = RankServer(tmp_path / "engine", tmp_path, *flags), threading.Event(), list[BaseException]()
    prompts = [" ".join(rng.choices(WORDS, k=rng.randrange(4, 60))) for _ in range(12)]

    def load(number: int) -> None:
        own = random.Random(seed + number)
        while not stop.is_set():
            try:
                if not server.ask(own.choice(prompts), own.randrange(3)):
                    time.sleep(0.05)
            except BaseException as error:
                faults.append(error)
                return

    threads = [threading.Thread(target=load, args=(n,)) for n in range(6)]
    try:
        server.wait_until_ready()
        before: set[int] = set()
        for number in range(KILLS):
            if number == KILLS - IDLE:
                stop.set()
                for thread in threads:
                    thread.join()
            elif not number:
                for thread in threads:
                    thread.start()
            server.wait_until_ready()
            # one in so many hits a process that counts as well, so that the next ones are started without a pause
            time.sleep(rng.random() if (number + 1) % (PATIENCE + 1) else QUICK_S + rng.random())
            (rank,) = server.find_ranks()
            assert rank.pid not in before
            before.add(rank.pid)
            stops = rng.random() < 0.3 and number < KILLS - IDLE  # a stopped rank is noticed in a step
            rank.send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
            end = time.monotonic() + SOON_S
            while httpx.get(f"{server.url}/ready", timeout=10).status_code == 200:
                assert time.monotonic() < end, "nobody noticed"
                time.sleep(0.02)
            assert not faults, faults
            print(number + 1, "kills", dict(server.counts), flush=True)
        server.wait_until_ready()
        assert server.ask(prompts[0], 0)
        family = [*psutil.Process(server.process.pid).children(recursive=True)]
        server.process.terminate()
        assert server.process.wait(60) == 0
        _, left = psutil.wait_procs(family, timeout=10)
        assert not left
    finally:
        stop.set()
        server.process.kill()
    print(dict(server.counts))
    assert server.counts["answered"] > 2 * KILLS and server.counts["cached"] > 0 and not faults
