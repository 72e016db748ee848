"""What goes down is begun, and its books are kept, while a step runs; between steps only what loads wait for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fakes import greedy, make_core

from wicore_trt.config import KVSettings
from wicore_trt.core.engine import EngineCore
from wicore_trt.kv import copy_down
from wicore_trt.kv.prefix.loader import WAIT
from wicore_trt.kv.tiers.down import DownTransfers
from wicore_trt.kv.tiers.up import ASKED_FIRST
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import GenerateRequest, SamplingParams


def core_of(monkeypatch: pytest.MonkeyPatch) -> tuple[EngineCore, list[tuple[str, bool]]]:
    """An engine, and what happened: whether a step was under way then."""
    sizes, kv = {"page_tokens": 4, "window": 8, "max_context": 512}, KVSettings(host_bytes=4000 * 4096)
    core = make_core(pages={GLOBAL: 400, LOCAL: 400}, max_batch_tokens=128, ahead=5, kv=kv, **sizes)
    device, seen, under_way = core.executor, [], [False]
    submit, collect, to_host, apply = device.submit, device.collect, device.to_host, DownTransfers.apply_copied

    def submitted(batch):
        submit(batch)
        under_way[0] = True

    def collected():
        found = collect()
        under_way[0] = bool(device.queue or device.results)
        return found

    def copied(*args, **flags):
        seen.append(("copy", under_way[0]))
        to_host(*args, **flags)

    def applied(*args):
        seen.append(("books", under_way[0]))
        apply(*args)

    monkeypatch.setattr(device, "submit", submitted)
    monkeypatch.setattr(device, "collect", collected)
    monkeypatch.setattr(device, "to_host", copied)
    monkeypatch.setattr(DownTransfers, "apply_copied", applied)
    return core, seen


def test_what_goes_down_is_looked_after_beside_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    core, seen = core_of(monkeypatch)
    rng, params = random.Random(3), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    for name in "ab":
        core.add(GenerateRequest(name, tuple(rng.randrange(2, 97) for _ in range(200)), params))
    while core.has_work:
        core.step()
        if core.has_work:
            assert all(beside for _, beside in seen), "the device waited for the books"
    core.do_housekeeping()
    assert {what for what, _ in seen} == {"copy", "books"} and len(seen) > 200
    host = core.scheduler.manager.tiers.host
    assert core.scheduler.manager.tiers.wait_idle(60) and host.pages[GLOBAL] == 2 * (239 // 4)
    core.close()


def test_a_short_step_begins_few_copies_and_a_long_one_as_many_as_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_down, "COPIES_AT_ONCE", 3)
    core, seen = core_of(monkeypatch)
    rng, params = random.Random(4), SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    core.add(GenerateRequest("a", tuple(rng.randrange(2, 97) for _ in range(100)), params))
    counts = []
    while core.has_work:
        before = seen.count(("copy", True))
        core.step()
        counts.append(seen.count(("copy", True)) - before)
    assert 3 in counts and max(counts) <= 3 + 100 // copy_down.TOKENS_A_COPY
    while core.do_housekeeping():
        pass
    assert len(core.scheduler.manager.copies.due) == 0
    core.close()


def test_memory_is_taken_slowly_while_there_is_work() -> None:
    core = make_core(pages={GLOBAL: 40, LOCAL: 40}, page_tokens=4, window=8, kv=KVSettings(host_bytes=400 * 4096))
    backing = core.scheduler.manager.tiers.backing
    assert not backing.working()
    core.add(GenerateRequest("a", (5, 6, 7), SamplingParams(max_tokens=2, ignore_eos=True)))
    assert backing.working()
    while core.has_work:
        core.step()
    assert not backing.working()
    core.close()


def test_what_breaks_beside_a_step_lets_it_land_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next step would be taken for it."""
    core, _ = core_of(monkeypatch)
    core.add(GenerateRequest("a", tuple(range(5, 85)), SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)))
    while core._flight is None:
        core.step()
    landed, following, land = [], core._flight, core._land_step

    def breaks(tokens: int) -> None:
        raise RuntimeError("copies failed")

    monkeypatch.setattr(core, "_land_step", lambda flight: (landed.append(flight), land(flight))[1])
    monkeypatch.setattr(core.scheduler.manager, "work_beside_step", breaks)
    with pytest.raises(RuntimeError, match="copies failed"):
        core.step()
    assert landed == [following]
    core.close()


def test_a_page_that_no_finite_step_has_read_leaves_no_copy_when_it_loses_its_slot(monkeypatch) -> None:
    """With policy `back` an eviction is the last chance: NaN of a broken step must not have it."""
    monkeypatch.setattr(copy_down, "DEVICE_THRESHOLD", 1.0)
    kv = KVSettings(host_bytes=400 * 4096, write_policy="back")
    core = make_core(pages={GLOBAL: 24, LOCAL: 40}, page_tokens=4, window=8, max_batch_tokens=32, kv=kv)
    manager, params = core.scheduler.manager, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    pool, kept, lost = manager.pools[GLOBAL], set(), []
    store, evict = manager.tiers.down.store_page, manager.copies.copy_evicted
    manager.tiers.down.store_page = lambda page, slot: (kept.add(page.key), store(page, slot))
    manager.copies.copy_evicted = lambda group, page, slot: (lost.append(page.key), evict(group, page, slot))
    core.add(GenerateRequest("broken", (7,) * 80, params))
    core.step()
    core.abort("broken")
    unread = {page.key for page, read in zip(pool.page_of, pool.trusted, strict=True) if page and not read}
    assert len(unread) == 32 // 4
    for number in (2, 3, 4):
        core.add(GenerateRequest(str(number), (number,) * 80, params))
        while core.has_work:
            core.step()
    assert unread <= {*lost} and not unread & kept, "they were evicted, and never copied"
    assert len(kept & {*lost}) >= 80 // 4, "what a finite step has read was"
    core.close()


@pytest.mark.parametrize("awaited", [True, False])
def test_others_run_ahead_while_a_sequence_waits_for_its_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    kv = KVSettings(host_bytes=4000 * 4096, disk_path=str(tmp_path / "kv"), disk_bytes=1 << 26, disk_free_bytes=0)
    core = make_core(pages={GLOBAL: 400, LOCAL: 400}, page_tokens=4, window=8, max_context=1024, ahead=5, kv=kv)
    tiers, prompt, executor = core.scheduler.manager.tiers, tuple(range(2, 97)) * 4, core.executor
    one, many = (SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (4, 60))
    core.add(GenerateRequest("a", prompt, one))
    while core.has_work or core.do_housekeeping():
        core.step()
    for copy in list(tiers.host.iterate_copies()):
        tiers.host.drop_copy(copy, "test")
    for pool in core.scheduler.manager.pools.values():
        for page in pool.list_pages():
            pool.drop_page(page.key)
    held, read, loader = [], tiers.store.read_pages, core.scheduler.loader
    monkeypatch.setattr(tiers.store, "read_pages", lambda *args: not held.append(args))
    monkeypatch.setattr(executor, "leads", lambda batch: True)
    monkeypatch.setattr(loader, "is_awaited", lambda pages, computed, step_s: awaited)
    monkeypatch.setattr(loader, "next_move", lambda pages, computed, compute: WAIT)
    core.add(GenerateRequest("b", (5,) * 40, many))
    core.add(GenerateRequest("c", prompt, one))
    for _ in range(20):
        core.step()
    assert core.scheduler.is_loading and held and (executor.led > 10) == awaited
    monkeypatch.undo()
    for args in held:
        assert read(*args)
    found: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            found.setdefault(output.request_key, []).extend(output.token_ids)
        core.scheduler.check_integrity()
    assert found["c"] == greedy(list(prompt), 4, ignore_eos=True)
    core.close()


def test_the_disk_is_asked_for_most_pages_beside_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = KVSettings(host_bytes=4000 * 4096, disk_path=str(tmp_path / "kv"), disk_bytes=1 << 26, disk_free_bytes=0)
    core = make_core(pages={GLOBAL: 400, LOCAL: 400}, page_tokens=4, window=8, max_context=1024, ahead=5, kv=kv)
    tiers, pools, asked = core.scheduler.manager.tiers, core.scheduler.manager.pools, list[bool]()
    prompt, params = tuple(range(2, 97)) * 6, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    core.add(GenerateRequest("a", prompt, params))
    while core.has_work or core.do_housekeeping():
        core.step()
    for copy in list(tiers.host.iterate_copies()):
        tiers.host.drop_copy(copy, "test")
    for pool in pools.values():
        for page in pool.list_pages():
            pool.drop_page(page.key)
    begin, poll, beside = tiers.up._begin_reads, tiers.poll_down, [False]

    def polled(tokens: int) -> None:
        beside[0] = core._flight is not None or tokens > 0
        poll(tokens)
        beside[0] = False

    monkeypatch.setattr(
        tiers.up, "_begin_reads", lambda fetches: asked.extend([beside[0]] * len(fetches)) or begin(fetches)
    )
    monkeypatch.setattr(tiers, "poll_down", polled)
    assert tiers.loads.asked_first == ASKED_FIRST
    tiers.loads.asked_first = 2
    core.add(GenerateRequest("b", (5,) * 40, SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)))
    for _ in range(5):
        core.step()
    core.add(GenerateRequest("c", prompt, params))
    while core.has_work:
        core.step()
    assert core.scheduler.loader.decisions["load"] == 1 and len(asked) > 120
    assert sum(asked) > 0.7 * len(asked), "the device waited for them"
