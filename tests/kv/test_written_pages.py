"""Sequences pass over written pages alone, by own steps or by a load. Splits, tight pools, windows alone (I2)."""

from __future__ import annotations

import random

import pytest
from campaign import Shape, Stack
from fakes import clear_cache, greedy, make_core

from wicore_trt.config import KVSettings
from wicore_trt.errors import UnwrittenPageError
from wicore_trt.kv.manager import CacheOptions, KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.pool import PagePool
from wicore_trt.kv.prefix.rates import TierMeter, TierRate
from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.kv.tiers import up
from wicore_trt.kv.tiers.load import LoadItem, PrefixLoad
from wicore_trt.kv.tiers.moves import Fetch
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.schedule.sequence import StepSchedule
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
STALE = b"stale!!!"


def run(core, *, steps: int = 5000, loads_first: bool = True) -> dict[str, list[int]]:
    """Step until nothing lives; the tokens by request. `loads_first`: what was asked for comes before a step begins."""
    got: dict[str, list[int]] = {}
    tiers = core.scheduler.manager.tiers
    for _ in range(steps):
        while loads_first and tiers.loads.loads:
            tiers.wait_for_report(0.01)
            tiers.poll_all()
        if not core.has_work:
            while core.do_housekeeping():
                core.scheduler.manager.tiers.wait_for_report(0.01)
            return got
        for output in core.step():
            assert output.error is None, output.error
            got.setdefault(output.request_key, []).extend(output.token_ids)
    raise AssertionError("stuck")


def ask(core, name: str, prompt: list[int], *, loads_first: bool = True) -> list[int]:
    core.add(GenerateRequest(name, tuple(prompt), GREEDY))
    return run(core, loads_first=loads_first)[name]


def forget_device(core) -> None:
    """Nothing is cached on the device, whose slots hold another request's values."""
    manager = core.scheduler.manager
    tiers, manager.tiers = manager.tiers, None
    clear_cache(manager)
    manager.tiers = tiers
    for slots in core.executor.memory.values():
        for page in slots:
            page[:] = [STALE] * len(page)


def measured(core, tokens_per_s: float, load_s: float) -> None:
    """What the meters may well say, as a machine once was: a load of a few kilobytes takes `load_s`."""
    scheduler = core.scheduler
    scheduler.prefill.__init__()
    scheduler.prefill.observe_step([(0, 64)], 64 / tokens_per_s)
    loader = scheduler.loader
    loader.host_meter = TierMeter(TierRate(3200 / load_s, 1e-6))


@pytest.mark.parametrize("seed", range(12))
def test_a_split_load_that_ends_early_passes_over_nothing(seed):
    """All pages that were asked for are there before the sequence has computed up to the first of them."""
    rng = random.Random(seed)
    window, batch = rng.choice([5, 8, 30]), rng.choice([8, 16, 48])
    core = make_core(
        pages={GLOBAL: 256, LOCAL: 256}, page_tokens=4, window=window, max_batch_tokens=batch, max_context=512,
        kv=KVSettings(host_bytes=2000 * 4096),
    )  # fmt: skip
    prompt = [rng.randrange(2, 97) for _ in range(rng.randint(200, 400))]
    ask(core, "fill", prompt)
    starts: list[int] = []
    begin = core.scheduler.loader.begin_load

    def begun(pages, chosen, **room):
        starts.append(chosen.start)
        return begin(pages, chosen, **room)

    core.scheduler.loader.begin_load = begun
    for turn in range(3):
        forget_device(core)
        measured(core, 1000.0, rng.choice([0.05, 0.1, 0.15]))  # a split, of which loading ends at once
        prompt = [*prompt, 2 + turn]
        assert ask(core, f"again{turn}", prompt) == greedy(prompt, 3, ignore_eos=True)
    assert any(starts), "no plan was a split"
    assert not core.scheduler.loader.refused


@pytest.mark.parametrize("seed", range(6))
def test_a_page_that_comes_wrong_spoils_nothing_that_was_computed(seed, monkeypatch):
    """The device says only afterwards that what came into a slot was another page."""
    monkeypatch.setattr(up, "IN_MEMORY", 1)  # pages come one by one, beside steps that end amid a page
    rng = random.Random(seed)
    core = make_core(
        pages={GLOBAL: 256, LOCAL: 256}, page_tokens=4, window=8, max_batch_tokens=5, max_context=512,
        kv=KVSettings(host_bytes=2000 * 4096),
    )  # fmt: skip
    device, passed, noticed = core.executor, [], []
    seen, out, into, pass_over = device.digest, device.to_host, device.to_device, PrefixLoad._skip_item

    def begun(slot):
        tables = [(s.computed, s.pages.tables[GLOBAL]) for s in core.scheduler.running]
        return any(slot in table and table.index(slot) * 4 < computed for computed, table in tables)

    def to_device(group, slots, pages, done):
        for slot, parts in zip(slots, pages, strict=True):
            wrong = rng.random() < 0.02 or (group == GLOBAL and begun(slot))
            into(group, [slot], [[memoryview(rng.randbytes(len(parts[0])))] if wrong else parts], lambda *_: None)
            noticed.extend([wrong] * wrong)
            done([rng.randbytes(16) if wrong else seen(parts)], 0.0)

    device.checks, device.to_device = True, to_device
    device.to_host = lambda group, slot, parts, done, **_: out(group, slot, parts, lambda *_: done(seen(parts), 0.0))
    monkeypatch.setattr(PrefixLoad, "_skip_item", lambda load, item: (passed.append(item), pass_over(load, item)))
    prompt = [rng.randrange(2, 97) for _ in range(300)]
    for turn in range(8):
        forget_device(core)
        measured(core, 1000.0, rng.choice([0.05, 0.1]))
        prompt = [*prompt, 2 + turn]
        assert ask(core, f"turn{turn}", prompt, loads_first=False) == greedy(prompt, 3, ignore_eos=True)
    assert noticed and passed and not core.scheduler.loader.refused


def test_a_page_that_was_begun_is_computed_to_its_end():
    items = [LoadItem(make_page(bytes([i]) * 32, index=i), i) for i in (4, 3, 2)]
    load = PrefixLoad(20, 5, items, first=2)
    for _ in range(2):
        load.in_flight += 1
        load.note_arrival([load.take_next_item()], "host")
    load.floor = 3  # a token of page 2 is computed
    assert load.take_next_item() is None and load.finished and not load.failed
    assert load.meeting_page() == 3


def test_what_was_never_asked_for_is_not_here():
    load = PrefixLoad(400, 100, [], first=32)
    assert load.complete and load.meeting_page() == 32


def test_a_jump_over_unwritten_pages_is_refused(caplog):
    """The last line: whatever a load believes, pages that nobody brought are not jumped over."""
    core = make_core(
        pages={GLOBAL: 256, LOCAL: 256}, page_tokens=4, window=8, max_batch_tokens=16, max_context=512,
        kv=KVSettings(host_bytes=2000 * 4096),
    )  # fmt: skip
    prompt = [2 + i * 7 % 90 for i in range(300)]
    ask(core, "fill", prompt)
    forget_device(core)
    measured(core, 1000.0, 0.1)
    loader = core.scheduler.loader
    begin = loader.begin_load

    def begun(pages, chosen, **room):
        done = begin(pages, chosen, **room)
        if pages.load is not None:
            pages.load.first = 0  # a defect as it was
        return done

    loader.begin_load = begun
    assert ask(core, "again", [*prompt, 5]) == greedy([*prompt, 5], 3, ignore_eos=True)
    assert loader.refused == 1 and "nobody wrote" in caplog.text


def test_a_slot_takes_tokens_in_order_and_is_published_when_it_is_full():
    pool = PagePool(2, 4)
    (slot,) = pool.allocate_slots(1)
    with pytest.raises(UnwrittenPageError, match=r"Tokens \[1, 2\) were written into a page that has 0 tokens"):
        pool.write_tokens(slot, 1, 2)
    pool.write_tokens(slot, 0, 3)
    with pytest.raises(UnwrittenPageError, match="with 3 tokens written"):
        pool.publish_slots([slot], [make_page(b"a")])
    pool.write_tokens(slot, 2, 4)
    assert pool.publish_slots([slot], [make_page(b"a")])
    with pytest.raises(UnwrittenPageError, match="published"):
        pool.write_tokens(slot, 3, 4)
    pool.release_slots([slot])
    (again, _) = pool.allocate_slots(2)
    assert pool.written[again] == 0, "a new holder has written nothing"


def make_page(key: bytes, index: int = 0):
    from wicore_trt.kv.pages.page import Page

    return Page(key, GLOBAL, index, None, b"")


def test_a_step_over_unwritten_tokens_ends_its_sequence_alone():
    core = make_core(pages={GLOBAL: 64, LOCAL: 64}, max_batch_tokens=18)
    core.executor._check = lambda piece, end: None  # the device does not notice
    core.add(GenerateRequest("broken", tuple(range(10, 30)), GREEDY))
    core.add(GenerateRequest("fine", tuple(range(30, 50)), GREEDY))
    core.step()
    broken = next(s for s in core.scheduler.running if s.request.request_key == "broken")
    (slot,) = core.scheduler.manager.pools[GLOBAL].allocate_slots(1)
    broken.pages.tables[GLOBAL][broken.computed // 4] = slot  # a page that nobody wrote
    ends = {}
    while core.has_work:
        for output in core.step():
            if output.finish_reason is not None:
                ends[output.request_key] = output.finish_reason
    assert ends == {"broken": FinishReason.ERROR, "fine": FinishReason.LENGTH}


@pytest.mark.parametrize("seed", range(6))
def test_a_lone_sequence_never_preempts_itself_for_its_own_load(seed):
    """Pools as small as `fits` takes; the load holds the window's pages while the sequence computes from the front."""
    rng = random.Random(seed)
    size, window, batch = 4, rng.choice([8, 32]), rng.choice([8, 16])
    local = next(n for n in range(1, 200) if fitting(n, window, batch, size))
    core = make_core(
        pages={GLOBAL: 100, LOCAL: local}, page_tokens=size, window=window, max_batch_tokens=batch, max_context=400,
        kv=KVSettings(host_bytes=4000 * 4096),
    )  # fmt: skip
    prompt = [rng.randrange(2, 97) for _ in range(300)]
    ask(core, "fill", prompt)
    forget_device(core)
    measured(core, 1000.0, 0.1)
    begun = core.scheduler.loader.decisions.total()
    assert ask(core, "again", [*prompt, 5]) == greedy([*prompt, 5], 3, ignore_eos=True)
    assert core.scheduler.preemptions == 0 and core.scheduler.loader.decisions.total() == begun + 1


def fitting(local: int, window: int, batch: int, size: int) -> bool:
    core = make_core(
        pages={GLOBAL: 100, LOCAL: local}, page_tokens=size, window=window, max_batch_tokens=batch, max_context=400,
        kv=KVSettings(host_bytes=4000 * 4096),
    )  # fmt: skip
    return core.scheduler.manager.can_run(400, batch)


def test_a_load_that_takes_the_last_local_pages_is_given_up_not_begun_again():
    """Pools below what `fits` takes, so that the next chunk finds no page beside the load's window."""
    core = make_core(
        pages={GLOBAL: 100, LOCAL: 11}, page_tokens=4, window=32, max_batch_tokens=8, max_context=400,
        kv=KVSettings(host_bytes=4000 * 4096),
    )  # fmt: skip
    prompt = [2 + i * 7 % 90 for i in range(300)]
    ask(core, "fill", prompt)
    forget_device(core)
    loader, scheduler = core.scheduler.loader, core.scheduler
    scheduler._spare_for_load = lambda sequence: 0  # begin all the same
    measured(core, 1000.0, 0.1)
    loader.tiers.up.fetch_page = Fetch  # what is asked for never arrives
    assert ask(core, "again", [*prompt, 5], loads_first=False) == greedy([*prompt, 5], 3, ignore_eos=True)
    assert scheduler.preemptions == 0


@pytest.mark.parametrize("seed", range(8))
def test_windows_alone_lose_no_page_below_what_is_computed(seed, tmp_path):
    """A model of local layers alone: a load brings a window, however far the sequence has computed meanwhile."""
    stack = Stack(tmp_path, seed=seed, shape=Shape(pages={LOCAL: 60}, window=13), host_slots=300)
    stack.core.scheduler.prefill.__init__()
    for _ in range(6):
        stack.serve(4)
        stack.forget_device()
        stack.core.scheduler.prefill.observe_step([(0, 64)], 64 / stack.rng.choice([1.0, 1e3, 1e5]))
    stack.check_idle()
    assert stack.wrong == 0
    stack.close()


def test_what_a_request_has_cached_counts_once_though_it_loses_its_pages():
    """Preempted behind its load, before its first token, it loads the same prefix again."""
    core = make_core(kv=KVSettings(host_bytes=4000 * 4096), max_batch_tokens=4)
    prompt = [2 + i * 7 % 90 for i in range(100)]
    ask(core, "fill", prompt[:80])
    forget_device(core)
    measured(core, 1.0, 1e-6)
    scheduler = core.scheduler
    core.add(GenerateRequest("again", tuple(prompt), GREEDY))
    outputs = core.step()
    (sequence,) = scheduler.running
    while sequence.computed < 80:
        outputs += core.step()
    assert not outputs and sequence.cached == 80
    scheduler.loader.parking.park_sequence = lambda pages, computed: False  # no room in the host
    scheduler._preempt_sequence(sequence, StepSchedule())
    forget_device(core)
    while core.has_work:
        outputs += core.step()
    assert scheduler.loader.decisions.total() - scheduler.loader.decisions["compute"] == 2, "it did not load twice"
    assert outputs[-1].usage.cached_tokens == 80


@pytest.mark.parametrize("decoding", [0, 3, 8, 13])
def test_a_newcomers_share_of_the_device_is_what_a_step_leaves(decoding):
    """The planner's bound is on the time that recomputing takes, which is a little more beside others that decode."""
    core = make_core(max_sequences=20)
    for i in range(decoding):
        core.add(GenerateRequest(f"r{i}", (5, 6, 7 + i), SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)))
    for _ in range(6):
        core.step()
    scheduler = core.scheduler
    assert len(scheduler.running) == decoding and all(s.remaining_tokens == 1 for s in scheduler.running)
    scheduler.prefill.__init__()
    rate = scheduler.estimates.rate_behind(scheduler.running)
    steps = 320 / (scheduler.max_batch_tokens - decoding)
    alone = rate.seconds_alone(0, 320)
    assert rate.shared_seconds(0, 320) == pytest.approx(alone * steps * scheduler.max_batch_tokens / 320)


def test_windows_within_prompts_do_not_crowd_out_those_at_their_ends():
    """Six prompts of which each leaves four windows, in a local pool that holds ten."""
    core = make_core(
        pages={GLOBAL: 400, LOCAL: 10 * 3 + 14}, page_tokens=4, window=8, max_batch_tokens=32, max_context=256,
        checkpoint_tokens=32,
    )  # fmt: skip
    prompts = [[2 + (i * 31 + k) % 95 for i in range(128)] for k in range(6)]
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for turn in range(3):
        for k, prompt in enumerate(prompts):
            core.add(GenerateRequest(f"{turn}-{k}", tuple(prompt), one))
            while core.has_work:
                for output in core.step():
                    assert not turn or output.usage.cached_tokens == 124, (turn, k)


def test_nothing_arrives_behind_a_step_under_way_while_a_sequence_loads():
    """A page that came between a step's start and the next one would be copied into a slot that both use."""
    core = make_core(pages={GLOBAL: 100, LOCAL: 40}, page_tokens=4, window=8, kv=KVSettings(host_bytes=1 << 20))
    scheduler, tiers = core.scheduler, core.scheduler.manager.tiers
    core.add(GenerateRequest("a", (5, 6, 7), GREEDY))
    schedule = scheduler.schedule_step()
    polled, poll = [], tiers.poll_up
    tiers.poll_up = lambda: polled.append(True) or poll()
    assert scheduler.schedule_ahead(schedule) is not None and polled
    scheduler.running[0].pages.load = PrefixLoad(8, 2, [])
    polled.clear()
    assert scheduler.schedule_ahead(schedule) is None and not polled


def test_waiting_applies_all_that_was_reported_and_checks_it_at_once():
    core = make_core(pages={GLOBAL: 400, LOCAL: 400}, page_tokens=4, window=8, kv=KVSettings(host_bytes=4000 * 4096))
    prompt = [2 + i * 7 % 90 for i in range(600)]
    tiers = core.scheduler.manager.tiers
    jobs, submit = [], tiers.movers.checker.submit
    tiers.movers.checker.submit = lambda run, moves: (jobs.append(len(moves)), submit(run, moves))
    ask(core, "fill", prompt)
    jobs.clear()
    pages = [Page(bytes([i]) * 32, GLOBAL, i, None, b"t") for i in range(100)]
    copies = [tiers.down.store_page(page, i, private=True) for i, page in enumerate(pages)]
    assert core.scheduler.manager.tiers.pin_copies(copies) and jobs == [100]
    tiers.host.release_copies(copies)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_room_for_the_next_tokens_of_all_or_of_none(seed, shared):
    rng, slab = random.Random(seed), {GLOBAL: 5, LOCAL: 2}
    counts = {group: 4 * count for group, count in slab.items()} if shared else {GLOBAL: 14, LOCAL: 14}
    manager = KVCacheManager(counts, 8, KeyChain("e", 4), options=CacheOptions(slab_pages=slab if shared else None))
    every = [SequencePages(manager.chain.derive_names("", "")) for _ in range(4)]
    sizes, refused = [0] * 4, False
    while not refused:
        wanted = {i: sizes[i] + rng.randrange(9) for i in rng.sample(range(4), rng.randint(0, 4))}
        before = [{group: [*table] for group, table in pages.tables.items()} for pages in every]
        room = manager.memory.free_counts
        if manager.extend_tables(
            [(every[i], dict.fromkeys(manager.pools, manager.count_pages(tokens))) for i, tokens in wanted.items()]
        ):
            sizes = [wanted.get(i, size) for i, size in enumerate(sizes)]
        else:
            refused = True
            assert manager.memory.free_counts == room
            assert before == [{group: [*table] for group, table in pages.tables.items()} for pages in every]
        for group, pool in manager.pools.items():
            held = [slot for pages in every for slot in pages.tables[group]]
            assert len(held) == len(set(held)) == pool.used_slots
            assert [len(pages.tables[group]) for pages in every] == [-(-size // 4) for size in sizes]
        manager.check_integrity()
