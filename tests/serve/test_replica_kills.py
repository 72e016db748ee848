"""A server of two replicas of a small model whose engines are killed under load, one after the other, and the disk.

Each answer is that of one engine alone, or an error of the replica that was killed; the server is ready all the time.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from serve.test_rank_kills import WORDS, RankServer
from tiny_source import write_tiny_source

from wicore_trt import LLM, SamplingParams
from wicore_trt.engine.build import build_engine

ENGINE = "wicore_trt.process.engine"
SEEDS = range(3)


def run_kv(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wicore_trt.cli.main", "kv", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "kills"), [(1, 10), (2, 3)])
def test_kills_of_replicas(tmp_path: Path, ranks: int, kills: int) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    rng = random.Random(seed)
    build_engine(write_tiny_source(tmp_path / "source"), tmp_path / "engine", tp_size=ranks, page_tokens=8)
    prompts = [" ".join(rng.choices(WORDS, k=rng.randrange(4, 60))) for _ in range(12)]
    known = {}
    with LLM(str(tmp_path / "engine")) as alone:
        for number in SEEDS:
            params = SamplingParams(max_tokens=40, seed=number, ignore_eos=True)
            for prompt, [completion] in zip(prompts, alone.generate(prompts, params), strict=True):
                known[f"{number} {prompt}"] = completion.text
    server, stop, faults = (
        RankServer(tmp_path / "engine", tmp_path, "--replicas", "2", "--kv-bytes", "128KiB"),
        threading.Event(),
        [],
    )
    server.known = known

    def load(number: int) -> None:
        own = random.Random(seed + number)
        while not stop.is_set():
            try:
                server.ask(own.choice(prompts), own.choice(SEEDS))
            except BaseException as error:
                faults.append(error)
                return

    threads = [threading.Thread(target=load, args=(n,)) for n in range(6)]

    def read_state() -> str:
        reply = httpx.get(f"{server.url}/ready", timeout=10)
        assert reply.status_code == 200, reply.text  # one serves all the time
        return reply.json()["status"]

    def wait_for_state(state: str) -> None:
        end = time.monotonic() + 60
        while read_state() != state:
            assert time.monotonic() < end and not faults, (state, faults, server.log.read_text()[-4000:])
            time.sleep(0.02)

    try:
        server.wait_until_ready()
        for thread in threads:
            thread.start()
        for _ in range(kills):
            wait_for_state("ready")
            time.sleep(rng.random())
            min(server.find_ranks(ENGINE), key=psutil.Process.create_time).send_signal(signal.SIGKILL)
            wait_for_state("degraded")
        wait_for_state("ready")
        stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a request is stuck"
        assert not faults, faults
        assert server.counts["stopped"] <= kills * 6 and not server.counts["refused"]
        assert run_kv("purge", str(tmp_path / "disk"), "--yes").returncode == 4  # the server holds it
        family = psutil.Process(server.process.pid).children(recursive=True)
        server.process.terminate()
        assert server.process.wait(60) == 0 and not psutil.wait_procs(family, timeout=10)[1]
        assert server.counts["answered"] > 20 * kills and server.counts["cached"] > 0, server.counts
        held = json.loads(run_kv("inspect", str(tmp_path / "disk"), "--json").stdout)["replicas"]
        assert [Path(report["path"]).name for report in held] == ["replica-0", "replica-1"]
        assert all(report["namespaces"][0]["pages"] > 0 for report in held)
        assert (tmp_path / "disk/replica-0/secret").read_bytes() == (tmp_path / "disk/replica-1/secret").read_bytes()
        print(dict(server.counts))
        server = RankServer(tmp_path / "engine", tmp_path, "--replicas", "2", "--kv-bytes", "128KiB")
        server.known = known
        server.wait_until_ready()
        for prompt in prompts * 2:
            assert server.ask(prompt, 0)
        text = httpx.get(f"{server.url}/metrics").text
        hits = re.findall(r'wicore_kv_hit_tokens_total{replica="\d",tier="disk"} (\S+)', text) or re.findall(
            r'wicore_kv_hit_tokens_total{tier="disk",replica="\d"} (\S+)', text
        )
        assert len(hits) == 2 and sum(map(float, hits)) > 0, text
        server.process.terminate()
        assert server.process.wait(60) == 0
        assert run_kv("purge", str(tmp_path / "disk"), "--yes").returncode == 0
        held = json.loads(run_kv("inspect", str(tmp_path / "disk"), "--json").stdout)["replicas"]
        assert not any(space["pages"] for report in held for space in report["namespaces"])
    finally:
        stop.set()
        server.process.kill()
    print(dict(server.counts))
