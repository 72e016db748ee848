"""Condemned pages, pages whose time is over and pages of low priority, while others load, park or write over them."""

from __future__ import annotations

import errno
import threading
import time

from disk_store_helpers import SLOT, buffers, content, make_page, open_store
from fakes import greedy, make_core
from test_failed_steps import Spoiler
from test_written_pages import ask, forget_device, measured

from wicore_trt.config import KVSettings
from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.disk.io import Outcome
from wicore_trt.kv.tiers.moves import Fetch
from wicore_trt.model.spec import GLOBAL
from wicore_trt.schedule.sequence import StepSchedule
from wicore_trt.types import CacheHints, CachePriority, FinishReason, GenerateRequest, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def core_with_a_prefix_in_host(prefix: list[int], **options: object):
    core = make_core(kv=KVSettings(host_bytes=2000 * 4096), pages={GLOBAL: 160, "local": 60}, **options)
    ask(core, "warm", [*prefix, 3])
    forget_device(core)
    return core


def test_a_load_that_found_pages_which_are_condemned_meanwhile_is_given_up():
    prefix = [2 + i * 7 % 90 for i in range(40)]
    core = core_with_a_prefix_in_host(prefix)
    scheduler = core.scheduler
    Spoiler(core).count = 1
    measured(core, 1e9, 10.0)  # computing is faster
    core.add(GenerateRequest("spoilt", (*prefix, *range(10, 70)), GREEDY))
    (spoilt,) = scheduler.waiting
    while spoilt.remaining_tokens > 16 or not spoilt.computed:
        core.step()
    measured(core, 1.0, 1e-6)  # loading is
    core.add(GenerateRequest("loads", (*prefix, 5), GREEDY))
    (loads,) = scheduler.waiting
    ends = {o.request_key: o.finish_reason for o in core.step()}
    assert loads.pages.load is not None and loads.pages.load.found, "it found nothing of the other's"
    got = []
    while core.has_work:
        for output in core.step():
            ends[output.request_key] = output.finish_reason
            got += output.token_ids if output.request_key == "loads" else ()
        scheduler.check_integrity()
    assert ends == {"spoilt": FinishReason.ERROR, "loads": FinishReason.LENGTH}
    assert got == greedy([*prefix, 5], 3, ignore_eos=True)
    assert ask(core, "after", [*prefix, 6]) == greedy([*prefix, 6], 3, ignore_eos=True)


def test_who_shares_what_was_condemned_publishes_nothing_until_a_step_vouches_for_it():
    core = make_core()
    manager = core.scheduler.manager
    core.add(GenerateRequest("long", tuple(range(5, 85)), GREEDY))
    core.step()
    (sequence,) = core.scheduler.running
    manager.failures += 1  # another's step failed
    before = len(manager.pools[GLOBAL].list_pages())
    while sequence.remaining_tokens > 16:
        core.step()
        assert len(manager.pools[GLOBAL].list_pages()) == before
    core.step()
    assert len(manager.pools[GLOBAL].list_pages()) == 20


def test_pages_that_are_waited_for_do_not_expire():
    prefix = [2 + i * 7 % 90 for i in range(40)]
    core = core_with_a_prefix_in_host(prefix)
    manager, scheduler = core.scheduler.manager, core.scheduler
    scheduler.loader.tiers.up.fetch_page = Fetch  # nothing arrives
    measured(core, 1.0, 1e-6)
    core.add(GenerateRequest("loads", (*prefix, 5), GREEDY))
    core.step()
    (sequence,) = scheduler.running
    keys = sequence.pages.keys[:10]
    assert sequence.pages.load is not None and all(map(manager._in_use, keys))
    core.abort("loads")
    assert not any(map(manager._in_use, keys))


def test_a_request_of_low_priority_is_parked_under_no_name():
    core = make_core(kv=KVSettings(host_bytes=2000 * 4096))
    scheduler, manager = core.scheduler, core.scheduler.manager
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    core.add(GenerateRequest("low", tuple(range(10, 40)), params, cache=CacheHints(priority=CachePriority.LOW)))
    for _ in range(6):
        core.step()
    (sequence,) = scheduler.running
    scheduler._preempt_sequence(sequence, StepSchedule())
    assert scheduler.loader.parking.parked == 1
    assert not {copy.page.key for copy in manager.tiers.host.iterate_copies()} & set(sequence.pages.keys)


class Broken(Files):
    """Writes of slabs fail while `fails`."""

    fails = False

    def pwritev(self, fd, buffers, offset):
        if self.fails and sum(map(len, buffers)) > SLOT:
            raise OSError(errno.EIO, "broken")
        return super().pwritev(fd, buffers, offset)


def test_bytes_that_are_to_go_go_also_when_the_write_over_them_fails(tmp_path):
    files = Broken()
    store = open_store(tmp_path / "kv", files=files, threads=1)
    list(store.recover_pages())
    done, busy, free = threading.Event(), threading.Event(), threading.Event()
    store.write_page(
        make_page(1), (0,), buffers([content(1, 0)]), lambda _: done.set(), expires=int(time.time()) + 1000
    )
    assert done.wait(60)
    store._pool.submit_operation(lambda op: (busy.set(), free.wait(60), Outcome.OK)[2], lambda outcome: None)
    assert busy.wait(60)
    store.erase_slots((0,))
    outcomes: list[Outcome] = []
    written = threading.Event()
    files.fails = True
    store.write_page(make_page(2), (0,), buffers([content(2, 0)]), lambda o: (outcomes.append(o), written.set()))
    free.set()
    assert written.wait(60) and outcomes == [Outcome.FAILED]
    files.fails = False
    store.close()
    store = open_store(tmp_path / "kv", files=files)
    assert not list(store.recover_pages())
    store.close()
    (slab,) = (tmp_path / "kv").rglob("slab-00000")
    assert content(1, 0)[:64] not in slab.read_bytes()
