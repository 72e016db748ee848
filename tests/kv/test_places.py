"""Pages of host memory that go to the device many at a time: each is judged by itself, and each is heard of once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fakes import make_core
from test_written_pages import ask, forget_device

from wicore_trt.config import KVSettings
from wicore_trt.kv.tiers.load import LoadItem, PrefixLoad
from wicore_trt.kv.tiers.up import MAX_WRONG
from wicore_trt.model.spec import GLOBAL, LOCAL

PAGES = 150


@pytest.fixture
def core():
    """150 pages of each layer group's chain are in host memory alone."""
    core = make_core(pages={GLOBAL: 400, LOCAL: 400}, page_tokens=4, window=8, kv=KVSettings(host_bytes=4000 * 4096))
    ask(core, "fill", [2 + i * 7 % 90 for i in range(4 * PAGES)])
    forget_device(core)
    yield core
    core.scheduler.check_integrity()


def a_load(core) -> PrefixLoad:
    """Of all global pages that host memory has, back to front, into slots of the same numbers."""
    copies = [copy for copy in core.scheduler.manager.tiers.host.iterate_copies() if copy.page.group == GLOBAL]
    pages = sorted((copy.page for copy in copies), key=lambda page: -page.index)
    assert len(pages) >= PAGES
    return PrefixLoad(4 * len(pages), len(pages), [LoadItem(page, page.index) for page in pages])


def run(core, load: PrefixLoad) -> None:
    tiers = core.scheduler.manager.tiers
    tiers.loads.begin_load(load)
    while tiers.loads.loads:
        tiers.wait_for_report(0.05)
        tiers.poll_all()


def held(core) -> list[object]:
    return [copy for copy in core.scheduler.manager.tiers.host.iterate_copies() if copy.readers]


@pytest.mark.parametrize("seed", range(4))
def test_a_page_that_comes_wrong_fails_alone(core, seed):
    """Whatever pieces the copier reports in, and however many of them are wrong."""
    rng, device, tiers = random.Random(seed), core.executor, core.scheduler.manager.tiers
    into, wrong = device.to_device, set(rng.sample(range(PAGES), rng.choice([1, 1, 10, 100])))
    kept = {copy.page.index: copy.checksum[0] for copy in tiers.host.iterate_copies() if copy.page.group == GLOBAL}

    def to_device(group, slots, pages, done):
        into(group, slots, pages, lambda *_: None)
        found = [bytes(16) if slot in wrong else kept[slot] for slot in slots]
        while found:
            count = rng.randint(1, len(found))
            done(found[:count], 0.0)
            del found[:count]

    device.checks, device.to_device = True, to_device
    load = a_load(core)
    run(core, load)
    assert load.here[GLOBAL] == set(range(load.stop)) - wrong and load.failed and not load.in_flight
    assert load.meeting_page() == max(wrong) + 1
    assert tiers.movers.host_traffic.failures["corrupt"] == len(wrong)
    names = {copy.page.index for copy in tiers.host.iterate_copies() if copy.page.group == GLOBAL}
    assert names == set(range(load.stop)) - wrong and not held(core) and not tiers.movers.outstanding


def test_bits_that_flipped_in_host_memory_take_their_page_alone(core):
    """The CPU looks before anything goes to the device."""
    tiers, placed, into = core.scheduler.manager.tiers, [], core.executor.to_device
    bad = next(copy for copy in tiers.host.iterate_copies() if copy.page.group == GLOBAL and copy.page.index == 70)
    tiers.movers.host.cut_slots(bad.slots)[0][0] ^= 1
    core.executor.to_device = lambda group, slots, *more: (placed.extend(slots), into(group, slots, *more))
    load = a_load(core)
    run(core, load)
    assert sorted(placed) == [i for i in range(load.stop) if i != 70] and load.meeting_page() == 71
    assert not held(core) and tiers.movers.host_traffic.failures["corrupt"] == 1


def test_what_was_given_up_while_it_was_checked_goes_to_no_slot(core):
    """The slots may be another's by then."""
    tiers, placed, jobs = core.scheduler.manager.tiers, [], []
    core.executor.to_device = lambda group, slots, *more: placed.extend(slots)
    checker = tiers.movers.checker
    submit, checker.submit = checker.submit, lambda *job: jobs.append(job)
    load = a_load(core)
    tiers.loads.begin_load(load)
    assert jobs and held(core)
    load.cancel_load()
    for job in jobs:
        submit(*job)
    while tiers.movers.outstanding:
        tiers.wait_for_report(0.05)
    assert not placed and not held(core) and not load.in_flight


def test_pages_that_were_computed_while_they_were_checked_are_passed_over(core):
    tiers, placed, jobs, into = core.scheduler.manager.tiers, [], [], core.executor.to_device
    core.executor.to_device = lambda group, slots, *more: (placed.extend(slots), into(group, slots, *more))
    checker = tiers.movers.checker
    submit, checker.submit = checker.submit, lambda *job: jobs.append(job)
    load = a_load(core)
    tiers.loads.begin_load(load)
    load.floor = 100
    checker.submit = submit
    for job in jobs:
        submit(*job)
    while tiers.loads.loads:
        tiers.wait_for_report(0.05)
        tiers.poll_all()
    assert sorted(placed) == list(range(100, load.stop)) and load.meeting_page() == 100
    assert not load.failed and load.finished and not held(core)


def test_a_page_that_comes_wrong_from_every_tier_is_given_up(tmp_path):
    """It may be the way to the device that changes it; the disk is asked for it a few times, not for ever."""
    kv = KVSettings(host_bytes=1 << 20, disk_path=str(tmp_path / "kv"), disk_bytes=1 << 24, disk_free_bytes=0)
    core = make_core(pages={GLOBAL: 100}, kv=kv)
    ask(core, "fill", list(range(2, 62)))
    tiers, asked = core.scheduler.manager.tiers, Counter[int]()
    while core.do_housekeeping():
        pass
    pages = sorted((copy.page for copy in tiers.disk.iterate_copies()), key=lambda page: -page.index)

    def to_device(group, slots, parts, done):
        asked.update(slots)
        assert asked.most_common(1)[0][1] <= 10
        done([bytes(16)] * len(slots), 0.0)

    core.executor.checks, core.executor.to_device = True, to_device
    load = PrefixLoad(4 * len(pages), len(pages), [LoadItem(page, page.index) for page in pages])
    run(core, load)
    assert load.failed and not load.here[GLOBAL] and not load.in_flight and not load.reading and not held(core)
    assert set(asked.values()) == {MAX_WRONG + 1} and len(asked) == len(pages)
    core.close()
