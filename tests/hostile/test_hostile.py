"""Hostile clients beside honest ones: nothing crashes, no answer is 5xx but 503, nothing is kept, no token is wrong.

A failure prints the input's number; `python tests/hostile --surface SURFACE --seed SEED --only NUMBER` plays it again.
How long the others waited is in the program's report, not here.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from hostile_campaign import SURFACES, Honest, Report, Server, input_of, judge, run  # noqa: E402

SEED, WARM, INPUTS = 7, 20, 80


@pytest.fixture(scope="module")
def server():
    made = Server(0.005)
    yield made
    made.stop()


@pytest.mark.parametrize("surface", SURFACES)
def test_hostile_inputs_harm_nobody(server: Server, surface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostile_campaign.READ_S", 1.0)
    asyncio.run(run(server, surface, SEED + 1, range(WARM), 8))
    before, pids = server.held(), (server.front, server.engine)
    honest = Honest({"attacked": server}, 1)
    report = asyncio.run(run(server, surface, SEED, range(INPUTS), 8))
    told = honest.end()["attacked"]
    judge(server, report, before, pids)
    assert not report.failures, "\n".join([report.table(), *report.failures])
    assert all(set(seen["ends"]) == {"ok"} for seen in told.values()), told
    assert len(report.outcomes) > 5, report.table()


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("surface", SURFACES)
def test_ten_thousand_hostile_inputs(surface: str) -> None:
    seed = Random().randrange(1 << 32)
    done = subprocess.run(
        [sys.executable, str(HERE), "--surface", surface, "--seed", str(seed)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_inputs_follow_from_seed_and_number() -> None:
    for surface in SURFACES:
        assert repr(input_of(surface, 7, 5)) == repr(input_of(surface, 7, 5)) != repr(input_of(surface, 8, 5))


def test_the_judge_sees_what_is_wrong(server: Server) -> None:
    """An answer of 500, a task and a file descriptor more, and another process."""
    report = Report()
    report.add(3, "field", "500 server_error", False, 0.0)
    report.add(4, "late", "504 timeout_error", False, 0.0)
    report.add(5, "late", "504 timeout_error", True, 0.0)
    report.add(6, "flipped", "grpc: INTERNAL", False, 0.0)
    held = server.held()
    task = next(name for name in held if name.startswith("task "))
    fewer = held | {"front's fds": held["front's fds"] - 20, task: 0}
    judge(server, report, fewer, (server.front, server.engine + 1), settle_s=0.0)
    words = "\n".join(report.failures)
    assert all(word in words for word in ("input 3", "input 4", "input 6", "fds", task, "process ended")), words
    assert "input 5" not in words
