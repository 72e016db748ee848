"""Hostile files end in pixels or a clear error; workers that die are replaced; memory is bounded."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
from hostile_files import make_hostile_files, png
from image_files import make_files

from wicore_trt import worker_process
from wicore_trt.errors import InvalidRequestError
from wicore_trt.images import prepare
from wicore_trt.images.prepare import prepare_image
from wicore_trt.images.worker import LIMITS
from wicore_trt.types import ImageFile, ImageInfo

INFO = ImageInfo(56, 4, 1, 2, 3)
PIXELS = 56 * 56 * 3


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are bounded by processor time alone, however busy this machine is."""
    monkeypatch.setattr(worker_process, "WAIT_SECONDS", 3600.0)


def read_memory(pid: int, name: str) -> int:
    """Bytes of a process: VmHWM is the most that was resident."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) * 1024


def play(count: int, seed: int) -> Counter[str]:
    """Prepare hostile files, and an honest one now and then; return how they ended."""
    honest = next(make_files(1))[1]
    want = prepare_image(ImageFile(data=honest), INFO).pixels
    before, ends = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, Counter[str]()
    pids, top = set(), 0
    for number, (name, data) in enumerate(make_hostile_files(count, seed)):
        try:
            got = prepare_image(ImageFile(data=data, crops=number % 2 == 1, field="f"), INFO)
            assert got.pixels and {len(part) for part in got.pixels} == {PIXELS}, name
            ends["pixels"] += 1
        except InvalidRequestError as error:
            said = str(error)
            assert error.field == "f" and said.startswith("The image cannot be read: it"), (name, said)
            assert len(said) < 300 and "Error" not in said, (name, said)
            ends[" ".join(said.partition("(")[0].split()[5:])] += 1
        for worker in prepare._WORKERS:
            if worker.process is not None:
                pids.add(worker.process.pid)
                top = max(top, read_memory(worker.process.pid, "VmHWM"))
        if number % 100 == 0:
            assert prepare_image(ImageFile(data=honest), INFO).pixels == want, name
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"workers {len(pids)}, most memory of one {top >> 20} MiB, this process grew by {grown >> 10} MiB")
    assert top <= LIMITS.memory and grown < 200_000  # KiB
    return ends


def test_hostile_files() -> None:
    ends = play(80, seed=0)
    assert 0 < ends["pixels"] < 50 and len(ends) >= 4, ends


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_thousand_hostile_files() -> None:
    ends = play(2000, seed=1)
    print(ends)
    assert sum(ends.values()) == 2000 and len(ends) >= 5


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    """By its header alone: no pixel of it is there."""
    for data in (png(8192, 8193, b""), png(0x7FFFFFFF, 0x7FFFFFFF, b"")):
        with pytest.raises(InvalidRequestError, match="it has more than 67108864 pixels"):
            prepare_image(ImageFile(data=data), INFO)
    with pytest.raises(InvalidRequestError, match="it is broken"):
        prepare_image(ImageFile(data=png(8192, 8192, b"")), INFO)


def test_files_have_a_size() -> None:
    with pytest.raises(InvalidRequestError, match="more than 20 MiB") as caught:
        prepare_image(ImageFile(data=bytes((20 << 20) + 1), field="f"), INFO)
    assert caught.value.field == "f"


def test_workers_that_die_are_replaced() -> None:
    honest = next(make_files(1))[1]
    want = prepare_image(ImageFile(data=honest), INFO).pixels
    for worker in prepare._WORKERS:
        worker.start_worker()
        assert worker.process is not None
        os.kill(worker.process.pid, signal.SIGKILL)
    assert prepare_image(ImageFile(data=honest), INFO).pixels == want


def test_files_are_decoded_beside_a_slow_one() -> None:
    """Two workers: one that has a file delays no other."""
    honest, ends = next(make_files(1))[1], list[ImageFile]()
    for worker in prepare._WORKERS:
        thread = threading.Thread(target=lambda: ends.append(prepare_image(ImageFile(data=honest), INFO)), daemon=True)
        with worker.lock:
            thread.start()
            thread.join(60)
            assert ends.pop().pixels
