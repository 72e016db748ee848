"""The store against a model: a read gives exactly what was last written there, or not OK; also over restarts."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from disk_store_helpers import (
    SLOT,
    SPACE,
    buffers,
    content,
    get,
    hurry,
    make_page,
    open_store,
    put,
    read_page,
    recover,
    wait_for,
)
from msgspec import structs

from wicore_trt.kv.disk.cipher import PageCipher
from wicore_trt.kv.disk.files import Files, aligned_buffer
from wicore_trt.kv.disk.format import record_bytes
from wicore_trt.kv.disk.io import Probe
from wicore_trt.kv.disk.store import DiskStore, Outcome
from wicore_trt.kv.pages.page import Page

pytestmark = pytest.mark.usefixtures("each_mover")

RECORD = record_bytes(SPACE.page_tokens)
CIPHER = PageCipher(b"k" * 32)
PARTS = [content(1, 0), content(1, 1)]


@pytest.mark.parametrize("cipher", [None, CIPHER])
@pytest.mark.parametrize("slots", [(3,), (3, 4), (4, 3), (15, 16, 17), (7, 30, 8, 9, 2)])
def test_a_page_comes_back_now_and_after_a_restart(tmp_path: Path, slots: tuple[int, ...], cipher: object) -> None:
    page, parts = make_page(1, "global"), [content(1, part) for part in range(len(slots))]
    store = open_store(tmp_path, cipher=cipher)
    assert put(store, page, slots, parts) is Outcome.OK
    assert get(store, page, slots) == (Outcome.OK, parts)
    store.close()
    store = open_store(tmp_path, cipher=cipher)
    assert recover(store) == [(page, slots)]
    assert get(store, page, slots) == (Outcome.OK, parts)
    store.close()


def test_only_the_page_that_was_written_is_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    page = make_page(1, "global")
    assert put(store, page, (3, 4), PARTS) is Outcome.OK
    for other, slots in [
        (make_page(2, "global"), (3, 4)),
        (structs.replace(page, index=9), (3, 4)),
        (page, (4, 3)),
        (page, (3,)),
        (page, (3, 5)),
        (page, (5, 6)),
    ]:
        assert get(store, other, slots)[0] is Outcome.CORRUPT
    assert get(store, page, (3, 4)) == (Outcome.OK, PARTS)
    store.close()


@pytest.mark.parametrize(
    "change",
    [{"engine": "x"}, {"kernels": "native"}, {"page_tokens": 32}, {"kv_dtype": "float16"}, {"rank": 1}, {"world": 2}],
)
def test_another_namespace_finds_nothing(tmp_path: Path, change: dict) -> None:
    store, page = open_store(tmp_path), make_page(1)
    put(store, page, [3], PARTS[:1])
    store.close()
    other = open_store(tmp_path, namespace=dataclasses.replace(SPACE, **change))
    assert not list(other.recover_pages()) and get(other, page, [3])[0] is Outcome.CORRUPT
    other.close()
    store = open_store(tmp_path)
    assert recover(store) == [(page, (3,))], "the first one is still there"
    store.close()


@pytest.mark.parametrize("ciphers", [(None, CIPHER), (CIPHER, None)])
def test_encrypted_and_plain_pages_do_not_mix(tmp_path: Path, ciphers: tuple) -> None:
    store, page = open_store(tmp_path, cipher=ciphers[0]), make_page(1)
    put(store, page, [3], PARTS[:1])
    store.close()
    slab = next(tmp_path.rglob("slab-*")).read_bytes()
    assert (PARTS[0] in slab) == (ciphers[0] is None)
    store = open_store(tmp_path, cipher=ciphers[1])
    assert not recover(store) and get(store, page, [3])[0] is Outcome.CORRUPT
    store.close()


@pytest.mark.parametrize("cipher", [None, CIPHER])
def test_a_read_shows_the_page_and_nothing_that_changed_since_its_check(tmp_path: Path, cipher: object) -> None:
    store, page = open_store(tmp_path, cipher=cipher), make_page(1, "global")
    assert put(store, page, (3, 4), PARTS) is Outcome.OK
    for damaged in (False, True):
        target, shown = buffers([bytes(SLOT)] * 2), []

        def take_digest(target, shown=shown, damaged=damaged) -> bytes:
            shown.append([bytes(part) for part in target])
            target[1][7] ^= damaged
            return b"digest"

        read = partial(read_page, store, probe=Probe(take_digest, 2 * SLOT), seen=shown.append)
        outcome = wait_for(read, page, (3, 4), target)
        assert shown == ([PARTS, b"digest"] if outcome is Outcome.OK else [PARTS])
        # what is encrypted is shown behind its check: whoever compares notices this bit, but the store does not
        assert outcome is (Outcome.CORRUPT if damaged and cipher is None else Outcome.OK)
    store.close()


def test_another_key_reads_nothing(tmp_path: Path) -> None:
    store, page = open_store(tmp_path, cipher=CIPHER), make_page(1)
    put(store, page, [3], PARTS[:1])
    store.close()
    store = open_store(tmp_path, cipher=PageCipher(b"j" * 32))
    assert [slots for _, slots in recover(store)] == [(3,)]
    assert get(store, page, [3])[0] is Outcome.CORRUPT
    store.close()


def test_erased_pages_stay_away_also_when_their_slots_were_used_again(tmp_path: Path) -> None:
    store, old, new = open_store(tmp_path), make_page(1, "global"), make_page(2)
    put(store, old, (3, 4), PARTS)
    put(store, make_page(5), (9,), PARTS[:1])
    store.erase_slots((3, 4))
    assert get(store, old, (3, 4))[0] is Outcome.CORRUPT
    put(store, new, (3,), PARTS[:1])
    store.close()
    store = open_store(tmp_path)
    assert recover(store) == [(make_page(5), (9,)), (new, (3,))]
    assert get(store, old, (3, 4))[0] is Outcome.CORRUPT
    store.close()


def test_the_newest_of_two_copies_wins_and_the_older_is_gone_for_good(tmp_path: Path) -> None:
    store, page = open_store(tmp_path), make_page(1)
    put(store, page, (3,), [content(1, 0, 1)])
    put(store, page, (8,), [content(1, 0, 2)])
    store.close()
    store = open_store(tmp_path)
    assert recover(store) == [(page, (8,))]
    assert get(store, page, (8,)) == (Outcome.OK, [content(1, 0, 2)])
    assert get(store, page, (3,))[0] is Outcome.CORRUPT
    store.erase_slots((8,))
    store.close()
    store = open_store(tmp_path)
    assert not recover(store)
    store.close()


def test_write_ids_grow_over_restarts_even_when_the_clock_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time_ns", lambda: 1000)
    for number in range(4):
        store = open_store(tmp_path)
        assert [slots for _, slots in recover(store)] == [(slot,) for slot in range(number)], "oldest write first"
        put(store, make_page(number), (number,), [content(number, 0)])
        store.close()


@pytest.mark.parametrize("cipher", [None, CIPHER])
def test_random_interleavings_against_a_dictionary(tmp_path: Path, cipher: object) -> None:
    """Two pages' worth of names on few slots, so that everything is overwritten, moved and erased all the time."""
    choose, model, version = random.Random(), {}, 0
    store = open_store(tmp_path, cipher=cipher, threads=3)
    names = [make_page(number, group) for number in range(6) for group in ("local", "global")]
    for _ in range(700):
        page = choose.choice(names)
        action = choose.random()
        if action < 0.4:
            slots = tuple(choose.sample(range(20), choose.choice([1, 2, 2, 3])))
            version += 1
            parts = [content(page.index, part, version) for part in range(len(slots))]
            lost = [key for key in model if set(key[1]) & set(slots)]
            store.erase_slots([slot for key in lost for slot in key[1]] if choose.random() < 0.5 else [])
            assert put(store, page, slots, parts) is Outcome.OK
            for key in lost:
                del model[key]
            model[page, slots] = (version, parts)
        elif action < 0.5 and model:
            key = choose.choice(list(model))
            store.erase_slots(key[1])
            del model[key]
        elif action < 0.55:
            store.close()
            store = open_store(tmp_path, cipher=cipher, threads=3)
            newest = {}
            for (kept, slots), (when, parts) in sorted(model.items(), key=lambda item: item[1][0]):
                newest[kept.name] = ((kept, slots), (when, parts))
            model = dict(sorted(newest.values(), key=lambda item: item[1][0]))
            assert recover(store) == list(model)
        elif model and action < 0.9:
            key = choose.choice(list(model))
            assert get(store, *key) == (Outcome.OK, model[key][1])
        else:
            slots = tuple(choose.sample(range(20), choose.choice([1, 2, 3])))
            outcome, found = get(store, page, slots)
            assert (outcome is Outcome.OK) == ((page, slots) in model)
            assert outcome is not Outcome.OK or found == model[page, slots][1]
    store.close()


def test_many_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, threads=4, queue_limit=500)
    outcomes, ended = [], threading.Semaphore(0)

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        ended.release()

    pages = {make_page(number): (number, number + 50) for number in range(50)}
    for page, slots in pages.items():
        assert store.write_page(page, slots, buffers([content(page.index, 0), content(page.index, 1)]), done)
    for _ in pages:
        assert ended.acquire(timeout=60)
    targets = {page: [aligned_buffer(SLOT), aligned_buffer(SLOT)] for page in pages for _ in range(3)}
    for page, slots in pages.items():
        assert read_page(store, page, slots, targets[page], done)
    for _ in pages:
        assert ended.acquire(timeout=60)
    assert outcomes == [Outcome.OK] * 100 and store.queue_depth == 0
    for page, found in targets.items():
        assert [bytes(part) for part in found] == [content(page.index, 0), content(page.index, 1)]
    store.close()


class Weak(Files):
    """Faults on demand: short transfers, errors, a hang."""

    def __init__(self) -> None:
        self.short = False
        self.error: int | None = None
        self.read_error: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.gated_bytes: int | None = None  # only writes whose first buffer has this length wait at the gate
        self.seen: list[int] = []

    def _cut(self, buffers: Sequence) -> list:
        if not self.short:
            return list(buffers)
        return [memoryview(buffers[0])[: 512 * random.randint(1, 8)]]

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.gate.wait(60)
        if self.read_error is not None:
            raise OSError(self.read_error, os.strerror(self.read_error))
        return super().preadv(fd, self._cut(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        gate, gated = self.gate, self.gated_bytes in (None, len(buffers[0]))  # who sees it may have another gate then
        self.seen.append(len(buffers[0]))
        if gated:
            gate.wait(60)
        if self.error is not None and len(buffers) > 1:
            raise OSError(self.error, os.strerror(self.error))
        return super().pwritev(fd, self._cut(buffers), offset)

    def open_slab(self, path: Path) -> int:
        return self.open(path, os.O_RDWR)  # transfers of any length


def test_short_transfers_are_completed(tmp_path: Path) -> None:
    files = Weak()
    store, page = open_store(tmp_path, files=files), make_page(1)
    files.short = True
    assert put(store, page, (3, 4), PARTS) is Outcome.OK
    assert get(store, page, (3, 4)) == (Outcome.OK, PARTS)
    files.short = False
    assert get(store, page, (3, 4)) == (Outcome.OK, PARTS)
    store.close()


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    files = Weak()
    store, old = open_store(tmp_path, files=files), make_page(1)
    put(store, old, (3,), PARTS[:1])
    for error, outcome in ((errno.EIO, Outcome.FAILED), (errno.ENOSPC, Outcome.NO_SPACE)):
        files.error = error
        assert put(store, make_page(2), (3,), PARTS[1:]) is outcome
        files.error = None
        for page in (old, make_page(2)):
            assert get(store, page, (3,))[0] is Outcome.CORRUPT
    store.close()
    store = open_store(tmp_path)
    assert not recover(store)
    store.close()


def test_an_index_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However often a page leaves meanwhile; what could not be cleared is cleared later."""

    class Failing(Weak):
        def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
            if self.error is not None and len(buffers[0]) == RECORD:
                failed.release()
                raise OSError(self.error, os.strerror(self.error))
            return super().pwritev(fd, buffers, offset)

    files, failed = Failing(), threading.Semaphore(0)
    store = open_store(tmp_path, files=files)
    for slot in range(3):
        put(store, make_page(slot), (slot,), PARTS[:1])
    files.error = errno.EIO
    for slot in range(3):
        store.erase_slots((slot,))
        assert failed.acquire(timeout=60)
    files.error = None
    store.close()
    assert [record.exc_info for record in caplog.records] == [None], caplog.text
    store = open_store(tmp_path)
    assert not recover(store)
    store.close()


def test_no_record_names_what_is_being_overwritten(tmp_path: Path) -> None:
    files = Weak()
    store, old = open_store(tmp_path, files=files, threads=1), make_page(1)
    assert put(store, old, (3,), PARTS[:1]) is Outcome.OK
    index = tmp_path / SPACE.digest.hex() / "index"
    assert index.read_bytes().strip(b"\0")
    files.gate.clear()
    ended, files.seen = threading.Semaphore(0), []
    assert store.write_page(
        make_page(2), (9,), buffers(PARTS[:1]), lambda outcome: ended.release()
    )  # keeps the thread busy
    store.erase_slots((3,))
    files.gated_bytes = SLOT
    assert store.write_page(make_page(5), (3,), buffers(PARTS[1:]), lambda outcome: ended.release())
    while SLOT not in files.seen:  # a busy machine may clear the record of slot 3 first
        time.sleep(0.001)
    gate, files.gate = files.gate, threading.Event()
    gate.set()
    while files.seen.count(SLOT) < 2:
        time.sleep(0.001)
    assert not index.read_bytes()[3 * RECORD : 4 * RECORD].strip(b"\0"), "the data of slot 3 changes now"
    files.gate.set()
    assert ended.acquire(timeout=60) and ended.acquire(timeout=60)
    store.close()


def test_a_page_of_which_one_slot_was_erased_is_gone(tmp_path: Path) -> None:
    store, page = open_store(tmp_path), make_page(1, "global")
    for gone in (3, 4):
        assert put(store, page, (3, 4), PARTS) is Outcome.OK
        store.erase_slots((gone,))
        assert get(store, page, (3, 4))[0] is Outcome.CORRUPT
    store.close()


@pytest.mark.parametrize("gated_bytes", [SLOT, RECORD])
def test_a_write_that_hung_is_not_found_again_though_it_succeeded(tmp_path: Path, gated_bytes: int) -> None:
    """It hangs in the write of the slot, or in that of the record."""
    files = Weak()
    files.gated_bytes = gated_bytes
    store, page = open_store(tmp_path, files=files, threads=1), make_page(1)
    assert put(store, make_page(2), (0,), PARTS[:1]) is Outcome.OK
    files.gate.clear()
    told, seen = threading.Condition(), []

    def done(outcome: Outcome) -> None:
        with told:
            seen.append(outcome)
            told.notify_all()

    assert store.write_page(page, (3,), buffers(PARTS[:1]), done)
    while not store._pool._running:
        time.sleep(0.001)
    hurry(store._pool, 0.05)
    with told:
        assert told.wait_for(lambda: seen == [Outcome.TIMEOUT], 60) and store.stalled
        assert not read_page(store, make_page(2), (0,), buffers(PARTS[:1]), done)
        files.gate.set()
        assert told.wait_for(lambda: seen == [Outcome.TIMEOUT, Outcome.RETURNED], 60)
    hurry(store._pool, 30.0)
    assert get(store, page, (3,))[0] is Outcome.CORRUPT
    assert get(store, make_page(2), (0,)) == (Outcome.OK, PARTS[:1])
    store.close()
    store = open_store(tmp_path)
    assert recover(store) == [(make_page(2), (0,))]
    store.close()


def test_a_store_that_hangs_keeps_the_directory_until_it_comes_back(tmp_path: Path) -> None:
    files = Weak()
    store = open_store(tmp_path, files=files)
    files.gate.clear()
    assert store.write_page(make_page(1), (3,), buffers(PARTS[:1]), lambda outcome: None)
    store.close(0.1)
    with pytest.raises(Exception, match="in use by process"):
        open_store(tmp_path)
    files.gate.set()
    store.close(10)
    open_store(tmp_path).close()


def slot_bytes_at(path: Path, slot: int) -> tuple[Path, int]:
    return path / SPACE.digest.hex() / f"slab-{slot // 16:05d}", slot % 16 * 2 * SLOT


def test_lost_writes_and_lost_records_are_misses(tmp_path: Path) -> None:
    """Power loss: any of the unsynced writes, of slots or of records, may be missing, each for itself."""
    before: dict[Path, bytes] = {}
    newer: dict[Page, tuple[tuple[int, ...], list[bytes]]] = {}
    for version in range(2):
        store = open_store(tmp_path)
        recover(store)
        for number in range(30):
            page, slots = make_page(number), ((number * 7) % 31, 31 + number)
            parts = [content(number, part, version) for part in range(2)]
            assert put(store, page, slots, parts) is Outcome.OK
            newer[page] = (slots, parts)
        store.close()
        files = sorted((tmp_path / SPACE.digest.hex()).glob("[is]*"))
        if not version:
            before = {path: path.read_bytes() for path in files}
    lost_something = False
    for path, old in before.items():
        data, step = bytearray(path.read_bytes()), RECORD if path.name == "index" else SLOT
        for at in range(0, len(old), step):
            if random.random() < 0.1:
                lost_something |= data[at : at + step] != old[at : at + step]
                data[at : at + step] = old[at : at + step]
        path.write_bytes(data)
    store, outcomes = open_store(tmp_path), set()
    for page, slots in recover(store):
        outcome, found = get(store, page, slots)
        outcomes.add(outcome)
        expected = [[content(page.index, part, version) for part in range(2)] for version in range(2)]
        assert outcome is Outcome.CORRUPT or found in expected
        assert outcome is Outcome.CORRUPT or slots == newer[page][0]
    assert lost_something and outcomes == {Outcome.OK, Outcome.CORRUPT}
    store.close()


def test_an_older_version_left_by_a_lost_write_is_not_read_in_this_life(tmp_path: Path) -> None:
    store, page = open_store(tmp_path), make_page(1)
    put(store, page, (3,), [content(1, 0, 1)])
    path, at = slot_bytes_at(tmp_path, 3)
    old = path.read_bytes()[at : at + 2 * SLOT]
    put(store, page, (3,), [content(1, 0, 2)])
    with path.open("r+b") as file:
        file.seek(at)
        file.write(old)
    assert get(store, page, (3,))[0] is Outcome.CORRUPT
    store.close()


def test_an_index_that_cannot_be_read_recovers_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, make_page(1), (3,), PARTS[:1])
    store.close()

    files = Weak()
    store = open_store(tmp_path, files=files)
    files.read_error = errno.EIO
    assert not recover(store)
    assert wait_for(read_page, store, make_page(1), (3,), [aligned_buffer(SLOT)]) is Outcome.CORRUPT
    store.close()


def test_a_file_cut_short_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(8):
        put(store, make_page(number), (number,), [content(number, 0)])
    slab, at = slot_bytes_at(tmp_path, 5)
    os.truncate(slab, at + SLOT + 100)
    for number in range(8):
        outcome, found = get(store, make_page(number), (number,))
        assert (outcome, found) == (Outcome.OK, [content(number, 0)]) if number < 5 else outcome is Outcome.CORRUPT
    store.close()


def test_larger_slots(tmp_path: Path) -> None:
    big = 3 * SLOT
    store: DiskStore = open_store(tmp_path, slot_bytes=big)
    parts = [content(1, part, nbytes=big) for part in range(2)]
    assert put(store, make_page(1, "global"), (0, 1), parts) is Outcome.OK
    assert get(store, make_page(1, "global"), (0, 1), big) == (Outcome.OK, parts)
    store.close()
