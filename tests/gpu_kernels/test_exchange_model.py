"""The protocol of `kernels.exchange` step by step, on memory as weak as that between GPUs.

Random orders of loads, and of stores on their way, find every planted race and none in the protocol as it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

ITEMS, EXCHANGES, MOST_STEPS = 2, 7, 20_000
Place = tuple[Any, ...]


@dataclass(frozen=True)
class Protocol:
    """What a mutant changes. `early_clear`: a slot is cleared when its launch begins, not behind its reading.
    `flags_last`: a flag follows what was written before it. `meets`: who reads products waits; `meets_again`: who reads
    norms."""

    halves: int = 2
    buffers: int = 2
    early_clear: bool = False
    flags_last: bool = True
    meets: bool = True
    meets_again: bool = True


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


@dataclass
class Rank:
    """One rank of `ranks`, whose exchanges yield between steps; `turn` counts products, `epoch` meetings."""

    memory: Memory
    protocol: Protocol
    rank: int
    ranks: int
    turn: int = 0
    epoch: int = 0
    pushes: int = 0

    def __post_init__(self) -> None:
        self.peers = [rank for rank in range(self.ranks) if rank != self.rank]

    def run(self, ways: str) -> Iterator[None]:
        for number, way in enumerate(ways):
            yield from {">": self.push, "<": self.pull, "o": self.own}[way](number)
            self.memory.end_launch(self.rank)

    def value_of(self, sender: int, number: int, item: int) -> int:
        return 1 + sender + 10 * item + 100 * number

    def load(self, place: Place, owner: int | None = None) -> int:
        return self.memory.load(self.rank, self.rank if owner is None else owner, place)

    def store(self, owner: int, place: Place, value: int, *, release: bool = False) -> None:
        self.memory.store(self.rank, owner, place, value, release=release)

    def push(self, number: int) -> Iterator[None]:
        half, early = self.pushes % self.protocol.halves, self.protocol.early_clear
        self.pushes += 1
        slots = [(peer, item, ("slot", half, peer, item)) for item in range(ITEMS) for peer in self.peers]
        for _, _, slot in slots if early else ():
            self.store(self.rank, slot, 0)
            yield
        for peer, item, _ in slots:
            self.store(peer, ("slot", half, self.rank, item), self.value_of(self.rank, number, item))
            yield
        for peer, item, slot in slots:
            while not (found := self.load(slot)):
                yield
            assert found == self.value_of(peer, number, item), "another push's row"
            if not early:
                self.store(self.rank, slot, 0)
            yield

    def pull(self, number: int) -> Iterator[None]:
        yield from self.write_product(number)
        for item in range(ITEMS):
            self.sum_item(number, item)
            yield

    def own(self, number: int) -> Iterator[None]:
        yield from self.write_product(number)
        for item in range(ITEMS):
            if item % self.ranks == self.rank:
                self.sum_item(number, item)
                for owner in range(self.ranks):
                    self.store(owner, ("norm", item), self.value_of(0, number, item))
                    yield
        self.memory.end_launch(self.rank)
        if self.protocol.meets_again:
            yield from self.meet()
        for item in range(ITEMS):
            assert self.load(("norm", item)) == self.value_of(0, number, item), "a norm that is not there"
            yield

    def write_product(self, number: int) -> Iterator[None]:
        self.turn += 1
        for item in range(ITEMS):
            place = ("product", self.turn % self.protocol.buffers, item)
            self.store(self.rank, place, self.value_of(self.rank, number, item))
            yield
            if not self.protocol.flags_last and not item:
                self.send_flags()
        self.memory.end_launch(self.rank)
        if self.protocol.meets:
            yield from self.meet(sent=not self.protocol.flags_last)

    def sum_item(self, number: int, item: int) -> None:
        for sender in range(self.ranks):
            found = self.load(("product", self.turn % self.protocol.buffers, item), sender)
            assert found == self.value_of(sender, number, item), "a product that is not there yet, or no more"

    def meet(self, *, sent: bool = False) -> Iterator[None]:
        if not sent:
            self.send_flags()
        self.epoch += 1
        while any(self.load(("flag", peer)) < self.epoch for peer in self.peers):
            yield

    def send_flags(self) -> None:
        for peer in self.peers:
            self.store(peer, ("flag", self.rank), self.epoch + 1, release=self.protocol.flags_last)


def run_model(protocol: Protocol, seed: int) -> None:
    """One order of everything. AssertionError for wrong values and for ranks that wait for ever."""
    chance = random.Random(seed)
    ways, memory, count = "".join(chance.choices("<>o", k=EXCHANGES)), Memory(chance), chance.choice((2, 2, 3))
    ranks, steps = [Rank(memory, protocol, rank, count).run(ways) for rank in range(count)], 0
    weights = [chance.choice((1, 1, 4, 8)) for _ in range(count + 1)]
    while ranks:
        steps += 1
        assert steps < MOST_STEPS, "ranks wait for ever"
        turn = chance.choices(range(count + 1), weights)[0]
        if turn >= len(ranks):
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
    "change",
    [
        {"halves": 1},
        {"early_clear": True},
        {"buffers": 1},
        {"flags_last": False},
        {"meets": False},
        {"meets_again": False},
    ],
    ids=str,
)
def test_planted_races_are_found(change: dict[str, Any]) -> None:
    assert find_race(replace(Protocol(), **change), 500) is not None
