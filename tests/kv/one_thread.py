"""An engine whose device, copier, disk, checksum thread and clock are one thread's: what a seed does, it does again.

Memory is bytes: a position of a page holds a digest of all tokens up to it, and each step compares all that it may look
at. What is under way happens lane by lane, in an order of chance, whenever the engine looks up; a page that is half
copied holds something else. Pages of both groups may share memory, and have sizes of their own.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b
from queue import Empty
from types import SimpleNamespace
from typing import Any

from fakes import EOS, VOCAB, chain, tiny_spec

from wicore_trt.kv.disk.io import Outcome
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import SampledTokens, StepResult
from wicore_trt.runtime.executor import KVLayout

__all__ = ["EOS", "Checker", "Device", "Disk", "Mailbox", "World", "answer", "page_bytes"]


def entry(group: str, digest: bytes, size: int) -> bytes:
    """What a position of a page holds."""
    return (blake2b(digest, key=group.encode(), digest_size=16).digest() * (size // 16 + 1))[:size]


def digests(tokens: Any) -> list[bytes]:
    found, before = [], b""
    for token in tokens:
        found.append(before := chain(before, token))
    return found


def page_bytes(group: str, tokens: tuple[int, ...], page_tokens: int, size: int) -> bytes:
    """The last page of a prefix."""
    return b"".join(entry(group, digest, size // page_tokens) for digest in digests(tokens)[-page_tokens:])


def following(digest: bytes) -> int:
    return int.from_bytes(digest, "little") % VOCAB


def answer(prompt: list[int], count: int) -> list[int]:
    digest, found = digests(prompt)[-1], []
    for _ in range(count):
        found.append(following(digest))
        digest = chain(digest, found[-1])
    return found


class World:
    """`lanes` of what is under way: each in its order, and which goes on is chance. `seen` counts what happened."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now, self.seen = rng, 1000.0, Counter[str]()
        self.lanes: dict[object, deque[Callable[[], object]]] = {}
        self._odds: dict[object, float] = {}
        self._lively, self._inside = rng.choice([0.1, 0.4, 0.8, 0.97]), False
        self.clock = SimpleNamespace(
            monotonic=lambda: self.now, perf_counter=lambda: self.now, time=lambda: self.now, sleep=self.sleep
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def put(self, lane: object, work: Callable[[], object]) -> None:
        if lane not in self.lanes:
            self.lanes[lane], self._odds[lane] = deque(), self.rng.choice([0.03, 1, 1, 5])
        self.lanes[lane].append(work)

    def one(self) -> bool:
        """Whether anything was under way, of which the next has happened."""
        live = [lane for lane in self.lanes if self.lanes[lane]]
        if live:
            lane = self.rng.choices(live, [self._odds[lane] for lane in live])[0]
            self.now += self.rng.choice([1e-5, 1e-4, 1e-3])
            self.lanes[lane].popleft()()
        return bool(live)

    def pump(self) -> None:
        """Some of it happens."""
        if not self._inside:
            self._inside = True
            while self.rng.random() < self._lively and self.one():
                pass
            self._inside = False


class Mailbox:
    """In place of `SimpleQueue`: the world goes on while somebody waits."""

    def __init__(self, world: World) -> None:
        self._world, self.reports = world, deque[Any]()

    def put(self, report: Any) -> None:
        self.reports.append(report)

    def get_nowait(self) -> Any:
        self._world.pump()
        return self._take()

    def get(self, timeout: float) -> Any:
        end = self._world.now + timeout
        while not self.reports and self._world.now < end and self._world.one():
            pass
        if not self.reports:
            self._world.now = max(self._world.now, end)
        return self._take()

    def _take(self) -> Any:
        if not self.reports:
            raise Empty
        return self.reports.popleft()


class Checker:
    """In place of a pool of one thread."""

    def __init__(self, world: World) -> None:
        self._world = world

    def submit(self, work: Callable[..., object], *args: object) -> None:
        self._world.put("check", lambda: work(*args))

    def shutdown(self, *, wait: bool) -> None:
        while self._world.lanes.get("check"):
            self._world.lanes["check"].popleft()()


class Device:
    """An `Executor` and its `PageCopier`. A page that goes down has left when the call returns, and is in host memory
    later; one that comes up is read late, and some of a run are told at a time. `odds` of a flipped bit on the way.
    `tokens_of` gives all tokens of a sequence; `poison` are sequences whose next logits are not finite."""

    broken = None
    coded_bytes: dict[str, int] = {}
    kernels = "fake"
    max_sequences = None
    score_rows, graph_limits, images = 0, (0, 0), None

    def __init__(self, world: World, layout: KVLayout, window: int, batch: int, slice_tokens: int) -> None:
        self.world, self.layout, self.copier, self._rng = world, layout, self, world.rng
        self.spec = tiny_spec(window, tuple(group for group in (LOCAL, GLOBAL) if group in layout.num_pages))
        self.max_batch_tokens, self.slice_tokens, self.checks = batch, slice_tokens, world.rng.random() < 0.6
        self.odds, self.poison = 0.0, set[int]()
        self.tokens_of: Callable[[int], list[int]] = lambda seq_id: []
        sizes = {group: count * layout.page_bytes[group] for group, count in layout.num_pages.items()}
        one = memoryview(bytearray(layout.memory_bytes))
        shared = layout.slab_pages is not None
        self._memory = {g: one if shared else memoryview(bytearray(size)) for g, size in sizes.items()}
        self.coming = Counter[tuple[str, int]]()
        self._runs: deque[tuple[list[tuple[str, int]], list[Any], Any]] = deque()

    # --- copies --------------------------------------------------------------------------------------------------

    def pin(self, memory: memoryview) -> bool:
        return False

    def digest(self, parts: Any) -> bytes:
        assert all(len(part) % 4096 == 0 for part in parts[:-1])
        return blake2b(b"".join(parts), digest_size=16).digest()

    def page(self, group: str, slot: int) -> memoryview:
        size = self.layout.page_bytes[group]
        return self._memory[group][slot * size : (slot + 1) * size]

    def _after_copies(self, group: str, slot: int) -> None:
        """What comes into the bytes of a slot is there."""
        while any(self.coming[key] for key in self.layout.find_overlaps(group, slot)):
            self._bring()

    def _flip(self, part: memoryview, what: str) -> None:
        if self.checks and self._rng.random() < self.odds:
            part[self._rng.randrange(len(part))] ^= 1 << self._rng.randrange(8)
            self.world.seen[what] += 1

    def to_host(self, group: str, slot: int, parts: Any, done: Any, *, settled: bool = False) -> None:
        self._after_copies(group, slot)
        data = bytes(self.page(group, slot))
        digest = self.digest([data]) if self.checks else None
        assert sum(map(len, parts)) == len(data)
        parts[0][:] = bytes(len(parts[0]))

        def arrive() -> None:
            at = 0
            for part in parts:
                part[:], at = data[at : at + len(part)], at + len(part)
            self._flip(self._rng.choice(parts), "flipped on the way down")
            done(digest, 1e-6)

        self.world.put("down", arrive)

    def to_device(self, group: str, slots: Any, pages: Any, done: Any) -> None:
        assert len(slots) == len(pages) == len(set(slots)) > 0
        self.world.seen[f"runs of {'one' if len(slots) == 1 else 'some' if len(slots) < 64 else 'many'}"] += 1
        at = 0
        while at < len(slots):
            count = self._rng.choice([1, 2, 7, 31, 64, 64])
            keys = [(group, slot) for slot in slots[at : at + count]]
            for key in keys:
                self._after_copies(*key)
                self.page(*key)[:] = b"\xee" * self.layout.page_bytes[group]
            self.coming.update(keys)
            self._runs.append((keys, pages[at : at + count], done))
            self.world.put("up", lambda: self._runs and self._bring())
            at += count

    def _bring(self) -> None:
        keys, pages, done = self._runs.popleft()
        found = []
        for key, parts in zip(keys, pages, strict=True):
            page, at = self.page(*key), 0
            for part in parts:
                page[at : at + len(part)], at = part, at + len(part)
            assert at == len(page)
            self._flip(page, "flipped on the way up")
            found.append(self.digest([page]) if self.checks else None)
            self.coming[key] -= 1
        done(found, 1e-6 * len(found))

    def flush(self) -> None:
        self.world.pump()

    # --- steps ---------------------------------------------------------------------------------------------------

    def execute(self, batch: Any) -> StepResult:
        assert 0 < batch.num_tokens <= self.max_batch_tokens
        size, result = self.layout.page_tokens, StepResult([])
        for piece in batch.slices:
            first, last = piece.start // size, (piece.start + len(piece.token_ids) - 1) // size
            for group in self._memory:
                for slot in piece.pages[group][first : last + 1]:
                    self._after_copies(group, slot)
        for piece in batch.slices:
            digest = self._run(piece)
            if piece.seq_id in self.poison:
                result.failed[piece.seq_id] = "logits are not finite"
            elif piece.sample:
                result.sampled.append(SampledTokens(piece.seq_id, (following(digest),)))
        self.world.now += self._rng.choice([1e-4, 1e-3]) * batch.num_tokens
        self.world.pump()
        return result

    def _run(self, piece: Any) -> bytes:
        size, end = self.layout.page_tokens, piece.start + len(piece.token_ids)
        right = digests(self.tokens_of(piece.seq_id)[:end])
        for group, memory in self._memory.items():
            each, table = self.layout.page_bytes[group] // size, piece.pages[group]
            first = max(0, piece.start - self.spec.sliding_window + 1) if group == LOCAL else 0
            for position in range(first, end):
                slot = table[position // size]
                assert slot >= 0, f"{group}: position {position} slid out too soon"
                at = slot * self.layout.page_bytes[group] + position % size * each
                if position >= piece.start:
                    wrong = piece.seq_id in self.poison
                    memory[at : at + each] = b"\xaa" * each if wrong else entry(group, right[position], each)
                elif memory[at : at + each] != entry(group, right[position], each):
                    raise SystemError(f"{group}: a step saw another's KV at position {position}")
        return right[-1]

    def release(self, seq_id: int) -> None:
        pass

    def close(self) -> None:
        pass


class Disk:
    """A `DiskStore` in `kept`, which outlives it. `odds`: of an operation that fails, is late, or finds no place."""

    secret, spare_bytes, stalled = b"s" * 32, 0, False

    def __init__(self, world: World, num_slots: int, kept: dict[tuple[int, ...], tuple[Any, bytes]]) -> None:
        self.num_slots = self.existing_slots = num_slots
        self.odds, self.kept, self.ending, self.queue_depth = 0.0, kept, dict[bytes, int](), 0
        self._world, self._rng = world, world.rng

    @property
    def now(self) -> float:
        return self._world.now

    def recover_pages(self) -> Any:
        return [(page, slots) for slots, (page, _) in self.kept.items()]

    def _begin(self, work: Callable[[], Outcome], done: Any) -> bool:
        if self.queue_depth > 20 or self._rng.random() < self.odds:
            return False
        self.queue_depth += 1

        def end(outcome: Outcome) -> None:
            self.queue_depth -= 1
            self._world.seen[f"disk {outcome.value}"] += 1
            done(outcome)

        def run() -> None:
            if self._rng.random() < self.odds:
                done(Outcome.TIMEOUT)
                self._world.put("late", lambda: end(Outcome.RETURNED))
            else:
                end(work())

        self._world.put(self._rng.choice(["disk 0", "disk 1"]), run)
        return True

    def write_page(
        self, page: Any, slots: Any, parts: Any, done: Any, *, probe: Any, expected: bytes, expires: int
    ) -> bool:
        def work() -> Outcome:
            self.erase_slots(slots)
            if self._rng.random() < self.odds:
                return self._rng.choice([Outcome.FAILED, Outcome.NO_SPACE])
            if probe.digest([memoryview(b"".join(parts))[: probe.nbytes]]) != expected:
                return Outcome.CORRUPT
            self.kept[tuple(slots)] = page, b"".join(parts)
            return Outcome.OK

        return self._begin(work, done)

    def reads_together(self, digest: Any) -> bool:
        return self._rng.random() < 0.5

    def read_pages(self, moves: Any, done: Any) -> bool:
        def read(move: Any) -> Outcome:
            if not move.wanted():
                return Outcome.UNWANTED
            found, short = self.kept.get(tuple(move.slots)), self._rng.random() < self.odds
            data, at = found[1] if found is not None else b"", 0
            for part in move.parts:
                part[: len(data[at : at + len(part)]) // (1 + short)] = data[at : at + len(part)][
                    : len(part) // (1 + short)
                ]
                at += len(part)
            if found is None or found[0] != move.page or short:
                return self._rng.choice([Outcome.FAILED, Outcome.CORRUPT])
            move.digest = move.take_digest()
            return Outcome.OK

        def work() -> Outcome:
            for move in moves:
                move.outcome = read(move)
            return Outcome.OK

        return self._begin(work, done)

    def erase_slots(self, slots: Any) -> None:
        for gone in [kept for kept in self.kept if not set(kept).isdisjoint(slots)]:
            del self.kept[gone]

    def stamp_page(self, page: Any, slots: Any, expires: int) -> None:
        pass

    def get_expiry(self, slots: Any) -> int:
        return 0

    def close(self, timeout_s: float) -> None:
        pass
