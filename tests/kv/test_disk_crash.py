"""kill -9 at random moments: nothing wrong is ever read, and what was acknowledged is found again (I10)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_crash_child import LIMIT, settings
from disk_store_helpers import content, get, open_store

from wicore_trt.kv.disk.store import Outcome

CHILD = Path(__file__).parents[1] / "disk_crash_child.py"


@contextmanager
def forker(path: Path, cipher: bool) -> Iterator[subprocess.Popen]:
    command = [sys.executable, str(CHILD), str(path), "cipher" if cipher else "plain"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()


def killed(process: subprocess.Popen, seed: int, after_s: float, begun: bool) -> list[list[str]]:
    """What a child said before it was killed, `after_s` after its first acknowledged write, or after its birth."""
    process.stdin.write(f"{seed}\n")
    process.stdin.flush()
    child = int(process.stdout.readline())
    said: list[list[str]] = []
    while begun and not (said and said[-1][0] == "w"):
        said.append(process.stdout.readline().split())
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    for line in iter(process.stdout.readline, "end\n"):
        assert line, "the forking process died"
        said.append(line.split())
    return said


def run(path: Path, kills: int, cipher: bool) -> tuple[int, int, int]:
    """(kills that came during writes, acknowledged pages, those of them that were recovered)."""
    amid = acknowledged = recovered = 0
    kept: dict[int, str] = {}  # page -> version of what must be there
    seeds = random.sample(range(1 << 30), kills)
    with forker(path, cipher) as process:
        for seed in seeds:
            allowed = {page: {version} for page, version in kept.items()}
            said = killed(process, seed, random.expovariate(1 / 0.02), begun=random.random() < 0.8)
            for kind, number, *rest in said:
                page = int(number)
                if kind == "e":
                    kept.pop(page, None)
                elif kind == "s":
                    allowed.setdefault(page, set()).add(rest[0])
                    kept.pop(page, None)
                else:
                    kept[page] = rest[0]
            amid += any(line[0] == "w" for line in said)
            found = {}
            store = open_store(path, **settings(cipher))
            pages = list(store.recover_pages())
            assert len({slot for _, slots in pages for slot in slots}) == sum(len(slots) for _, slots in pages)
            for page, slots in pages:
                outcome, parts = get(store, page, slots)
                versions = [
                    version
                    for version in allowed.get(page.index, ())
                    if parts == [content(page.index, part, int(version)) for part in range(len(slots))]
                ]
                if outcome is Outcome.OK:
                    assert versions, f"page {page.index} holds bytes that were never written to it"
                    assert kept.get(page.index) in (None, versions[0]), "an older version was read"
                    found[page.index] = versions[0]
                else:
                    assert outcome is Outcome.CORRUPT
            acknowledged += len(kept)
            recovered += sum(found.get(page) == version for page, version in kept.items())
            kept = found
            store.close()
            assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) <= LIMIT
    return amid, acknowledged, recovered


def check(path: Path, kills: int, cipher: bool) -> None:
    amid, acknowledged, recovered = run(path, kills, cipher)
    print(f"{kills} kills, {amid} amid writes: {recovered} of {acknowledged} acknowledged pages recovered")
    assert amid > kills / 3 and acknowledged > 5 * kills
    assert recovered == acknowledged


@pytest.mark.parametrize(("kills", "cipher"), [(35, False), (15, True)])
def test_kill_9(tmp_path: Path, kills: int, cipher: bool) -> None:
    check(tmp_path, kills, cipher)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kills", "cipher"), [(700, False), (300, True)])
def test_kill_9_a_thousand_times(tmp_path: Path, kills: int, cipher: bool) -> None:
    check(tmp_path, kills, cipher)
