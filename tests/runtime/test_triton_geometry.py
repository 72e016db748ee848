"""What steps of whole lives find on the device, and whose tokens come back, whatever fails on the way.

No kernel runs. In place of a step's kernels, `Reader` reads the step's arrays at the addresses that kernels would get
and makes each row's token from what attention and sampling depend on: tokens, positions, pages. A row that is stale, of
somebody else, or read before it was written gives another token than the batch alone says. Two steps are under way at a
time, on a device that does all at once or is late, sequences join, leave, are preempted, come back and jump over what
was loaded, pages move and slide out, and steps fail anywhere between `submit` and its end.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from runtime import triton_cpu  # noqa: E402
from runtime.late_cpu import LateDevice  # noqa: E402
from runtime.triton_cpu import executor_of, small_model, specs_of  # noqa: E402

from wicore_trt.backends.triton import executor as triton_executor  # noqa: E402
from wicore_trt.backends.triton import rows as triton_rows  # noqa: E402
from wicore_trt.backends.triton.executor import TritonExecutor  # noqa: E402
from wicore_trt.backends.triton.ops import StepArrays, TritonOps  # noqa: E402
from wicore_trt.kv.pages.hashing import TenantNames  # noqa: E402
from wicore_trt.kv.sequence_pages import SequencePages  # noqa: E402
from wicore_trt.model.spec import GLOBAL, GROUPS, LOCAL  # noqa: E402
from wicore_trt.plugins.decode_layout import MEASURED_SEGMENTS, Segments  # noqa: E402
from wicore_trt.runtime.batch import UNREAD, SequenceSlice, StepBatch, StepResult  # noqa: E402
from wicore_trt.types import SamplingParams  # noqa: E402

PAGE, PAGES, CONTEXT, VOCAB = 4, 120, 60, 48
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
HOST = SamplingParams(temperature=0.0, logprobs=0)


def token_of(tokens: list[int], positions: list[int], tables: list[list[int]], drawn: bool = False) -> int:
    """What a row gives: of the step's tokens of a sequence, their positions and its pages up to there."""
    return hash((tuple(tokens), tuple(positions), tuple(map(tuple, tables)), drawn)) % (1 << 20)


def ints(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address)) if count else []


class Reader:
    """Stands in for the kernels of an executor's steps."""

    def __init__(self) -> None:
        self.memory: Any = None
        self.fail: Callable[[], None] = lambda: None
        self.ways: Counter[str] = Counter()

    def run_of(self) -> Callable[..., None]:
        """`TritonExecutor.run`."""
        return lambda executor, *given: executor.device.put(partial(self.run, executor, *given))

    def run(self, executor: TritonExecutor, arrays: StepArrays, measured: int | None = None) -> None:
        self.memory, found = executor.memory, self.rows(arrays)
        self.ways["graph" if arrays.plan.sampled < arrays.plan.tokens and not arrays.slices else "other"] += 1
        if arrays.slices:
            self._check_slices(arrays)
        if measured is not None:
            TritonOps(executor.model, arrays).measure_masses(measured, arrays.plan.sequences, arrays.tables[GLOBAL][1])
        results, logits = executor.memory.results, executor.memory.logits
        results.fill_(-9)
        logits.fill_(0)
        for row, at in enumerate(ints(arrays.sample_rows, arrays.plan.sampled)):
            token = found.get(at)
            if token is not None:
                self.fail()
                results[0, row], results[1, row] = token, 0
                logits[row, token % VOCAB] = 1

    def rows(self, arrays: StepArrays) -> dict[int, int]:
        """The token of each row that ends a sequence's part of the step; rows of nobody have none."""
        decoding, others = arrays.plan.decode.rows, arrays.plan.prefill.sequences
        tokens, positions, owners = (
            ints(a, arrays.plan.tokens) for a in (arrays.token_ids, arrays.positions, arrays.sequences)
        )
        lengths, bounds = ints(arrays.kv_lengths, decoding), ints(arrays.cu_seqlens, others + 1)
        firsts, found = ints(arrays.first_positions, others), {}
        parts = [(n, n + 1) for n in range(decoding)]
        parts += [(decoding + a, decoding + b) for a, b in zip(bounds, bounds[1:], strict=False)]
        for owner, (begin, end) in enumerate(parts):
            tables = [ints(at + 4 * owner * length, length) for at, length in arrays.tables.values()]
            if owner < decoding:
                assert lengths[owner] == positions[owner] + 1
                if positions[owner] < 0:
                    assert owners[owner] == owner and set(tables[0] + tables[1]) == {-1}, "a row of nobody has pages"
                    continue
            elif begin == end:
                assert set(tables[0] + tables[1]) == {-1}, "a chunk of nobody has pages"
                continue
            else:
                assert positions[begin] == firsts[owner - decoding]
            assert owners[begin:end] == [owner] * (end - begin)
            count = positions[end - 1] // PAGE + 1
            found[end - 1] = token_of(tokens[begin:end], positions[begin:end], [table[:count] for table in tables])
        behind = decoding + (bounds[-1] if others else 0)
        assert set(positions[behind:]) | set(owners[behind:]) <= {-1}, "rows behind the step's are somebody's"
        return found

    def _check_slices(self, arrays: StepArrays) -> None:
        count = arrays.plan.prefill.sequences
        bounds, firsts = ints(arrays.cu_seqlens, count + 1), ints(arrays.first_positions, count)
        wanted = [(a, b - a, first, n) for n, (a, b, first) in enumerate(zip(bounds, bounds[1:], firsts, strict=False))]
        assert [tuple(piece) for piece in arrays.slices] == wanted

    def masses(self, ops: TritonOps, layer: int, sequences: int, pages: int) -> None:
        """In place of `TritonOps.measure_masses`: page numbers."""
        step = ops._step
        address, length = step.tables[GLOBAL]
        for s in range(sequences):
            found = torch.tensor(ints(address + 4 * s * length, length)[:pages], dtype=torch.float32)
            self.memory.masses[s * pages : s * pages + len(found)] = found


class Fault(Exception):
    pass


class Sequence:
    def __init__(self, seq_id: int, tokens: list[int], params: SamplingParams) -> None:
        self.seq_id, self.tokens, self.params, self.computed = seq_id, tokens, params, 0
        self.pages = SequencePages(TenantNames(b"", b"", PAGE, b""))


class Life:
    """A scheduler of random mood around an executor whose kernels are a `Reader`."""

    def __init__(self, rng: random.Random, executor: TritonExecutor, reader: Reader) -> None:
        self.rng, self.executor, self.reader = rng, executor, reader
        self.free = {group: list(range(PAGES)) for group in GROUPS}
        self.running: list[Sequence] = []
        self.count, self.happened = 0, Counter[str]()

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        """Pages for so many tokens, now and then more; what no later token sees may go."""
        rng, pages = self.rng, sequence.pages
        for group in GROUPS:
            missing = -(-tokens // PAGE) - len(pages.tables[group])
            if missing > 0:
                free = self.free[group]
                pages.extend_table(
                    group, [free.pop(rng.randrange(len(free))) for _ in range(missing + rng.choice((0, 0, 2)))]
                )
        table = pages.tables[LOCAL]
        gone = max(0, sequence.computed - 4) // PAGE
        held = {i: -1 for i in range(gone) if table[i] >= 0}
        if held and rng.random() < 0.7:
            self.free[LOCAL] += [table[i] for i in held]
            pages.replace_slots(LOCAL, held)
            self.happened["slid"] += 1

    def _drop(self, sequence: Sequence) -> None:
        for group in GROUPS:
            self.free[group] += [slot for slot in sequence.pages.tables[group] if slot >= 0]
        sequence.pages.clear_tables()

    def disturb(self) -> None:
        """Join, leave, preempt, come back, jump, move pages; while no step is under way."""
        rng = self.rng
        while len(self.running) < 2 or (len(self.running) < 7 and rng.random() < 0.3):
            tokens = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 3, 9, 17, 30)))]
            self.running.append(Sequence(self.count, tokens, rng.choice((GREEDY, GREEDY, GREEDY, DRAWN, HOST))))
            self.count += 1
        for sequence in [*self.running]:
            chance = rng.random()
            if len(sequence.tokens) > CONTEXT - 8 or chance < 0.03:
                self._drop(sequence)
                self.executor.release(sequence.seq_id)
                self.running.remove(sequence)
            elif chance < 0.07:
                self._drop(sequence)
                sequence.computed = 0
                self.happened["preempted"] += 1
                if rng.random() < 0.5:
                    sequence.computed = rng.randrange(len(sequence.tokens))
                    self.happened["jumped"] += 1
            elif chance < 0.12 and sequence.pages.tables[GLOBAL]:
                group = rng.choice(GROUPS)
                table = sequence.pages.tables[group]
                i = rng.randrange(len(table))
                if table[i] >= 0:
                    slot = self.free[group].pop(rng.randrange(len(self.free[group])))
                    self.free[group].append(table[i])
                    sequence.pages.replace_slots(group, {i: slot})
                    self.happened["moved"] += 1
        if rng.random() < 0.3:
            rng.shuffle(self.running)

    def batch(self) -> StepBatch:
        """What some sequences compute next."""
        rng, slices, room = self.rng, [], rng_tokens(self.rng)
        for sequence in self.running:
            left = len(sequence.tokens) - sequence.computed
            if rng.random() < 0.15 or room <= 0:
                continue
            count = min(left, room, rng.choice((1, left, left, 2, 7)))
            room -= count
            slices.append(self._slice(sequence, sequence.tokens[sequence.computed :][:count], sequence.computed))
        if not slices:
            sequence = self.running[0]
            slices = [self._slice(sequence, [sequence.tokens[sequence.computed]], sequence.computed)]
        rng.shuffle(slices)
        return StepBatch(slices, measure_attention=rng.random() < 0.2)

    def _slice(self, sequence: Sequence, tokens: list[int], start: int) -> SequenceSlice:
        self._grow(sequence, start + len(tokens))
        sample = tokens == [UNREAD] or start + len(tokens) == len(sequence.tokens)
        pages = sequence.pages
        return SequenceSlice(
            sequence.seq_id, tokens, start, pages.tables, sample, sequence.params, 1, stamp=pages.stamp
        )

    def follow(self, batch: StepBatch) -> StepBatch | None:
        """The step after one that is under way, if it leads and nobody joins: each of those that sampled."""
        by_id = {s.seq_id: s for s in self.running}
        if not self.executor.leads(batch) or not all(s.sample for s in batch.slices):
            return None
        slices = [self._slice(by_id[s.seq_id], [UNREAD], s.start + len(s.token_ids)) for s in batch.slices]
        if self.rng.random() < 0.3:
            slices = slices[: self.rng.randint(1, len(slices))]
        self.rng.shuffle(slices)
        return StepBatch(slices, measure_attention=self.rng.random() < 0.2)

    def expected(self, batch: StepBatch, before: dict[int, int]) -> tuple[dict[int, int], dict[int, list[float]]]:
        """Tokens by seq_id by the batch alone, and masses; `before`: what the step before sampled."""
        tokens, masses = {}, {}
        for piece in batch.slices:
            own = [before[piece.seq_id]] if piece.token_ids == [UNREAD] else piece.token_ids
            last = piece.start + len(own) - 1
            tables = [list(piece.pages[group])[: last // PAGE + 1] for group in self.executor.layout.num_pages]
            positions = list(range(piece.start, last + 1))
            masses[piece.seq_id] = [float(page) for page in piece.pages[GLOBAL][: last // PAGE + 1]]
            if piece.sample:
                tokens[piece.seq_id] = token_of(own, positions, tables)
                if piece.params is DRAWN:
                    tokens[piece.seq_id] ^= 1
                if piece.params is HOST:
                    tokens[piece.seq_id] %= VOCAB
        return tokens, masses if batch.measure_attention else {}

    def take(self, batch: StepBatch, wanted: Any, result: StepResult) -> None:
        """Compare and go on with what a step gave."""
        found = {found.seq_id: found.token_ids[0] for found in result.sampled}
        assert not result.failed and found == wanted[0], (found, wanted[0])
        assert result.attention == wanted[1], (result.attention, wanted[1])
        by_id = {s.seq_id: s for s in self.running}
        for piece in batch.slices:
            sequence = by_id[piece.seq_id]
            sequence.computed = piece.start + len(piece.token_ids)
            if piece.sample:
                sequence.tokens.append(found[piece.seq_id])
        self.happened["steps"] += 1

    def play(self, faults: Callable[[], Any]) -> None:
        """One step and those that follow before it has ended."""
        self.disturb()
        if not self.running:
            return  # all of them left or gave way
        batch = self.batch()
        wanted = self.expected(batch, {})
        try:
            with faults():
                self.executor.submit(batch)
        except Fault:
            self.happened["failed"] += 1
            for piece in batch.slices:  # as the engine does: each alone
                alone = StepBatch([piece])
                self.take(alone, self.expected(alone, {}), self.executor.execute(alone))
            return
        while True:
            ahead, next_wanted = self.follow(batch), None
            if ahead is not None and self.rng.random() < 0.8:
                next_wanted = self.expected(ahead, wanted[0])
                try:
                    with faults():
                        self.executor.submit(ahead)
                except Fault:
                    next_wanted = None
                    self.happened["failed ahead"] += 1
            self.take(batch, wanted, self.executor.collect())
            if ahead is None or next_wanted is None:
                return
            self.happened["ahead"] += 1
            batch, wanted = ahead, next_wanted


def rng_tokens(rng: random.Random) -> int:
    """The most tokens of a step: some fit into graphs, some do not."""
    return rng.choice((1, 8, 20, 20, 36, 60))


class Faults:
    """Failures between `submit` and its end: the n-th call of one of `PLACES` raises, before or after it did its
    work."""

    def __init__(self, rng: random.Random, executor: TritonExecutor, reader: Reader) -> None:
        self.rng, self.left, self.raised = rng, -1, Counter[str]()
        owners = {"block": executor.block, "copies": executor._page_copies, "device": executor.device}
        owners |= {
            "executor": executor,
            "chooser": executor.sampler,
            "sampler": executor.sampler.drawing,
            "segments": executor.model.segments,
        }
        for place in PLACES:
            owner, name = place.split(".")
            if owners[owner] is not None:
                setattr(owners[owner], name, self._wrapped(place, getattr(owners[owner], name)))
        reader.fail = self._wrapped("reader", lambda: None)

    def _wrapped(self, place: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any) -> Any:
            self._count(place)
            result = call(*args)
            self._count(place)
            return result

        return failing

    def _count(self, place: str) -> None:
        self.left -= 1
        if self.left == 0:
            self.raised[place] += 1
            raise Fault(place)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.left = self.rng.randint(1, 24) if self.rng.random() < 0.15 else -1
        try:
            yield
        finally:
            self.left = -1


PLACES = (
    *(
        "block.arrange_slices",
        "block._write_update",
        "block._send_block",
        "block._apply_update",
        "block._copy_unread",
        "copies.begin_step",
        "device.record",
    ),
    *(
        "chooser.choose_ways",
        "executor._fetch_masses",
        "executor.rows_of",
        "sampler.draw_rows",
        "segments.check_library",
    ),
)


def life_of(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, *, graphs: bool, late: bool = False
) -> tuple[Life, Faults]:
    """`late`: the device is, and kernels do not fail."""
    reader = Reader()
    monkeypatch.setattr(triton_cpu, "CpuDevice", partial(LateDevice, rng=rng))
    monkeypatch.setattr(triton_executor, "DECODE_BUCKETS", (2, 4, 8))
    monkeypatch.setattr(triton_rows, "PROMPT_BUCKETS", dict.fromkeys((0, 4), (9, 24)))
    monkeypatch.setattr(triton_rows, "PROMPT_CHUNKS", 2)
    monkeypatch.setitem(MEASURED_SEGMENTS, ("sm90", 16), Segments(32, 32, 32, 2))
    specs_of.cache_clear()
    monkeypatch.setattr(TritonExecutor, "run", reader.run_of())
    devices: list[LateDevice] = []

    def masses(ops: TritonOps, *given: int) -> None:
        work = partial(reader.masses, ops, *given)
        devices[0].put(work) if devices else work()

    monkeypatch.setattr(TritonOps, "measure_masses", masses)
    settings = {"kv_pages": dict.fromkeys(GROUPS, PAGES), "max_batch_tokens": 60, "max_sequences": 8}
    executor = executor_of(small_model(1), graphs=graphs, page_tokens=PAGE, **settings)
    specs_of.cache_clear()
    executor.model.segments.check_library = lambda q: None  # type: ignore[union-attr, method-assign]

    device: Any = executor.device
    device.late = late
    devices.append(device)

    def drawn(rows: list[int]) -> None:
        for row in rows:
            executor.memory.results[0, row] ^= 1

    sampler: Any = executor.sampler.drawing
    sampler.draw_rows = lambda rows, pieces: device.put(partial(drawn, [*pieces]))
    faults = Faults(rng, executor, reader)
    if late:
        reader.fail = lambda: None
    return Life(rng, executor, reader), faults


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("graphs", [True, pytest.param(False, marks=pytest.mark.long)])
def test_lives(graphs: bool, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 30)
    life, faults = life_of(random.Random(seed), monkeypatch, graphs=graphs, late=late)
    for turn in range(200):
        try:
            life.play(faults)
        except Exception as error:
            raise AssertionError((seed, turn, dict(faults.raised))) from error
    assert all(life.happened[name] for name in ("ahead", "failed", "preempted", "jumped", "moved", "slid"))


def test_a_step_that_fails_behind_its_kernels_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its results would be taken for those of the step after it, and all later ones be one step late."""
    life, _ = life_of(random.Random(random.randrange(1 << 30)), monkeypatch, graphs=False)
    segments = life.executor.model.segments
    assert segments is not None

    def fails(q: torch.Tensor) -> None:
        raise Fault

    monkeypatch.setattr(segments, "check_library", fails)
    life.running = [Sequence(n, [7] * 20, GREEDY) for n in range(2)]
    batch = StepBatch([life._slice(s, s.tokens, 0) for s in life.running])
    with pytest.raises(Fault):
        life.executor.submit(batch)
    for piece in batch.slices:
        alone = StepBatch([piece])
        life.take(alone, life.expected(alone, {}), life.executor.execute(alone))
