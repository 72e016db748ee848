"""Lives with real threads that end by kill -9, one after the other on one directory.

Each child checks every token that it gets from what its forerunners left. Sometimes the next one gets a copy of the
directory, taken while the life went on, or writes that were torn. It must not know how pages are stored. Invariant:
the parent has no threads, so that a fork is safe; a child says what failed before it dies.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from oracle.device import Failure
from oracle.life import Life
from oracle.plan import Planner, Setup, draw_setup
from oracle.real import Real
from oracle.stack import constants

LIVES_OF_A_DIRECTORY = 8


@dataclass
class Killed:
    """What came of lives that were killed."""

    lives: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [f"  {name:36} {count:>12,}" for name, count in sorted(self.counts.items())]
        head = f"{self.lives:,} lives killed in {self.seconds:.0f} s, {len(self.failed)} failed"
        return "\n".join([*rows, head, *self.failed])


def kills(lives: int, *, seed: int, jobs: int = 1) -> Killed:
    begun = time.monotonic()
    numbers = [
        (seed * 1_000_003 + n, min(LIVES_OF_A_DIRECTORY, lives - at))
        for n, at in enumerate(range(0, lives, LIVES_OF_A_DIRECTORY))
    ]
    if jobs > 1:
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            parts = pool.starmap(_directory, numbers)
    else:
        parts = [_directory(*number) for number in numbers]
    total = Killed(lives, time.monotonic() - begun)
    for part in parts:
        total.counts += part.counts
        total.failed += part.failed
    return total


def disk_setup(seed: int) -> Setup:
    """An engine whose disk tier is used a lot."""
    at = seed * 1000
    while True:
        setup = draw_setup(at)
        if setup.disk_slots >= 40 and setup.kv["prefix_cache"]:
            break
        at += 1
    kv = setup.kv | {"write_policy": "through", "tenant_quota": 1.0}
    speeds = replace(setup.speeds, token=1e-3, disk=1e-6, link=1e-6)  # computing is what costs
    return replace(
        setup,
        kv=kv,
        disk_timeout_s=60.0,
        faults={},
        late=False,
        queue_limit=256,
        speeds=speeds,
        priors={"token": 1e-3, "link": 1e-3, "disk": 1e-3},
    )


def _directory(seed: int, lives: int) -> Killed:
    logging.disable(logging.CRITICAL)
    rng, killed = random.Random(f"kill/{seed}"), Killed()
    setup = disk_setup(seed)
    base = Path(tempfile.mkdtemp(prefix="oracle-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    path = base / "0"
    path.mkdir()
    try:
        for number in range(lives):
            killed.lives += 1
            last = number == lives - 1
            told = _life(setup, path, number, 0.0 if last else rng.uniform(0.01, 0.25), rng, killed.counts)
            if told:
                killed.failed.append(f"directory {seed}, life {number}: {told}")
                break
            following = base / f"{number}-copy"
            if following.is_dir():
                path = following
            if rng.random() < 0.3:
                _tear(path, rng)
                killed.counts["directory torn"] += 1
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return killed


def _life(setup: Setup, path: Path, number: int, after: float, rng: random.Random, counts: Counter[str]) -> str:
    """Run a child and kill it after so many seconds of serving (0: let it end); returns what it found wrong."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        status = 1
        try:
            _serve(setup, path, number, write, for_ever=after > 0)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as lines:
        first = lines.readline()  # "open": it serves
        if first.strip() == "open" and after:
            time.sleep(after)
            if rng.random() < 0.3:
                with suppress(OSError, shutil.Error):  # files come and go meanwhile
                    shutil.copytree(path, path.parent / f"{number}-copy", dirs_exist_ok=True)
                counts["directory copied"] += 1
            os.kill(child, signal.SIGKILL)
        said = first + lines.read()
    _, status = os.waitpid(child, 0)
    counts["killed" if os.WIFSIGNALED(status) else "ended by itself"] += 1
    for line in said.splitlines():
        word, _, rest = line.partition(" ")
        if word == "wrong":
            return rest
        if word == "served":
            served, hits = rest.split()
            counts["requests served"] += int(served)
            counts["disk hit tokens"] += int(hits)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        return f"the child failed: {said[-1500:]}"
    return ""


def _serve(setup: Setup, path: Path, number: int, out: int, *, for_ever: bool) -> None:
    """Serve what all lives of this directory serve, in another order, and say how it goes."""
    planner, rng = Planner(setup), random.Random(f"{setup.seed}/{number}")
    requests = [planner._add() for _ in range(24)]
    life = Life(setup, [], path, Counter(), Real(number, replace(setup.speeds)))
    try:
        with constants(setup):
            life.stack = life._open()
            for request in requests:  # earlier lives had all of them
                said = (*request["prompt"], *request["right"].tokens)
                life.ledger.history.setdefault((setup.engine, "", ""), []).append(said)
            os.write(out, b"open\n")
            hits, waves = 0, 0
            while for_ever or waves < 6:
                waves += 1
                for request in rng.sample(requests, 4):
                    life._add(**{name: request[name] for name in ("prompt", "params", "right")})
                while life.stack.core.has_work:
                    life.step()
                life.ledger.none_left()
                tiers = life.stack.core.stats().kv.tiers
                now = next(tier.hit_tokens for tier in tiers if tier.tier == "disk")
                os.write(out, f"served 4 {now - hits}\n".encode())
                hits = now
                if rng.random() < 0.4:
                    life._forget_host()
            life.stack.close()
    except Failure as failure:
        os.write(out, f"wrong {str(failure)!r}\n".encode())


def _tear(path: Path, rng: random.Random) -> None:
    """Part of what was written last did not land: blocks of some file are zeros, or an older length."""
    files = [
        file for file in path.rglob("*") if file.is_file() and (file.name == "index" or file.name.startswith("slab"))
    ]
    for file in rng.sample(files, min(2, len(files))):
        size = file.stat().st_size
        if rng.random() < 0.2:
            os.truncate(file, rng.randrange(size + 1))
            continue
        with file.open("r+b") as data:
            for _ in range(rng.randint(1, 4)):
                data.seek(rng.randrange(max(1, size)) // 512 * 512)
                data.write(bytes(512))
