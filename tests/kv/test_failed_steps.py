"""After a step whose logits are not finite no tier keeps a page that it read; none gets what no step vouches for.

Invariants: I3, I4.
"""

from __future__ import annotations

import random
import shutil
import threading
from unittest import mock

import pytest
from fakes import greedy, make_core

from wicore_trt.config import KVSettings
from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.tiers import open_tiers
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import SequenceSlice, StepBatch, StepResult
from wicore_trt.schedule.sequence import StepSchedule
from wicore_trt.types import CacheHints, FinishReason, GenerateRequest, SamplingParams

NAN = b"not a no"


class Spoiler:
    """Spoils the global pages that the next `count` slices write. What is computed from a spoilt entry is spoilt too,
    and a query that sees one has logits that are not finite."""

    def __init__(self, core) -> None:
        self.count = 0
        self._executor, self._execute = core.executor, core.executor.execute
        core.executor.execute = self.execute

    def execute(self, batch: StepBatch) -> StepResult:
        bad = [piece for piece in batch.slices if self._spoils(piece)]
        clean = [piece for piece in batch.slices if piece not in bad]
        result = self._execute(StepBatch(clean)) if clean else StepResult([])
        result.failed.update({piece.seq_id: "logits are not finite" for piece in bad if piece.sample})
        return result

    def _spoils(self, piece: SequenceSlice) -> bool:
        size, table, memory = self._executor.layout.page_tokens, piece.pages[GLOBAL], self._executor.memory[GLOBAL]
        if not self.count and not any(memory[table[p // size]][p % size] == NAN for p in range(piece.start)):
            return False
        self.count = max(0, self.count - 1)
        for position in range(piece.start, piece.start + len(piece.token_ids)):
            memory[table[position // size]][position % size] = NAN
        return True


def serve(core, name: str, prompt: list[int], answer: int = 4, **request: object):
    """Run one request alone; its last output, having compared its tokens."""
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    core.add(GenerateRequest(name, tuple(prompt), params, **request))
    got: list[int] = []
    while core.has_work:
        for output in core.step():
            got += output.token_ids
    while core.do_housekeeping():
        core.scheduler.manager.tiers.wait_for_report(0.01)
    if output.finish_reason is not FinishReason.ERROR:
        assert got == greedy(prompt, answer, ignore_eos=True)
    core.scheduler.check_integrity()
    return output


def crowd_out(core, rng: random.Random) -> None:
    """Other requests, until the device has forgotten what it had cached."""
    for i in range(8):
        assert serve(core, f"other{i}", [rng.randrange(2, 97) for _ in range(60)]).finish_reason.value == "length"


@pytest.mark.parametrize("write_policy", ["through", "selective", "back"])
@pytest.mark.parametrize("disk", [False, True])
def test_a_prefix_heals_after_the_one_request_that_failed(tmp_path, disk, write_policy):
    rng = random.Random(3)
    tier = {"disk_path": str(tmp_path), "disk_bytes": 40 << 20, "disk_free_bytes": 0} if disk else {}
    kv = KVSettings(host_bytes=2000 * 4096, write_policy=write_policy, salt="s", **tier)
    core = make_core(kv=kv)
    prompt = list(range(10, 50))
    Spoiler(core).count = 1  # in the first chunk of three
    assert serve(core, "first", prompt).finish_reason is FinishReason.ERROR
    for i in range(3):
        assert serve(core, f"again{i}", [*prompt, 60 + i]).finish_reason is FinishReason.LENGTH
        crowd_out(core, rng)
    if disk:
        core.close()
        core = make_core(kv=kv)
        assert serve(core, "restarted", [*prompt, 70]).finish_reason is FinishReason.LENGTH
    core.close()


@pytest.mark.parametrize("hints", [CacheHints(), CacheHints(session="s")])
def test_lower_tiers_get_nothing_of_a_prompt_that_no_step_has_vouched_for(hints):
    core = make_core(kv=KVSettings(host_bytes=2000 * 4096))
    manager = core.scheduler.manager
    Spoiler(core).count = 1
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    core.add(GenerateRequest("cut short", tuple(range(10, 60)), params, cache=hints))
    core.step()
    core.step()
    assert manager.pools[GLOBAL].list_pages(), "the device shares pages at once"
    core.abort("cut short")
    while core.do_housekeeping():
        manager.tiers.wait_for_report(0.01)
    assert not list(manager.tiers.host.iterate_copies())
    assert serve(core, "next", list(range(10, 60))).finish_reason is FinishReason.ERROR  # the device had them
    assert serve(core, "last", list(range(10, 60))).finish_reason is FinishReason.LENGTH


def test_lower_tiers_keep_no_page_that_a_failed_step_read():
    """Not even those that were right when they were copied down: the fault may be in any."""
    core = make_core(kv=KVSettings(host_bytes=2000 * 4096))
    host = core.scheduler.manager.tiers.host
    prompt = list(range(10, 58))
    assert serve(core, "first", prompt).finish_reason is FinishReason.LENGTH
    assert {copy.page.index for copy in host.iterate_copies()} == set(range(12))
    Spoiler(core).count = 1
    assert serve(core, "fails", [*prompt, 5]).finish_reason is FinishReason.ERROR
    assert not list(host.iterate_copies())


@pytest.mark.parametrize("tiers", [False, True])
def test_what_was_computed_from_a_spoilt_page_is_not_found_either(tiers):
    """By a request that was cut short before any step could notice; another that shares the page fails."""
    core = make_core(pages={GLOBAL: 64}, kv=KVSettings(host_bytes=2000 * 4096 if tiers else 0))
    Spoiler(core).count = 1
    shared, branch = list(range(10, 26)), list(range(40, 80))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    core.add(GenerateRequest("cut short", (*shared, *branch), params))
    core.step()
    core.step()
    core.abort("cut short")
    assert serve(core, "fails", [*shared, 30]).finish_reason is FinishReason.ERROR
    assert serve(core, "heals", [*shared, 31]).finish_reason is FinishReason.LENGTH
    assert serve(core, "after", [*shared, *branch]).finish_reason is FinishReason.LENGTH


def test_a_preempted_prompt_is_parked_under_no_name_that_others_find():
    core = make_core(kv=KVSettings(host_bytes=2000 * 4096))
    scheduler, manager = core.scheduler, core.scheduler.manager
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = list(range(10, 60))
    core.add(GenerateRequest("parked", tuple(prompt), params))
    core.step()
    core.step()
    (sequence,) = scheduler.running
    scheduler._preempt_sequence(sequence, StepSchedule())
    assert scheduler.loader.parking.parked == 1
    assert not {copy.page.key for copy in manager.tiers.host.iterate_copies()} & set(sequence.pages.keys)
    got = []
    while core.has_work:
        for output in core.step():
            got += output.token_ids
    assert got == greedy(prompt, 4, ignore_eos=True) and scheduler.loader.parking.resumed == 1
    while core.do_housekeeping():
        manager.tiers.wait_for_report(0.01)
    keys = {copy.page.key for copy in manager.tiers.host.iterate_copies()}
    assert set(sequence.pages.keys[:12]) <= keys, "what was vouched for in the end is kept"


def test_those_who_share_a_condemned_page_go_on_and_nobody_finds_it_again():
    core = make_core(kv=KVSettings(host_bytes=2000 * 4096))
    manager = core.scheduler.manager
    shared = list(range(10, 42))
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    core.add(GenerateRequest("goes on", (*shared, 50), long))
    got: list[int] = []
    for _ in range(5):
        got += [t for output in core.step() for t in output.token_ids]
    core.add(GenerateRequest("fails", (*shared, 51), long))
    got += [t for output in core.step() if output.request_key == "goes on" for t in output.token_ids]
    failing = next(s for s in core.scheduler.running if s.request.request_key == "fails")
    core.executor.poison = {failing.seq_id}
    while core.has_work:
        for output in core.step():
            if output.request_key == "goes on":
                got += output.token_ids
            if output.error is not None:
                found = manager.find_prefix(failing.pages, [*shared, 52])
                assert found.tokens == 0
                assert not any(manager.tiers.find_tier(GLOBAL, key) for key in failing.pages.keys[:8])
        core.scheduler.check_integrity()
    assert got == greedy([*shared, 50], 30, ignore_eos=True)
    assert serve(core, "after", [*shared, 53]).finish_reason is FinishReason.LENGTH


class Gate(Files):
    """Writes of slabs wait until `opened`."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.waiting = threading.Event()

    def pwritev(self, fd, buffers, offset):
        if not self.opened.is_set():
            self.waiting.set()
        assert self.opened.wait(60)
        return super().pwritev(fd, buffers, offset)


def test_a_page_that_is_condemned_while_it_is_written_to_disk_is_not_there_after_a_restart(tmp_path):
    gate = Gate()
    tier = {"disk_path": str(tmp_path / "kv"), "disk_bytes": 40 << 20, "disk_free_bytes": 0}
    kv = KVSettings(host_bytes=2000 * 4096, salt="s", **tier)
    with mock.patch.object(open_tiers, "DISK_THREADS", 1):
        core = make_core(kv=kv, files=gate)
    manager, prompt = core.scheduler.manager, list(range(10, 50))
    gate.opened.clear()
    core.add(GenerateRequest("r", tuple(prompt), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)))
    for _ in range(50):  # a step begins the writes of the pages whose copies have ended
        core.step()
        if gate.waiting.wait(0.2):
            break
    assert gate.waiting.is_set()
    (sequence,) = core.scheduler.running
    assert not sequence.pages.load
    core.executor.poison = {sequence.seq_id}
    assert [o.finish_reason for o in core.step()] == [FinishReason.ERROR]
    gate.opened.set()
    assert manager.tiers.wait_idle(60)
    assert not any(manager.tiers.find_tier(g, key) for g in (GLOBAL, LOCAL) for key in sequence.pages.keys)
    manager.check_integrity()
    core.close()
    shutil.copytree(tmp_path / "kv", tmp_path / "copy")
    core = make_core(kv=kv)
    disk = core.scheduler.manager.tiers.disk
    assert not any(disk.find_copy(g, key) for g in (GLOBAL, LOCAL) for key in sequence.pages.keys)
    core.close()
