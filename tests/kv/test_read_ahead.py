"""What is read from disk for whom, and when: prefixes of sequences that wait, and loads that share the disk."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from benchmarks.kv.disk_simulation import Engine, Sizes
from benchmarks.kv.virtual_disk import World
from wicore_trt.kv.prefix.planner import LoadChoice
from wicore_trt.schedule.sequence import SequenceState

DISK = World(((0.0, 1.65e9),))


def tokens(rng, count):
    return [rng.randrange(10, 9999) for _ in range(count)]


def engine_with(*prefixes, decoding=0, world=DISK, **given):
    """An engine whose disk has these prefixes, and so many sequences that are to decode."""
    rng, engine = random.Random(0), Engine(world, rated=1.65e9, **given)
    for prefix in prefixes:
        engine.keep(prefix)
    for _ in range(decoding):
        engine.ask(tokens(rng, 64), output=10_000)
    return engine


def until_decoding(engine, count):
    while sum(s.remaining_tokens == 1 for s in engine.scheduler.running) < count or len(engine.scheduler.waiting):
        engine.step()


@pytest.mark.parametrize("others", [1, 6])
def test_who_enters_with_the_next_step_is_not_read_ahead_of(others):
    """Its own load would find its pages in a queue, as if they came late, and compute."""
    prefix = tokens(random.Random(1), 8192)
    engine = engine_with(prefix, decoding=others)
    with (
        engine.running(),
        mock.patch.object(engine.loader, "prefetch_prefix", wraps=engine.loader.prefetch_prefix) as prefetch,
    ):
        until_decoding(engine, others)
        engine.ask([*prefix, 11, 12])
        engine.step()
        assert not prefetch.called and not len(engine.scheduler.waiting)
        assert (
            engine.loader.decisions.total() == engine.loader.decisions["load"] + engine.loader.decisions["split"] == 1
        )


@pytest.mark.parametrize("leaves", [False, True])
def test_who_waits_for_a_place_finds_its_prefix_in_host_memory_and_one_that_leaves_is_read_no_further(leaves):
    prefix = tokens(random.Random(1), 8192)
    engine = engine_with(prefix, decoding=2, sizes=Sizes(sequences=2))
    with engine.running():
        until_decoding(engine, 2)
        name, asked = engine.ask([*prefix, 11, 12]), engine.events.now
        (waiting,) = engine.scheduler.waiting
        assert waiting.prefetched and waiting.pages.prefetch is not None
        if leaves:
            engine.core.abort(name)
            while engine.events.now < asked + 2.0:
                engine.step()
            assert waiting.state is SequenceState.FINISHED and waiting.pages.prefetch is None
            assert engine.disk.read_bytes < 0.1e9
            return
        while engine.events.now < asked + 1.5:
            engine.step()
        read = engine.disk.read_bytes
        assert read > 1.0e9 and waiting.state is SequenceState.WAITING
        engine.core.abort("r0")
        begun = engine.events.now
        while not any(output.request_key == name and output.token_ids for output in engine.step()):
            pass
        assert engine.events.now - begun < 0.15 and engine.disk.read_bytes == read
        assert waiting.pages.prefetch is None


@pytest.mark.parametrize("choice", [None, LoadChoice(0, 0, 1.0, 1.0, "compute")])
def test_what_is_computed_instead_is_not_read_any_further(choice):
    prefix = tokens(random.Random(1), 16_384)
    engine = engine_with(prefix, decoding=2, world=World(((0.0, 0.2e9),)), sizes=Sizes(sequences=2))
    with engine.running():
        until_decoding(engine, 2)
        name = engine.ask([*prefix, 11, 12])
        engine.step()
        assert engine.tiers.loads.loads
        engine.loader.choose_load = lambda *asked, **more: choice
        engine.core.abort("r0")
        while not any(output.request_key == name and output.token_ids for output in engine.step()):
            pass
        read = engine.disk.read_bytes
        for _ in range(400):
            engine.step()
        assert not engine.tiers.loads.loads and engine.disk.read_bytes <= read + 64e6 < 0.4e9


def reads_of(engine):
    """Names of pages in the order in which the disk is asked for them."""
    asked, read = [], engine.disk.read_pages

    def spied(moves, done):
        asked.extend(move.page.name for move in moves)
        return read(moves, done)

    engine.disk.read_pages = spied
    return asked


@pytest.mark.parametrize("small", [False, True])
def test_loads_have_the_disk_one_after_the_other_and_a_small_one_first(small):
    """Three conversations of 8K are there after 0.7, 1.4 and 2.1 seconds: shared among them the disk would bring none
    before the last. One of 1K passes those that are under way."""
    rng = random.Random(2)
    prefixes = [tokens(rng, 8192) for _ in range(3)] + [tokens(rng, 1024)] * small
    engine = engine_with(*prefixes, sizes=Sizes(sequences=16))
    asked, names = reads_of(engine), []
    engine._decide("load")
    with engine.running():
        for prefix in prefixes:
            names.append(engine.ask([*prefix, 11, 12]))
            engine.step()
        done = {}
        while len(done) < len(prefixes):
            for output in engine.step():
                if output.token_ids:
                    done.setdefault(output.request_key, engine.events.now)
    order = sorted(done, key=done.__getitem__)
    assert order == ([names[3]] if small else []) + names[:3]
    times = [done[name] for name in names[:3]]
    assert times[0] < 0.5 * times[2] and times[1] < 0.8 * times[2]
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("arrived", [0.0, 0.3, 0.7])
def test_a_disk_that_hangs_costs_no_more_than_what_others_gain(arrived):
    """Computing 8K beside seven that decode takes 0.42 s, loading them 0.7. The disk hangs when so much has come."""
    prefix, times = tokens(random.Random(1), 8192), []
    for arm in ("compute", "product"):
        world = World(((0.0, 1.65e9), (1.0 + 0.7 * arrived, 1e3)))
        engine = engine_with(prefix, decoding=7, world=world)
        with engine.running():
            until_decoding(engine, 7)
            while engine.events.now < 1.0:
                engine.step()
            if arm == "compute":
                engine._decide("compute")
            name, asked = engine.ask([*prefix, 11, 12]), engine.events.now
            while not any(output.request_key == name for output in engine.step()):
                pass
            times.append(engine.events.now - asked)
    assert times[1] <= 3.0 * times[0] + 0.1, "and a step"


def test_a_load_that_has_not_asked_yet_expects_to_wait_for_what_others_asked_for():
    """The first of two has all that it may have in the disk's queue: 0.3 seconds of it, which it asks for no more."""
    rng = random.Random(2)
    prefixes = [tokens(rng, 8192) for _ in range(2)]
    engine = engine_with(*prefixes)
    engine._decide("load")
    engine.loader.disk_meter.observe_read(1 << 30, (1 << 30) / 1.65e9, now=0.0)
    with engine.running():
        for prefix in prefixes:
            name = engine.ask([*prefix, 11, 12])
            engine.step()
        load = engine.scheduler.running[1].pages.load
        assert not load.reading and engine.tiers.up.reading_bytes > 0.4e9
        expected = engine.events.now + engine.loader._expect_arrival(load, 0.0)(0)
        while not any(output.request_key == name for output in engine.step()):
            pass
    assert expected == pytest.approx(engine.events.now, abs=0.15)


def test_nobody_expects_to_wait_for_a_load_that_was_just_given_up():
    rng = random.Random(2)
    prefixes = [tokens(rng, 8192) for _ in range(2)]
    engine = engine_with(*prefixes)
    engine._decide("load")
    with engine.running():
        for prefix in prefixes:
            engine.ask([*prefix, 11, 12])
            engine.step()
        first, second = (s.pages.load for s in engine.scheduler.running)
        assert engine.tiers.loads.unasked_bytes(load=second) > 0.2e9
        engine.loader.cancel_load(engine.scheduler.running[0].pages)
        assert first.cancelled and engine.tiers.loads.unasked_bytes(load=second) == 0


def test_beside_one_that_waits_for_its_load_others_compute_in_whole_steps():
    """Steps of a slice (256 tokens) would take the weights' time each: a third of the tokens a second."""
    rng = random.Random(3)
    prefix, fresh = tokens(rng, 8192), tokens(rng, 8192)
    engine = engine_with(prefix, decoding=7, sizes=Sizes(sequences=16))
    with engine.running():
        until_decoding(engine, 7)
        engine.ask([*prefix, 11, 12])
        engine.step()
        (loading,) = [s for s in engine.scheduler.running if s.pages.load is not None]
        begun = len(engine.device.steps)
        engine.ask(fresh)
        for _ in range(4):
            engine.step()
        counts = [sum(n for _, n in slices if n > 1) for _, _, slices in engine.device.steps[begun:]]
        assert loading.computed == 0 and loading.pages.load is not None, "it waits"
        assert sum(counts) >= 4 * 1024
