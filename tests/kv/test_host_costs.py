"""Times of the engine's thread: counted from outside, and given to the simulation."""

from __future__ import annotations

import random

from benchmarks.kv.disk_simulation import Engine, Sizes
from benchmarks.kv.host_costs import COUNTED, Counted, HostCosts, counted
from benchmarks.kv.sessions_simulation import play
from benchmarks.kv.virtual_disk import World

DISK = ((0.0, 20e9),)
SMALL = Sizes(8.0, 4.0, 45.0, sequences=2)


def test_each_second_counts_once_for_the_innermost() -> None:
    rng, now, expected, kinds = random.Random(1), 0.0, dict.fromkeys("abc", 0.0), list[str]()
    found = Counted(lambda: now)
    for _ in range(500):
        if kinds and (len(kinds) > 4 or rng.random() < 0.5):
            kinds.pop()
            found.leave()
        else:
            kinds.append(rng.choice("abc"))
            found.enter(kinds[-1])
        passed = rng.random()
        now += passed
        if kinds:
            expected[kinds[-1]] += passed
    while kinds:
        kinds.pop()
        found.leave()
    assert all(abs(found.seconds[kind] - seconds) < 1e-6 for kind, seconds in expected.items())


def test_costs_that_a_simulation_is_given_are_those_that_are_counted_in_it() -> None:
    """By its own clock: what `paced` prints on a machine is what the simulation means by it."""
    given = HostCosts(step=2.0, prompt=5.0, ask=0.25, land=0.125, store=0.5, launch=9.0)
    engine, rng = Engine(World(DISK, host=given), rated=20e9, sizes=SMALL), random.Random(0)
    prefix = [rng.randrange(10, 9999) for _ in range(4096)]
    engine.keep(prefix)
    with engine.running(), counted(engine.device, clock=engine.events.monotonic, graph_tokens=1536) as host:
        engine.first_tokens([(0.0, [*prefix, 1, 2]), (0.0, [rng.randrange(10, 9999) for _ in range(4096)])])
    assert set(COUNTED) == set(HostCosts.__dataclass_fields__)
    assert host.calls["_begin_reads"] > 100 and host.calls["launch"]
    assert abs(host.costs.ask - given.ask) < 1e-6
    assert abs(host.costs.launch - given.launch - given.step) < 1e-6  # both are in one call


def test_what_the_thread_does_behind_a_step_costs_nothing_until_it_takes_longer_than_the_step() -> None:
    """Steps that decode take the device 11 ms."""

    def seconds(host: HostCosts) -> float:
        rows = play(World(DISK, host=host), SMALL, conversations=4, history=2048, turns=2, seed=1)
        return sum(4 / row["turns/s"] for row in rows)

    free = seconds(HostCosts())
    assert seconds(HostCosts(step=5.0)) < 1.02 * free < 1.5 * free < seconds(HostCosts(step=30.0))
