"""A file system that is truly full under a running engine: a small tmpfs, in a mount namespace of the test's own.

`run` is the test, in the process that has the namespace. Another file takes all room and gives it back. In turn the
store sees that there is none (`honest`), and is told that there is much, so that the system's calls fail.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from campaign import Stack

from wicore_trt.kv.disk.files import Files

SEED = int.from_bytes(os.urandom(4), "little")
TESTS = Path(__file__).parents[1]
MOUNT = 'mount -t tmpfs -o size="$0" none "$1" && shift && exec "$@"'
SIZE = 3 << 20


class Hopeful(Files):
    """It says that there is room."""

    def free_bytes(self, path: Path) -> int:
        return 1 << 40


def in_small_file_system(size: int, path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run the command where at `path` lies an empty file system of so many bytes."""
    paths = os.pathsep.join(map(str, [TESTS.parent, TESTS, Path(__file__).parent]))
    env = {**os.environ, "PYTHONPATH": paths}
    entered = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNT, str(size), str(path), *command]
    return subprocess.run(entered, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("honest", [True, False], ids=["seen", "unseen"])
def test_a_full_file_system_costs_pages_and_no_request(tmp_path: Path, honest: bool) -> None:
    if shutil.which("unshare") is None or in_small_file_system(SIZE, tmp_path, "true").returncode:
        pytest.skip("this system lets no user mount a file system of their own")
    ended = in_small_file_system(SIZE, tmp_path, sys.executable, __file__, str(tmp_path), str(SEED), str(int(honest)))
    assert ended.returncode == 0, f"seed {SEED}\n{ended.stdout}{ended.stderr}"
    assert ended.stderr.count("no more room") == 2, "it is told once each time that the room goes"


def take_all_room(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for piece in (4096, 1):
            try:
                while file.write(bytes(piece)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


def pages(stack: Stack) -> int:
    return sum(copy.ready for copy in stack.tiers.disk.iterate_copies())


def serve(stack: Stack, count: int) -> None:
    """New contexts, so that there is something to save."""
    for _ in range(count):
        stack.add(stack.tokens(40))
    stack.settle(check=True)
    stack.settle_transfers()
    stack.tiers.down.no_space_before = 0.0  # a slot is asked for again at once, not after a while


def asked_again(stack: Stack) -> int:
    """Tokens of the newest contexts that come from the disk alone."""
    hits = stack.counts()["disk hits"]
    stack.forget_device()
    stack.forget_host()
    for known in stack.known[-4:]:
        stack.add(known + stack.tokens(1))
    stack.settle(check=True)
    return stack.counts()["disk hits"] - hits


def run(path: Path, seed: int, honest: bool) -> None:
    stack = Stack(path / "cache", seed=seed, files=Files() if honest else Hopeful(), disk_bytes=4 * SIZE)
    stack.loads_first = True
    for _ in range(2):
        serve(stack, 4)
        had = pages(stack)
        take_all_room(path / "other")
        refused = stack.counts()["disk no space"]
        serve(stack, 24)
        assert stack.counts()["disk no space"] > refused, "the room that was taken before lasted"
        assert asked_again(stack), "the newest pages took the place of the oldest"
        stack.check_idle()
        full = pages(stack)
        assert full >= had > 0, (full, had, stack.counts())
        (path / "other").unlink()
        serve(stack, 4)
        assert pages(stack) > full, "pages are saved again"
        stack.check_idle()
    had = pages(stack)
    stack.restart()
    assert pages(stack) == had
    assert asked_again(stack)
    stack.check_idle()
    assert not stack.wrong and stack.finished == stack.added
    stack.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
