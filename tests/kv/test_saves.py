"""Host pages on their way to disk: none that flipped is acknowledged, and what cannot be written does not pile up."""

from __future__ import annotations

import math
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
from campaign import SLOT, Stack
from disk_store_helpers import buffers, content, get, make_page, open_store, read_page, wait_for
from fault_injection import flip_bit

from wicore_trt.kv.disk.files import Files, aligned_buffer
from wicore_trt.kv.disk.io import Probe
from wicore_trt.kv.disk.store import DiskStore, Outcome
from wicore_trt.kv.tiers.moves import CopyState

pytestmark = pytest.mark.usefixtures("each_mover")

SEED = int.from_bytes(os.urandom(4), "little")


class Dying(Files):
    """Keeps the directory as kill -9 would leave it after each write to it."""

    def __init__(self, path: Path, keep: Path) -> None:
        self.path, self.keep, self.lives, self.alone = path, keep, 0, threading.Lock()

    def pwritev(self, fd, given, offset) -> int:
        count = super().pwritev(fd, given, offset)
        with self.alone:
            shutil.copytree(self.path, self.keep / str(self.lives))
            self.lives += 1
        return count


@pytest.mark.parametrize("sealed", [False, True])
def test_a_flipped_page_is_right_after_no_crash(tmp_path: Path, sealed: bool) -> None:
    """A bit flips in host memory behind the checksum and before the save; the server is killed after any write."""
    key = None
    if sealed:
        key = str(tmp_path / "key")
        Path(key).write_bytes(b"k" * 32)
        Path(key).chmod(0o600)
    rng = random.Random(SEED)
    files = Dying(tmp_path / "cache", tmp_path / "lives")
    stack = Stack(tmp_path / "cache", seed=SEED, host_slots=300, files=files, disk_key_file=key)
    right: dict[tuple[str, bytes], bytes] = {}
    flipped = []
    save = stack.tiers.down.queue_save

    def flip_and_save(copy) -> None:
        right[copy.page.name] = b"".join(stack.tiers.movers.host.page_parts(copy))
        if len(right) % 3 == 1:
            flip_bit(stack.tiers.movers.host.page_parts(copy), rng.randrange(8 * 32))
            flipped.append(copy.page.name)
        save(copy)

    stack.tiers.down.queue_save = flip_and_save
    stack.add(stack.tokens(40), answer=2)
    stack.settle()
    stack.settle_transfers()
    assert len(flipped) >= 5 and stack.counts()["host corrupt"] == len(flipped), SEED
    good = 0
    lives = range(files.lives)
    stack.close()
    for life in (*rng.sample(lives, min(25, len(lives))), lives[-1]):
        stack.kv = stack.kv.__class__(**(vars(stack.kv) | {"disk_path": str(tmp_path / "lives" / str(life))}))
        stack.files = None
        stack.open()
        store: DiskStore = stack.tiers.movers.disk[1]
        for copy in stack.tiers.disk.iterate_copies():
            parts = [aligned_buffer(SLOT) for _ in copy.slots]
            if wait_for(read_page, store, copy.page, copy.slots, parts) is Outcome.OK:
                page = right[copy.page.name]
                assert b"".join(parts)[: len(page)] == page, f"life {life}, seed {SEED}"
                good += 1
        stack.close()
        shutil.rmtree(tmp_path / "lives" / str(life), ignore_errors=True)
    assert good > 20


def test_the_question_comes_between_the_bytes_and_the_record(tmp_path: Path) -> None:
    asked = []

    def right(_parts) -> bytes:
        page, data = make_page(1), b"".join(file.read_bytes() for file in tmp_path.rglob("slab-*"))
        asked.append((content(1, 0) in data, any(page.key in file.read_bytes() for file in tmp_path.rglob("index"))))
        return b"right" if len(asked) > 1 else b"wrong"

    store = open_store(tmp_path)
    write = lambda *args: store.write_page(*args, probe=Probe(right, 0), expected=b"right")  # noqa: E731
    parts = buffers([content(1, 0)])
    assert wait_for(write, make_page(1), [0], parts) is Outcome.CORRUPT
    assert get(store, make_page(1), [0])[0] is Outcome.CORRUPT
    assert wait_for(write, make_page(1), [0], parts) is Outcome.OK
    assert asked == [(True, False)] * 2
    store.close()


def test_saves_do_not_pile_up_while_disks_hang(tmp_path: Path) -> None:
    """Writes have failed so often that none is tried for a while; conversations come and leave the host meanwhile."""

    class Hanging(Files):
        on, go_on = False, threading.Event()

        def pwritev(self, fd, given, offset) -> int:
            if self.on:
                self.go_on.wait(60)
            return super().pwritev(fd, given, offset)

    files = Hanging()
    stack = Stack(tmp_path, seed=SEED, host_slots=80, files=files, disk_bytes=20 << 20)
    files.on = True
    store = stack.tiers.movers.disk[1]
    end = time.monotonic() + 60

    def converse() -> None:
        """What is stored is waited for: steps of the fake model are so short that the thread that checks copies would
        hardly run, the host would be full of pages that are not ready, and nothing would be to save."""
        stack.add(stack.tokens(24), answer=1)
        stack.settle()
        while any(copy.state is CopyState.WRITING for copy in stack.tiers.host.iterate_copies()):
            stack.tiers.wait_for_report(0.01)
            assert time.monotonic() < end

    while len(store._pool._running) < 2 or store.queue_depth < 10:  # enough failures for a pause
        converse()
    stack.hurry_disk(0.01)
    while not store.stalled or stack.tiers.movers.outstanding > len(store._pool._running):
        stack.tiers.wait_for_report(0.01)
        assert time.monotonic() < end
    assert stack.tiers.down.no_writes_before > end - 60, "a pause behind the first write"
    stack.tiers.down.no_writes_before = math.inf
    most = 0
    for _ in range(400):
        converse()
        most = max(most, len(stack.tiers.down.to_save))
    assert 20 < most <= 2 * stack.tiers.host.num_slots, most
    stack.tiers.down.no_writes_before = 0.0
    stack.hurry_disk(60.0)
    files.on = False
    files.go_on.set()
    stack.settle_transfers()
    stack.check_idle()
    assert stack.wrong == 0
    stack.close()
