"""The oracle campaign's default profile, bounded by lives; `make test-long` runs the long one.

Lives run in a process of their own, whose hashes have no seed, so that a failing life can be played again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from oracle import plan
from oracle.life import live
from oracle.plan import draw_setup
from oracle.runner import campaign, cores, fails, plan_of, shrink
from wicore_trt.kv.prefix.loader import PrefixLoader
from wicore_trt.kv.tiers.load import PrefixLoad

ROOT = Path(__file__).resolve().parents[2]


def run(*options: str, timeout_s: float = 1500) -> None:
    environ = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.oracle", *options]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


@pytest.mark.timeout(1600)
def test_every_token_is_right_in_virtual_time() -> None:
    run("--lives", "30", "--seed", "2")


@pytest.mark.timeout(1600)
def test_every_token_is_right_with_threads() -> None:
    run("--real-lives", "6", "--seed", "1")


@pytest.mark.timeout(1600)
def test_every_token_is_right_after_kill_9() -> None:
    run("--kills", "6", "--seed", "1")


@pytest.mark.parametrize("seed", [11, 12])
def test_a_seed_gives_one_life(seed: int) -> None:
    one, other = Counter[str](), Counter[str]()
    first, second = live(seed, counts=one), live(seed, counts=other)
    assert one == other
    assert (first.trace, first.world.now, first.steps) == (second.trace, second.world.now, second.steps)


def test_setups_differ() -> None:
    setups = [draw_setup(seed) for seed in range(50)]
    assert len({str(setup) for setup in setups}) == 50


def test_a_jump_over_a_hole_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was requested has arrived, so everything has: once a defect, and the campaign must find it."""
    monkeypatch.setattr(PrefixLoad, "meeting_page", lambda load: 0)
    monkeypatch.setattr(PrefixLoader, "_find_unwritten", lambda loader, pages, load, computed: [])
    [failure] = campaign(60, seed=2, first_only=True).failed
    assert failure.kind in ("poison", "wrong token", "failed request")
    kind, happenings = failure.kind, len(plan_of(failure.seed)[1])
    shrink(failure)
    assert failure.keep and len(failure.keep) < happenings / 2
    again = fails(failure.seed, failure.keep)
    assert again is not None and again.kind == kind


def test_bits_that_change_on_the_way_and_are_not_looked_for_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without digests on the device the host takes the digest of what came, wrong or not."""
    monkeypatch.setattr(plan, "draw_checks", lambda rng: {"checks": False, "lies": 0.3})
    lives = (campaign(1, seed=seed, first_only=True) for seed in range(30))
    assert any(failure.kind == "wrong token" for life in lives for failure in life.failed)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_lives() -> None:
    run("--lives", "20000", "--real-lives", "400", "--jobs", str(cores()), "--seed", "2", timeout_s=24 * 3600)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_lives_that_are_killed() -> None:
    run("--kills", "1000", "--jobs", str(cores()), "--seed", "2", timeout_s=24 * 3600)
