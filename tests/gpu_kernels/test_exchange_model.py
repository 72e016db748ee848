"""The protocol of `kernels.exchange` step by step, on memory as weak as that between GPUs.

Random orders of loads, and of stores on their way, find every planted race and none in the protocol as it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

RANKS, ITEMS, EXCHANGES, MOST_STEPS = 2, 2, 7, 4000
Place = tuple[Any, ...]


@dataclass(frozen=True)
class Protocol:
    """What a mutant changes. `early_clear`: a slot is cleared when its launch begins, not behind its reading.
    `flags_last`: a flag follows what was written before it. `meets`: a pull waits."""

    halves: int = 2
    buffers: int = 2
    early_clear: bool = False
    flags_last: bool = True
    meets: bool = True


@dataclass
class Memory:
    """Blocks of all ranks. A store is on its way for any time, and stores to different places overtake each other; a
    releasing one waits for all of its rank before it. A launch's end waits for its stores to its own block alone."""

    chance: random.Random
    values: dict[tuple[int, Place], int] = field(default_factory=dict)
    on_way: list[tuple[int, int, Place, int, bool]] = field(default_factory=list)

    def store(self, writer: int, owner: int, place: Place, value: int, *, release: bool = False) -> None:
        self.on_way.append((writer, owner, place, value, release))

    def load(self, reader: int, owner: int, place: Place) -> int:
        own = [v for w, o, p, v, _ in self.on_way if (w, o, p) == (reader, owner, place)]
        return own[-1] if own else self.values.get((owner, place), 0)

    def deliver(self, number: int) -> None:
        """Let a store arrive, unless it must wait for one in front of it."""
        writer, owner, place, value, release = self.on_way[number]
        before = [s for s in self.on_way[:number] if s[0] == writer]
        if not any(release or s[1:3] == (owner, place) for s in before):
            self.values[owner, place] = value
            del self.on_way[number]

    def end_launch(self, rank: int) -> None:
        while own := [n for n, s in enumerate(self.on_way) if s[:2] == (rank, rank)]:
            self.deliver(own[0])


def value_of(rank: int, number: int, item: int) -> int:
    return 1 + rank + 10 * item + 100 * number


def push(memory: Memory, protocol: Protocol, rank: int, number: int, count: int) -> Iterator[None]:
    peer, half = 1 - rank, count % protocol.halves
    if protocol.early_clear:
        for item in range(ITEMS):
            memory.store(rank, rank, ("slot", half, item), 0)
            yield
    for item in range(ITEMS):
        memory.store(rank, peer, ("slot", half, item), value_of(rank, number, item))
        yield
    for item in range(ITEMS):
        while not (found := memory.load(rank, rank, ("slot", half, item))):
            yield
        assert found == value_of(peer, number, item), "another push's row"
        if not protocol.early_clear:
            memory.store(rank, rank, ("slot", half, item), 0)
        yield
    memory.end_launch(rank)


def pull(memory: Memory, protocol: Protocol, rank: int, number: int, count: int) -> Iterator[None]:
    peer, buffer = 1 - rank, count % protocol.buffers
    for item in range(ITEMS):
        memory.store(rank, rank, ("product", buffer, item), value_of(rank, number, item))
        yield
        if not protocol.flags_last and not item:
            memory.store(rank, peer, ("flag",), count + 1)
    memory.end_launch(rank)
    if protocol.flags_last:
        memory.store(rank, peer, ("flag",), count + 1, release=True)
    while protocol.meets and memory.load(rank, rank, ("flag",)) < count + 1:
        yield
    for item in range(ITEMS):
        found = memory.load(rank, peer, ("product", buffer, item))
        assert found == value_of(peer, number, item), "a product that is not there yet, or no more"
        yield
    memory.end_launch(rank)


def run_rank(memory: Memory, protocol: Protocol, rank: int, ways: str) -> Iterator[None]:
    counts = dict.fromkeys("<>", 0)
    for number, way in enumerate(ways):
        yield from (push if way == ">" else pull)(memory, protocol, rank, number, counts[way])
        counts[way] += 1


def run_model(protocol: Protocol, seed: int) -> None:
    """One order of everything. AssertionError for wrong values and for ranks that wait for ever."""
    chance = random.Random(seed)
    ways, memory = "".join(chance.choices("<>", k=EXCHANGES)), Memory(chance)
    ranks = [run_rank(memory, protocol, rank, ways) for rank in range(RANKS)]
    weights, steps = chance.choice([(1, 1, 1), (8, 1, 1), (1, 8, 2), (4, 4, 1)]), 0
    while ranks:
        steps += 1
        assert steps < MOST_STEPS, "ranks wait for ever"
        turn = chance.choices(range(3), weights)[0]
        if turn == 2 or turn >= len(ranks):
            if memory.on_way:
                memory.deliver(chance.randrange(len(memory.on_way)))
            continue
        try:
            next(ranks[turn])
        except StopIteration:
            del ranks[turn]


def find_race(protocol: Protocol, runs: int) -> str | None:
    for seed in range(runs):
        try:
            run_model(protocol, seed)
        except AssertionError as error:
            return str(error)
    return None


def test_the_protocol_has_no_race() -> None:
    assert find_race(Protocol(), 500) is None


@pytest.mark.parametrize(
    "change", [{"halves": 1}, {"early_clear": True}, {"buffers": 1}, {"flags_last": False}, {"meets": False}], ids=str
)
def test_planted_races_are_found(change: dict[str, Any]) -> None:
    assert find_race(replace(Protocol(), **change), 500) is not None
