"""A read of the disk that nobody waits for any more is left out, and who wants the page after all gets it."""

from __future__ import annotations

import threading
from collections import deque
from unittest import mock

import pytest
from disk_store_helpers import read_page
from fakes import make_core

from wicore_trt.config import KVSettings
from wicore_trt.kv.disk.io import URGENT_AHEAD, Outcome
from wicore_trt.kv.tiers.load import LoadItem, PrefixLoad
from wicore_trt.kv.tiers.moves import Fetch, Stage
from wicore_trt.model.spec import GLOBAL
from wicore_trt.types import GenerateRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("each_mover")


def occupy(store, free):
    """Every thread of the disk has something else to do until `free`."""
    pool, held = store._pool, []

    def run(op):
        if pool._elsewhere:
            return held.append(op)
        return Outcome.OK if free.wait(60) else Outcome.FAILED

    def end_held():
        free.wait(60)
        for op in held:
            pool.end_operation(op, Outcome.OK)
        pool.begin_urgent()

    for _ in range(pool._threads * URGENT_AHEAD if pool._elsewhere else pool._threads):
        assert pool.submit_operation(run, lambda outcome: None, urgent=True)
    while pool._urgent:
        pass
    threading.Thread(target=end_held, daemon=True).start()


def begin_until_told(tiers, load):
    """Begin a load, and wait until the disk has told of all its reads, which the engine's thread does not know yet."""
    with mock.patch.object(tiers.store, "read_pages", wraps=tiers.store.read_pages) as read:
        tiers.loads.begin_load(load)
    while tiers.movers.mailbox.qsize() < read.call_count:
        pass


@pytest.fixture
def core(tmp_path):
    """A core whose pages are on disk alone."""
    kv = KVSettings(host_bytes=1 << 20, disk_path=str(tmp_path / "kv"), disk_bytes=1 << 24, disk_free_bytes=0)
    core = make_core(pages={GLOBAL: 100}, kv=kv)
    core.add(GenerateRequest("a", tuple(range(2, 62)), SamplingParams(max_tokens=1, temperature=0.0)))
    tiers = core.scheduler.manager.tiers
    while core.has_work or core.do_housekeeping():
        core.step()
    for copy in list(tiers.host.iterate_copies()):
        tiers.host.drop_copy(copy, "test")
    yield core
    tiers.check_integrity()
    core.close()


@pytest.fixture
def kept(core):
    """The tiers of `core` and their pages."""
    tiers = core.scheduler.manager.tiers
    return tiers, [copy.page for copy in tiers.disk.iterate_copies()]


def test_the_store_reads_nothing_that_is_not_wanted(kept):
    tiers, pages = kept
    index, store = tiers.movers.disk
    asked, told = [], deque()
    parts = [memoryview(bytearray(b"x" * tiers.movers.host.slot_bytes)) for _ in index.find_copy(*pages[0].name).slots]
    wanted = lambda: bool(asked.append(1))  # noqa: E731
    assert read_page(store, pages[0], index.find_copy(*pages[0].name).slots, parts, told.append, wanted=wanted)
    tiers.wait_idle(60)
    while not told:
        pass
    assert list(told) == [Outcome.UNWANTED] and asked == [1]
    assert all(bytes(part) == b"x" * len(part) for part in parts)


def test_a_fetch_of_no_use_fails_and_its_page_stays(kept):
    tiers, pages = kept
    inbox = deque()
    fetches = [Fetch(page, inbox, wanted=lambda: False) for page in pages]
    for fetch in fetches:
        tiers.up.begin_fetches([fetch])
    assert tiers.wait_idle(60)
    assert [fetch.stage for fetch in fetches] == [Stage.FAILED] * len(pages) and len(inbox) == len(pages)
    assert not tiers.movers.disk_traffic.failures and not tiers.up.waiting and not tiers.up.reading_bytes
    assert tiers.host.used_slots == 0
    assert all(tiers.find_tier(*page.name) == "disk" for page in pages)


def test_who_comes_after_a_read_was_left_out_has_it_read(kept):
    tiers, pages = kept
    inbox = deque()
    first = Fetch(pages[0], inbox, wanted=lambda: False)
    tiers.up.begin_fetches([first])
    while tiers.movers.mailbox.empty():
        pass  # it was left out, which nobody knows yet
    second = tiers.up.fetch_page(pages[0], inbox)
    assert tiers.wait_idle(60)
    assert (first.stage, second.stage) == (Stage.FAILED, Stage.HERE)
    tiers.up.release_fetch(second)


def test_a_load_that_is_given_up_leaves_the_disk_to_others(kept):
    tiers, pages = kept
    pages = [page for page in pages if page.group == GLOBAL]
    store, free = tiers.movers.disk[1], threading.Event()
    occupy(store, free)
    load, reads = PrefixLoad(len(pages) * 4, len(pages), [LoadItem(page, 0) for page in pages]), []
    with mock.patch.object(store._mover, "begin", lambda *args: reads.append(args[0])):
        tiers.loads.begin_load(load)
        assert load.reading == len(pages)
        load.floor = 1 << 30  # the sequence has computed all of it
        free.set()
        while tiers.loads.loads or tiers.has_work:
            tiers.poll_all()
    assert not reads and load.meeting_page() == max(page.index for page in pages) + 1
    assert not load.failed and load.finished and not load.reading


def test_who_comes_after_a_read_was_left_out_waits_for_room_in_the_queue(kept):
    tiers, pages = kept
    pages = [page for page in pages if page.group == GLOBAL]
    store, free = tiers.movers.disk[1], threading.Event()
    given_up = PrefixLoad(len(pages) * 4, len(pages), [LoadItem(page, -1) for page in pages])
    given_up.floor = 1 << 30
    with mock.patch.object(given_up, "take_next_item", lambda: given_up.todo.popleft() if given_up.todo else None):
        begin_until_told(tiers, given_up)  # all of its reads were left out
    occupy(store, free)
    load = PrefixLoad(len(pages) * 4, len(pages), [LoadItem(page, -1) for page in pages])
    tiers.loads.begin_load(load)
    assert load.in_flight == len(pages)
    with mock.patch.object(store._pool, "_limit", 1):
        tiers.poll_all()
        free.set()
        while tiers.loads.loads or tiers.has_work:
            tiers.poll_all()
    assert load.complete and not load.in_flight and not load.reading


def test_two_loads_that_read_the_same_pages_keep_to_the_bound_one_after_the_other(kept):
    tiers, pages = kept
    pages = [page for page in pages if page.group == GLOBAL]
    store, free = tiers.movers.disk[1], threading.Event()
    occupy(store, free)
    loads = [PrefixLoad(len(pages) * 4, len(pages), [LoadItem(page, -1) for page in pages]) for _ in range(2)]
    with mock.patch.object(tiers.loads, "_in_flight", 2):
        for load in loads:
            tiers.loads.begin_load(load)
        assert [(load.reading, load.in_flight) for load in loads] == [(2, 2), (0, 0)]
        assert [tiers.find_tier(*page.name) for page in pages[:3]] == ["reading", "reading", "disk"]
        free.set()
        while tiers.loads.loads or tiers.has_work:
            tiers.poll_all()
            assert all(load.reading <= 2 for load in loads)
    assert all(load.complete and not load.reading for load in loads)
    assert {tiers.find_tier(*page.name) for page in pages} == {"host"}


def test_a_run_of_reads_ends_at_a_page_that_is_in_host_memory_and_at_one_of_no_use(kept):
    tiers, pages = kept
    pages = [page for page in pages if page.group == GLOBAL]
    tiers.loads.begin_load(PrefixLoad(0, 0, [LoadItem(pages[2], -1)]))
    while tiers.loads.loads:
        tiers.poll_all()
    load = PrefixLoad(len(pages) * 4, len(pages), [LoadItem(page, -1) for page in pages])
    wanted, useless = load.is_wanted, pages[6]
    with (
        mock.patch.object(tiers.loads, "_together", {GLOBAL: 16}),
        mock.patch.object(tiers.store, "read_pages", wraps=tiers.store.read_pages) as read,
        mock.patch.object(load, "is_wanted", lambda item: item.page is not useless and wanted(item)),
    ):
        tiers.loads.begin_load(load)
        while tiers.loads.loads or tiers.has_work:
            tiers.poll_all()
    runs = [[move.page for move in call.args[0]] for call in read.call_args_list]
    assert runs == [pages[:2], pages[3:6], pages[7:]]
    assert load.complete and load.here[GLOBAL] == {page.index for page in pages if page is not useless}


def test_a_page_that_is_wrong_in_host_memory_waits_for_room_in_the_queue(kept):
    tiers, pages = kept
    pages = [page for page in pages if page.group == GLOBAL]
    free = threading.Event()
    tiers.loads.begin_load(PrefixLoad(len(pages) * 4, len(pages), [LoadItem(page, -1) for page in pages]))
    while tiers.loads.loads:
        tiers.poll_all()
    for page in pages:
        tiers.movers.host.page_parts(tiers.host.find_copy(*page.name))[0][0] ^= 1
    occupy(tiers.movers.disk[1], free)
    load = PrefixLoad(len(pages) * 4, len(pages), [LoadItem(page, -1) for page in pages])
    begin, counts = tiers.up.begin_fetches, []
    spied = mock.patch.object(tiers.up, "begin_fetches", lambda all: counts.extend(f.wrong for f in all) or begin(all))
    with mock.patch.object(tiers.movers.disk[1]._pool, "_limit", 1), spied:
        tiers.loads.begin_load(load)
        while tiers.movers.host_traffic.failures["corrupt"] < len(pages):
            tiers.poll_all()
        free.set()
        while tiers.loads.loads or tiers.has_work:
            tiers.poll_all()
    assert load.complete and not load.in_flight and not load.reading
    assert not tiers.movers.disk_traffic.failures and tiers.movers.host_traffic.failures == {"corrupt": len(pages)}
    assert {0, 1} == set(counts), "how often its bytes were wrong is not forgotten"


def begin_and_cancel(tiers, pages):
    """A load that is over when all its pages have been read, which the engine's thread does not know yet."""
    pages = [page for page in pages if page.group == GLOBAL]
    load = PrefixLoad(len(pages) * 4, len(pages), [LoadItem(page, -1) for page in pages])
    begin_until_told(tiers, load)
    load.cancel_load()
    tiers.loads.pump_loads()
    assert not tiers.loads.loads and tiers.has_work


def test_pages_that_come_for_a_load_that_is_over_are_let_go_with_the_last_transfer(kept):
    tiers, pages = kept
    begin_and_cancel(tiers, pages)
    while tiers.has_work:
        tiers.poll_up()
        tiers.poll_down()
    assert not tiers.loads.inbox and not any(copy.readers for copy in tiers.host.iterate_copies())


def test_an_idle_engine_holds_no_page_that_came_late(core, kept):
    tiers, pages = kept
    begin_and_cancel(tiers, pages)
    with (
        mock.patch.object(tiers, "poll_up"),
        mock.patch.object(tiers, "poll_down", lambda tokens: tiers.apply_reports()),
    ):
        while core.do_housekeeping():
            pass
    assert not tiers.loads.inbox and not any(copy.readers for copy in tiers.host.iterate_copies())
