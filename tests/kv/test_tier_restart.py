"""After a restart the disk's pages are used again, by the same engine alone, and also when the last life was killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import campaign
import pytest
from campaign import Shape, Stack, crash_stack

SEED = int.from_bytes(os.urandom(4), "little")


def first_life(path: Path) -> tuple[Stack, list[list[int]]]:
    stack = Stack(path, seed=SEED, host_slots=300)
    prompts = [stack.tokens(40) for _ in range(8)]
    for prompt in prompts:
        stack.add(prompt, answer=8)
    stack.settle()
    stack.settle_transfers()
    return stack, prompts


def ask_again(stack: Stack, prompts: list[list[int]]) -> tuple[int, int]:
    """(tokens from disk, tokens computed) for prompts that were served in an earlier life, with computing as slow as
    the planner believes it is."""
    stack.executor.steps.clear()
    stack.loads_first = True
    for prompt in prompts:
        stack.add(prompt, answer=8, whole=True)
    stack.settle(check=True)
    assert stack.wrong == 0 and stack.finished == stack.added
    return stack.counts()["disk hits"], sum(count for step in stack.executor.steps for _, count in step)


def test_a_restart_is_warm(tmp_path: Path) -> None:
    """9 of the 10 pages of each prompt come from disk, as one token must be computed; nothing but that
    page and the answers, whose last token needs no computing, is computed."""
    stack, prompts = first_life(tmp_path)
    stack.restart()
    loaded, computed = ask_again(stack, prompts)
    assert (loaded, computed) == (36 * len(prompts), (4 + 8 - 1) * len(prompts)), SEED
    stack.check_idle()
    stack.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"engine": "fake2"}, {"kernels": "other"}, {"kv_dtype": "float16"}, {"page_tokens": 8}, {"page_tokens": 2},
        {"rank": 1}, {"engine": "fak", "kernels": "e/fake"},
    ],
    ids=str,
)  # fmt: skip
def test_another_engine_finds_nothing(tmp_path: Path, changed: dict) -> None:
    stack, prompts = first_life(tmp_path)
    old = {key: getattr(stack.shape, key) for key in changed}
    stack.restart(**changed)
    assert len(list(stack.tiers.disk.iterate_copies())) == 0
    assert ask_again(stack, prompts)[0] == 0
    stack.check_idle()
    stack.restart(**old)
    ask_again(stack, prompts)
    stack.check_idle()
    stack.close()


def test_another_window_is_right(tmp_path: Path) -> None:
    """The window is no part of the fake engine's name, as it is of a real one: pages then have fewer neighbours, and
    the look-up must notice."""
    stack, prompts = first_life(tmp_path)
    for window in (3, 20, 8):
        stack.restart(window=window)
        ask_again(stack, prompts)
        stack.check_idle()
    stack.close()


def test_many_restarts(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    stack = Stack(tmp_path, seed=SEED, host_slots=60, disk_bytes=1 << 20, shape=Shape())
    for _ in range(12):
        stack.serve(rng.randint(1, 6))
        if rng.random() < 0.5:
            for _ in range(4):
                stack.add()
            for _ in range(rng.randint(0, 6)):
                stack.step()
        stack.restart(engine=rng.choice(["fake", "fake", "fake", "other"]))
    stack.serve(4)
    assert stack.wrong == 0 and stack.totals["disk hits"] > 0, SEED
    stack.check_idle()
    stack.close()


def kill_lives(path: Path, kills: int) -> tuple[int, int]:
    """(lives that were killed after they had served something, tokens that came from an earlier life's disk)."""
    rng, served, hits = random.Random(SEED), 0, 0
    command = [sys.executable, campaign.__file__, str(path)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    ) as server:
        for turn in range(kills):
            server.stdin.write(f"{rng.randrange(1 << 30)}\n")
            server.stdin.flush()
            child = int(server.stdout.readline())
            said = []
            if turn % 5:
                said.append(server.stdout.readline().split())
            time.sleep(rng.expovariate(1 / 0.05))
            os.kill(child, signal.SIGKILL)
            while (line := server.stdout.readline().split()) and line[0] != "end":
                said.append(line)
            assert line == ["end", "-9"], (SEED, turn, "the engine broke before it was killed")
            assert all(int(wrong) == 0 for _, wrong, _ in said), (SEED, turn)
            served += bool(said)
            hits += int(said[-1][2]) if said else 0
            if turn % 5 == 4 or turn == kills - 1:
                stack = crash_stack(path, SEED + turn)
                stack.serve(12)
                assert stack.wrong == 0
                stack.check_idle()
                stack.close()
        server.stdin.close()
    return served, hits


def test_kill_9(tmp_path: Path) -> None:
    served, hits = kill_lives(tmp_path, 10)
    assert served >= 8 and hits > 0, SEED


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kill_9_many_times(tmp_path: Path) -> None:
    served, hits = kill_lives(tmp_path, 300)
    print(f"300 kills, {served} after serving, {hits:,} tokens from disks of killed lives")
    assert served > 100 and hits > 0, SEED
