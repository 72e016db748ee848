"""Rating a disk that holds nothing yet: it is told how much was read in what time, and nothing stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import make_core

from wicore_trt.config import KVSettings
from wicore_trt.core import assemble_kv
from wicore_trt.kv.disk import io as rate
from wicore_trt.model.spec import GLOBAL


def test_a_disk_is_rated_and_nothing_is_left(tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []
    for limit, pieces in ((5 * rate.RATE_PIECE_BYTES + 1, 5), (1 << 40, rate.RATE_PIECES)):
        rate.rate_reads(str(tmp_path), limit, 3, lambda count, seconds: told.append((count, seconds))).join()
        assert told[-1][0] == pieces * rate.RATE_PIECE_BYTES and told[-1][1] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("why", ["no room", "no directory", "a short read"])
def test_a_disk_that_cannot_be_rated_is_not(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "none" if why == "no directory" else tmp_path
    if why == "a short read":
        monkeypatch.setattr(os, "preadv", lambda *call: 7)
    limit = rate.RATE_PIECE_BYTES - 1 if why == "no room" else 1 << 30
    rate.rate_reads(str(path), limit, 2, lambda *_: pytest.fail("it was rated")).join()


def test_a_disk_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    """Whoever uses the package as a library ends without `os._exit`."""
    code = """if True:
        import os, sys, threading
        from wicore_trt.kv.disk import io as rate
        begun = threading.Event()
        os.pwritev = lambda *call: begun.set() or threading.Event().wait()
        rate.rate_reads(sys.argv[1], 1 << 30, 2, print)
        assert begun.wait(60)
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


@pytest.mark.parametrize("free", [0, 1 << 60])
def test_the_rating_takes_no_more_than_the_tier_may(free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(assemble_kv, "rate_reads", lambda path, limit, *more: limits.append(limit))
    kv = KVSettings(host_bytes=1 << 20, disk_path=str(tmp_path / "kv"), disk_bytes=1 << 30, disk_free_bytes=free)
    make_core(pages={GLOBAL: 64}, kv=kv).close()
    assert limits == [0 if free else 1 << 26]


def test_the_planner_hears_of_it(tmp_path: Path) -> None:
    """Of a directory without pages; what was kept is read itself."""
    kv = KVSettings(host_bytes=1 << 20, disk_path=str(tmp_path / "kv"), disk_bytes=1 << 30, disk_free_bytes=0)
    core = make_core(pages={GLOBAL: 64}, page_tokens=4, max_batch_tokens=16, max_context=64, kv=kv)
    loader, end = core.scheduler.loader, time.monotonic() + 60
    while loader._probed.empty() and time.monotonic() < end:
        time.sleep(0.01)
    meter, count, seconds = loader._probed.get_nowait()
    assert meter is loader.disk_meter and count == rate.RATE_PIECES * rate.RATE_PIECE_BYTES and seconds > 0
    core.close()
