"""Pages with a time to live on disk: they end on time, whatever becomes of the server, and leave no byte behind.

Invariants: I11.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from campaign import Stack
from disk_store_helpers import buffers, content, get, hurry, make_page, open_store, put, wait_for
from fakes import chain

from wicore_trt.core.loop import EngineLoop
from wicore_trt.kv.disk.cipher import PageCipher
from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.disk.io import Probe
from wicore_trt.kv.disk.store import DiskStore, Outcome
from wicore_trt.kv.disk.tools import verify_directory
from wicore_trt.kv.pages.page import Page
from wicore_trt.types import CacheHints, GenerateRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("each_mover")

SEED = int.from_bytes(os.urandom(4), "little")
FAR = 1 << 31


def eventually(holds) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "never"
        time.sleep(0.005)


def on_disk(path: Path) -> bytes:
    """Everything in slabs and index."""
    return b"".join(file.read_bytes() for file in sorted(path.rglob("*")) if file.name.startswith(("slab-", "index")))


def put_until(store: DiskStore, number: int, slots: list[int], expires: int) -> Page:
    page = make_page(number)
    parts = buffers([content(number, part) for part in range(len(slots))])
    assert wait_for(lambda *args: store.write_page(*args, expires=expires), page, slots, parts) is Outcome.OK
    return page


def gone(path: Path, number: int, parts: int = 1) -> bool:
    data = on_disk(path)
    return make_page(number).key not in data and not any(content(number, part) in data for part in range(parts))


@pytest.mark.parametrize("sealed", [False, True])
def test_no_byte_of_it_is_left_when_it_leaves(tmp_path: Path, sealed: bool) -> None:
    cipher = PageCipher(b"k" * 32) if sealed else None
    store = open_store(tmp_path, cipher=cipher)
    put_until(store, 1, [2, 7], FAR)
    put(store, make_page(2), [3], [content(2, 0)])
    (slab,) = tmp_path.rglob("slab-00000")
    was = slab.read_bytes()
    stride, places = 2 * 4096, (2, 7)
    assert all(any(was[at * stride : (at + 1) * stride]) for at in places)
    store.erase_slots([2, 7])
    eventually(lambda: make_page(1).key not in on_disk(tmp_path))
    now = slab.read_bytes()
    assert not any(any(now[at * stride : (at + 1) * stride]) for at in places)
    assert get(store, make_page(2), [3]) == (Outcome.OK, [content(2, 0)]), "its neighbours stay"
    store.close()


@pytest.mark.parametrize("how", ["over", "over while it ran", "clock set back", "half written", "not over"])
def test_a_restart_neither_forgets_nor_lengthens_a_time(tmp_path: Path, how: str) -> None:
    end = int(time.time()) + 1000
    store = open_store(tmp_path)
    put_until(store, 1, [0, 1], end)
    put_until(store, 2, [4], 0)
    if how == "half written":
        # as a server leaves it that dies between the bytes and their record
        with mock.patch.object(store._index, "put_records", side_effect=[None, OSError(errno.EIO, "died")]) as record:
            store._index.put_records = lambda *args: record(*args) or type(store._index).put(store._index, *args)
            store.erase_slots = lambda slots: None
            write = lambda *args: store.write_page(*args, expires=end)  # noqa: E731
            assert wait_for(write, make_page(3), [6], buffers([content(3, 0)])) is Outcome.FAILED
    store.close()
    later = {"over": end + 1, "over while it ran": end, "clock set back": end - 5000}.get(how, end - 500)
    if how == "clock set back":  # to long before the page was written; its writer started after its end
        store = open_store(tmp_path)
        list(store.recover_pages())
        store._last_id = (end + 1) * 10**9
        put_until(store, 5, [9], 0)
        store.close()
    with mock.patch("wicore_trt.kv.disk.store.time.time", lambda: later):
        store = open_store(tmp_path)
        found = {page.index for page, _ in store.recover_pages()}
    if how in ("not over", "half written"):
        assert found == {1, 2} and store.ending == {make_page(1).key: end}
        assert get(store, make_page(1), [0, 1])[0] is Outcome.OK
    else:
        assert 1 not in found and 2 in found and not store.ending
        eventually(lambda: gone(tmp_path, 1, 2))
    if how == "half written":
        eventually(lambda: gone(tmp_path, 3))
    store.close()
    assert not gone(tmp_path, 2)


def test_a_clock_set_back_lengthens_no_time_by_what_the_last_life_lasted(tmp_path: Path) -> None:
    began, hour = int(time.time()), 3600
    clock = mock.Mock()
    with mock.patch("wicore_trt.kv.disk.store.time", clock):
        clock.time = lambda: clock.now
        clock.time_ns = lambda: clock.now * 10**9
        clock.now = began
        store = open_store(tmp_path)
        put_until(store, 1, [0], began + 50 * hour)
        clock.now = began + 48 * hour
        put_until(store, 2, [1], clock.now + hour)
        put_until(store, 3, [2], clock.now + 1)
        store.close()
        clock.now = began - hour  # 49 hours back
        store = open_store(tmp_path)
        assert {page.index for page, _ in store.recover_pages()} == {1, 2, 3}
        assert store.ending[make_page(2).key] - store.now <= hour
        assert store.ending[make_page(1).key] - store.now <= 2 * hour
        store.close()
        clock.now = began + 48 * hour + 60  # page 3 is over, which was written last
        store = open_store(tmp_path)
        assert {page.index for page, _ in store.recover_pages()} == {1, 2}
        store.close()
        clock.now = began
        store = open_store(tmp_path)
        list(store.recover_pages())
        assert store.ending[make_page(2).key] - store.now <= hour
        store.close()


@pytest.mark.parametrize("moment", range(6))
def test_a_server_that_dies_while_it_writes_leaves_what_the_next_one_overwrites(tmp_path: Path, moment: int) -> None:
    """After each write call of one page the directory is copied, as kill -9 would leave it."""
    copies: list[Path] = []

    class Copying(Files):
        def pwritev(self, fd, given, offset) -> int:
            count = super().pwritev(fd, given, offset)
            if self.armed:
                copies.append(tmp_path / f"copy {len(copies)}")
                shutil.copytree(tmp_path / "cache", copies[-1])
            return count

        armed = False

    files = Copying()
    store = open_store(tmp_path / "cache", files=files)
    put_until(store, 9, [8], 0)
    files.armed = True
    put_until(store, 1, [0, 1, 5], FAR)
    files.armed = False
    store.close()
    if moment >= len(copies):
        assert moment >= 4
        return
    with mock.patch("wicore_trt.kv.disk.store.time.time", lambda: FAR + 1):
        store = open_store(copies[moment])
        assert [page.index for page, _ in store.recover_pages()] == [9]
    eventually(lambda: gone(copies[moment], 1, 3))
    store.close()


def test_a_new_page_in_the_slot_is_not_overwritten(tmp_path: Path) -> None:
    """Slots change hands while what was in them waits to be overwritten."""
    rng = random.Random(SEED)
    store = open_store(tmp_path, threads=3)
    held: dict[int, int] = {}
    old: list[int] = []
    for number in range(1, 250):
        slot = rng.randrange(24)
        if slot in held:
            old.append(held.pop(slot))
            store.erase_slots([slot])
        put_until(store, number, [slot], rng.choice([0, FAR]))
        held[slot] = number
        if rng.random() < 0.3:
            some = rng.choice(sorted(held))
            assert get(store, make_page(held[some]), [some]) == (Outcome.OK, [content(held[some], 0)]), SEED
    for slot, number in held.items():
        assert get(store, make_page(number), [slot]) == (Outcome.OK, [content(number, 0)]), SEED
    store.erase_slots(sorted(held))
    store.close()
    data = on_disk(tmp_path)
    assert not any(content(number, 0) in data for number in old), "all slots were written again, or overwritten"


def test_an_end_moves_with_the_page_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one, two = put_until(store, 1, [0, 3], FAR), put_until(store, 2, [1], FAR)
    three, four = put_until(store, 3, [2], 0), put_until(store, 4, [5], FAR)
    store.stamp_page(one, [0, 3], FAR + 7)
    store.stamp_page(two, [1], 0)
    store.stamp_page(three, [2], FAR + 9)
    store.erase_slots([5])
    store.stamp_page(four, [5], FAR + 9)  # it has left: nothing brings it back
    store.stamp_page(one, [0, 3], FAR + 8)
    store.close()
    store = open_store(tmp_path)
    assert {page.index for page, _ in store.recover_pages()} == {1, 2, 3}
    assert store.ending == {one.key: FAR + 8, three.key: FAR + 9}
    assert [store.get_expiry([slot]) for slot in (0, 1, 2)] == [FAR + 8, 0, FAR + 9]
    assert all(get(store, p, s)[0] is Outcome.OK for p, s in ((one, [0, 3]), (two, [1]), (three, [2])))
    store.close()
    assert gone(tmp_path, 4)


def test_what_could_not_be_overwritten_is_tried_again(tmp_path: Path) -> None:
    class Failing(Files):
        refuse = 0

        def pwritev(self, fd, given, offset) -> int:
            if self.refuse and not any(given[0]):
                self.refuse -= 1
                raise OSError(errno.EIO, "no")
            return super().pwritev(fd, given, offset)

    files = Failing()
    store = open_store(tmp_path, files=files)
    put_until(store, 1, [0], FAR)
    put_until(store, 2, [1], FAR)
    files.refuse = 1
    store.erase_slots([0])
    eventually(lambda: not files.refuse)
    assert not gone(tmp_path, 1), "the record stays as long as the bytes do"
    store.erase_slots([1])
    eventually(lambda: gone(tmp_path, 1) and gone(tmp_path, 2))
    store.close()


def test_a_write_that_hung_until_its_page_was_over_leaves_nothing(tmp_path: Path) -> None:
    """It lands after the slot was overwritten, and is overwritten once more."""

    class Hanging(Files):
        def pwritev(self, fd, given, offset) -> int:
            if self.hangs and any(given[0][:8]) and len(given) == 2:
                self.reached.set()
                self.go_on.wait(60)
            return super().pwritev(fd, given, offset)

        hangs = False

    files = Hanging()
    files.reached, files.go_on = threading.Event(), threading.Event()
    store = open_store(tmp_path, files=files)
    put_until(store, 8, [3], 0)
    files.hangs = True
    outcomes: list[Outcome] = []
    data = buffers([content(1, 0)])
    assert store.write_page(make_page(1), [0], data, outcomes.append, expires=FAR)
    assert files.reached.wait(60)
    hurry(store._pool, 0.01)
    eventually(lambda: outcomes == [Outcome.TIMEOUT])
    store.erase_slots([0])
    eventually(lambda: not store._wiper.pending)
    files.go_on.set()
    eventually(lambda: outcomes == [Outcome.TIMEOUT, Outcome.RETURNED])
    eventually(lambda: gone(tmp_path, 1))
    store.close()


def test_erased_twice_the_record_still_stays_as_long_as_the_bytes(tmp_path: Path) -> None:
    """The store erases a write that went wrong, and so does the engine when it hears of it."""

    class Refusing(Files):
        on = True

        def pwritev(self, fd, given, offset) -> int:
            if self.on and not any(given[0]) and len(given) == 2:
                raise OSError(errno.EIO, "no")
            return super().pwritev(fd, given, offset)

    files = Refusing()
    store = open_store(tmp_path, files=files)
    write = lambda *args: store.write_page(*args, probe=Probe(lambda parts: b"this", 0), expected=b"other", expires=FAR)  # noqa: E731
    assert wait_for(write, make_page(1), [0], buffers([content(1, 0)])) is Outcome.CORRUPT
    store.erase_slots([0])
    put(store, make_page(2), [1], [content(2, 0)])  # what is to be forgotten is, by now
    store.close()
    assert not gone(tmp_path, 1)
    files.on = False
    store = open_store(tmp_path, files=files)
    assert [page.index for page, _ in store.recover_pages()] == [2]
    eventually(lambda: gone(tmp_path, 1))
    store.close()


def test_verify_overwrites_what_is_over(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_until(store, 1, [0, 4], int(time.time()) - 1)
    put_until(store, 2, [1], FAR)
    put_until(store, 3, [2], 0)
    store.close()
    assert verify_directory(tmp_path, dry_run=True).leftovers == 2 and not gone(tmp_path, 1, 2)
    report = verify_directory(tmp_path)
    assert (report.pages, report.good, report.leftovers, report.faults) == (2, 2, 2, {})
    assert gone(tmp_path, 1, 2) and not gone(tmp_path, 2) and not gone(tmp_path, 3)
    assert verify_directory(tmp_path).erased_records == 0


# --- through requests --------------------------------------------------------------------------------------------


def digests_on_disk(stack: Stack, tokens: list[int]) -> int:
    """How many of a prompt's KV entries can be read from the files."""
    data = on_disk(stack.home())
    entries, entry = [], b""
    for token in tokens:
        entry = chain(entry, token)
        entries.append(entry)
    return sum(entry in data for entry in entries)


@pytest.mark.parametrize("after", ["in the same life", "after a restart", "in a full tier"])
def test_nothing_of_a_request_with_a_ttl_outlives_it(tmp_path: Path, after: str) -> None:
    stack = Stack(tmp_path, seed=SEED, host_slots=300)
    short = stack.tokens(40)
    kept = [short[0] % 95 + 2, *stack.tokens(39)]  # another first token, so that the two share no digest
    stack.add(short, answer=2, cache=CacheHints(ttl_s=1000))
    stack.add(kept, answer=2)
    stack.settle()
    stack.settle_transfers()
    assert min(digests_on_disk(stack, short), digests_on_disk(stack, kept)) >= 40
    if after == "in a full tier":
        for copy in [c for c in stack.tiers.disk.iterate_copies() if c.ready]:
            stack.tiers.disk.drop_copy(copy, "capacity")
    elif after == "in the same life":
        stack.now += 1001
        stack.manager.prepare_step()
        stack.manager.work_beside_step(0)
    else:
        stack.close()
        later = time.time() + 1001
        with mock.patch("wicore_trt.kv.disk.store.time.time", lambda: later):
            stack.open()
    eventually(lambda: digests_on_disk(stack, short) == 0)
    assert digests_on_disk(stack, kept) >= 40
    stack.add([*short, 5], answer=2)
    stack.settle()
    assert after == "in a full tier" or stack.counts()["disk hits"] == 0
    assert stack.wrong == 0
    stack.close()


def test_a_restart_goes_on_with_the_time_that_is_left(tmp_path: Path) -> None:
    """Also while a server ran: the time counts from the last use, and is over in the next life."""
    stack = Stack(tmp_path, seed=SEED, host_slots=300)
    tokens = stack.tokens(40)
    stack.add(tokens, answer=2, cache=CacheHints(ttl_s=1000))
    stack.settle()
    stack.settle_transfers()
    stack.restart()
    ends = [
        stack.manager.retention.seconds_left(page.key) for tier, page in stack.manager.list_pages() if tier == "disk"
    ]
    assert ends and all(end is not None and 900 < end <= 1000 for end in ends)
    stack.now += 1001
    stack.manager.prepare_step()
    stack.manager.work_beside_step(0)
    eventually(lambda: digests_on_disk(stack, tokens) == 0)
    stack.check_idle()
    stack.close()


def test_a_page_that_others_use_without_a_ttl_outlives_it_after_a_restart_too(tmp_path: Path) -> None:
    stack = Stack(tmp_path, seed=SEED, host_slots=300)
    tokens = stack.tokens(40)
    stack.add(tokens, answer=2, cache=CacheHints(ttl_s=1000))
    stack.settle()
    stack.settle_transfers()
    stack.add(tokens, answer=2)
    stack.settle()
    stack.settle_transfers()
    stack.close()
    later = time.time() + 5000
    with mock.patch("wicore_trt.kv.disk.store.time.time", lambda: later):
        stack.open()
    assert digests_on_disk(stack, tokens) >= 36
    assert sum(tier == "disk" for tier, _ in stack.manager.list_pages()) >= 9
    stack.close()


def test_it_ends_on_a_server_that_nobody_asks(tmp_path: Path) -> None:
    stack = Stack(tmp_path, seed=SEED, host_slots=300)
    stack.manager.retention.clock = time.monotonic
    tokens = stack.tokens(40)
    loop = EngineLoop(stack.core, lambda outputs: None, max_waiting=10)
    hints = CacheHints(ttl_s=0.3)
    loop.start()
    loop.add(GenerateRequest("r", tuple(tokens), SamplingParams(max_tokens=1, temperature=0), cache=hints))
    eventually(lambda: not loop.live_ids())
    eventually(lambda: digests_on_disk(stack, tokens) == 0 and not stack.manager.retention._ends)
    assert not any(True for _ in stack.manager.list_pages())
    loop.stop(10)


def test_a_request_that_still_runs_when_the_server_dies_has_its_ttl(tmp_path: Path) -> None:
    """Its pages are on disk long before it ends."""
    stack = Stack(tmp_path / "cache", seed=SEED, host_slots=300)
    tokens = stack.tokens(40)
    stack.add(tokens, answer=40, whole=True, cache=CacheHints(ttl_s=1000))
    for _ in range(10):
        stack.step()
    stack.settle_transfers()
    assert stack.core.has_work and digests_on_disk(stack, tokens) >= 40
    shutil.copytree(tmp_path / "cache", tmp_path / "killed")
    stack.close()
    stack.kv = stack.kv.__class__(**(vars(stack.kv) | {"disk_path": str(tmp_path / "killed")}))
    later = time.time() + 1001
    with mock.patch("wicore_trt.kv.disk.store.time.time", lambda: later):
        stack.open()
    eventually(lambda: digests_on_disk(stack, tokens) == 0)
    assert not any(True for _ in stack.manager.list_pages())
    stack.close()


def test_an_end_that_moves_while_the_page_is_written_is_that_of_the_record(tmp_path: Path) -> None:
    class Waiting(Files):
        on, go_on = False, threading.Event()

        def pwritev(self, fd, given, offset) -> int:
            if self.on:
                self.go_on.wait(60)
            return super().pwritev(fd, given, offset)

    files = Waiting()
    stack = Stack(tmp_path, seed=SEED, host_slots=300, files=files)
    files.on = True
    tokens = stack.tokens(40)
    stack.add(tokens, answer=2, cache=CacheHints(ttl_s=1000))
    stack.settle()
    eventually(lambda: stack.tiers.apply_reports() or stack.tiers.down.saving_slots)
    stack.add(tokens, answer=2)
    stack.settle()
    files.on = False
    files.go_on.set()
    stack.settle_transfers()
    store = stack.tiers.movers.disk[1]
    ends = {copy.page.index: store.get_expiry(copy.slots) for copy in stack.tiers.disk.iterate_copies()}
    assert len(ends) >= 9 and not any(ends[index] for index in range(9))
    stack.close()
