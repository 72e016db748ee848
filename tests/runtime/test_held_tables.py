"""Page tables that stay on the device, beside tables made anew in each step of whole lives of an engine.

Lives of tests/oracle bring what happens: sequences that join, leave, are preempted, parked, jump over what was loaded
and are aborted, pages that fill and slide out, steps that start while one runs, faults. Each step is also put into a
`StepBlock`, in which all is poisoned that the step is not to read.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from oracle import stack as oracle_stack  # noqa: E402
from oracle.device import AheadDevice, Device, Failure  # noqa: E402
from oracle.life import live  # noqa: E402
from runtime.triton_cpu import CpuDevice  # noqa: E402

from wicore_trt.backends.triton.inputs import HeldTables, StepBlock, TableUpdate, Unread, array_offsets, array_sizes  # noqa: E402
from wicore_trt.backends.triton.memory import StepLimits  # noqa: E402
from wicore_trt.backends.triton.rows import RowPlan, decode_plan, make_plan  # noqa: E402
from wicore_trt.kv.pages.hashing import TenantNames  # noqa: E402
from wicore_trt.kv.sequence_pages import SequencePages  # noqa: E402
from wicore_trt.runtime.batch import UNREAD, SequenceSlice, StepBatch  # noqa: E402
from wicore_trt.runtime.executor import KVLayout  # noqa: E402
from wicore_trt.runtime.step_inputs import StepInputs  # noqa: E402

POISON, ROWS, TOKENS, POSITIONS = 1 << 20, 16, 64, 260


class Mirror:
    """A block that sees all steps of a life. `wrong` says in which of them it had something else than the batch."""

    def __init__(self, layout: KVLayout, rng: random.Random) -> None:
        self.layout, self.rng, self.groups = layout, rng, tuple(layout.num_pages)
        limits = StepLimits(TOKENS, ROWS, POSITIONS)
        self.block = StepBlock(limits, self.groups, layout.page_tokens, ROWS, CpuDevice("sm90"))
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self._fail()

    def _fail(self) -> None:
        """A step did not get to the device as a whole: nothing of what lies there is good."""
        self.block.held.forget_rows()
        self.block.held.on_device.fill_(POISON)
        self.counts["failed"] += 1

    def step(self, batch: StepBatch) -> None:
        """Put a step into the block; it may fail the first time."""
        slices, plan = self.block.arrange_slices(batch.slices)
        singles, chunks, count = plan.decode.sequences, plan.prefill.sequences, plan.tokens
        size = decode_plan(singles + self.rng.randrange(4))
        if chunks:
            alone, more = singles + self.rng.randrange(3), self.rng.randrange(3)
            several = chunks + self.rng.randrange(3)
            size = make_plan(alone + count - singles + more, alone, several, alone + several)
        unread, tokens = None, torch.tensor([self.rng.randrange(1000) for _ in range(ROWS)], dtype=torch.int32)
        if slices[0].token_ids == [UNREAD]:
            unread = Unread(tokens, [self.rng.randrange(ROWS) for _ in slices])
        for memory in (self.block._block, *self.block._hosts):
            memory.fill_(POISON)
        if self.rng.random() < 0.02:
            take, self.block._apply_update = self.block._apply_update, lambda *_: 1 // 0  # type: ignore[assignment, method-assign]
            with pytest.raises(ZeroDivisionError):
                self.block.upload_padded(slices, plan, size, self.layout.num_pages, unread)
            self.block._apply_update = take  # type: ignore[method-assign]
            self._fail()
        try:
            self.block.upload_padded(slices, plan, size, self.layout.num_pages, unread)
        except AssertionError as error:
            self.wrong.append(f"refused: {error}")
            return
        self.counts["rows"] += len(slices)
        self.wrong += [*self._wrong_tables(slices, size), *self._wrong_arrays(slices, size, unread)]

    def _wrong_tables(self, slices: list[SequenceSlice], size: RowPlan) -> Iterator[str]:
        singles = [len(s.token_ids) for s in slices].count(1)
        rows = [*slices[:singles], *[None] * (size.decode.sequences - singles), *slices[singles:]]
        rows += [None] * (size.decode.sequences + size.prefill.sequences - len(rows))
        for group, table in zip(self.groups, self.block.held.on_device.tolist(), strict=True):
            for number, (piece, found) in enumerate(zip(rows, table, strict=False)):
                wanted = [] if piece is None else list(piece.pages[group])
                if found != wanted + [-1] * (len(found) - len(wanted)):
                    yield f"{group} table of row {number}: {found} in place of {wanted}"

    def _wrong_arrays(self, slices: list[SequenceSlice], size: RowPlan, unread: Unread | None) -> Iterator[str]:
        inputs = StepInputs.from_batch(StepBatch(slices), self.layout, self.groups)
        tokens = inputs.token_ids.tolist() if unread is None else unread.tokens[unread.rows].tolist()
        positions, starts = inputs.positions.tolist(), inputs.cu_seqlens.tolist()
        singles, begin = [len(s.token_ids) for s in slices].count(1), size.decode.sequences
        gap, several = begin - singles, len(slices) - singles
        ends = [start - singles for start in starts[singles:]]
        owners = [begin + i for i in range(several) for _ in range(ends[i + 1] - ends[i])]
        sampled = [*range(begin), *(begin + end - 1 for end in ends[1:])]
        sampled += [row for row in range(begin, begin + size.prefill.sequences) if row not in sampled]
        wanted = {
            "token_ids": ([*tokens[:singles], *[-1] * gap, *tokens[singles:]], -1),
            "positions": ([*positions[:singles], *[-1] * gap, *positions[singles:]], -1),
            "sequences": ([*range(begin), *owners], -1),
            "sample_rows": (sampled[: size.sampled], None),  # the kernel behind the last layer needs different ones
            "kv_lengths": ([position + 1 for position in positions[:singles]], 0),
            "cu_seqlens": (ends, ends[-1]),
            "first_positions": ([positions[start] for start in starts[singles:-1]], 0),
        }
        sizes = array_sizes(size, self.groups)
        offsets = array_offsets(sizes)[0]
        for name, (values, rest) in wanted.items():
            found = self.block._block[offsets[name] :][: sizes[name]].tolist()
            if name == "sample_rows" and len({*found}) < len(found):
                yield f"rows are sampled twice: {found}"
            if found != values + [rest] * (len(found) - len(values)):
                yield f"{name}: {found} in place of {values}"


def mirrored(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[Mirror]:
    """The mirrors of the engines of a life that is played. What else is wrong with the life is not asked here."""
    mirrors: list[Mirror] = []

    class Mirrored:
        def __init__(self, world: Any, model: Any, layout: KVLayout, **limits: int) -> None:
            super().__init__(world, model, layout, **limits)  # type: ignore[call-arg]
            mirrors.append(Mirror(layout, random.Random(f"{seed}/{len(mirrors)}")))
            self.mirror = mirrors[-1]

    class Steps(Mirrored, Device):
        def execute(self, batch: StepBatch) -> Any:
            self.mirror.step(batch)
            return super().execute(batch)

    class StepsAhead(Mirrored, AheadDevice):
        def submit(self, batch: StepBatch) -> None:
            self.mirror.step(batch)
            super().submit(batch)

    monkeypatch.setattr(oracle_stack, "Device", Steps)
    monkeypatch.setattr(oracle_stack, "AheadDevice", StepsAhead)
    counts: Counter[str] = Counter()
    with suppress(Failure):
        live(seed, counts=counts)
    mirrors[0].counts += counts
    return mirrors


REACHED = ("step ahead", "preemption", "jump", "ended: cancelled", "failed", "rows")


def test_held_tables_are_those_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    first, counts, lives = random.randrange(1 << 30), Counter[str](), 0
    logging.disable(logging.CRITICAL)  # of faults that lives inject
    try:
        while lives < 5 or (lives < 100 and not all(counts[name] for name in REACHED)):
            for mirror in mirrored(monkeypatch, first + lives):
                assert not mirror.wrong, (first + lives, mirror.wrong[0])
                counts += mirror.counts
            lives += 1
    finally:
        logging.disable(logging.NOTSET)
    assert all(counts[name] for name in REACHED), (lives, counts)


def test_what_does_not_change_is_not_sent() -> None:
    """Sequences decode; some fill a page, one leaves, in whose row the last one goes on, and one comes."""
    layout, rng = KVLayout(4, "float32", {"global": 99, "local": 99}, {"global": 1, "local": 1}), random.Random()
    mirror = Mirror(layout, rng)
    held, sent = mirror.block.held, list[list[int]]()
    changes = held.find_changes
    held.find_changes = lambda *given: (sent.append((found := changes(*given)).rows), found)[1]  # type: ignore[method-assign]
    sequences = {i: (8 + i % 4, SequencePages(TenantNames(b"", b"", 4, b""))) for i in range(8)}
    mirror.rng.random = lambda: 1.0  # type: ignore[method-assign]
    mirror.rng.randrange = lambda *_: 0  # type: ignore[method-assign]
    for turn in range(12):
        if turn == 5:
            del sequences[2]
        if turn == 8:
            sequences[9] = 13, SequencePages(TenantNames(b"", b"", 4, b""))
        for i, (length, pages) in sequences.items():
            while 4 * len(pages.tables["global"]) <= length:
                for group in layout.num_pages:
                    pages.extend_table(group, [random.randrange(99)])
            sequences[i] = length + 1, pages
        step = [
            SequenceSlice(i, [7], length - 1, pages.tables, stamp=pages.stamp)
            for i, (length, pages) in sequences.items()
        ]
        random.shuffle(step)
        mirror.step(StepBatch(step))
        assert not mirror.wrong
        filled = sum((length - 1) % 4 == 0 for length, _ in sequences.values())
        assert len(sent[-1]) <= (8 if turn == 0 else filled + (turn in (5, 8))), (turn, sent)


def changes_without_a_stamp(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        change = getattr(SequencePages, name)

        def changed(pages: SequencePages, *given: Any) -> None:
            stamp = pages.stamp
            change(pages, *given)
            pages.stamp = stamp

        monkeypatch.setattr(SequencePages, name, changed)

    return plant


def one_row_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = HeldTables.find_changes

    def fewer(held: HeldTables, *given: Any) -> TableUpdate:
        found = changes(held, *given)
        return TableUpdate(found.rows[:-1], found.tables[:, :-1]) if len(found.rows) > 1 else found

    monkeypatch.setattr(HeldTables, "find_changes", fewer)


def failures_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldTables, "forget_rows", lambda held: None)


def long_tables_leave_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = HeldTables.find_changes

    def narrower(held: HeldTables, *given: Any) -> TableUpdate:
        held._most = [0] * len(held._most)
        return changes(held, *given)

    monkeypatch.setattr(HeldTables, "find_changes", narrower)


@pytest.mark.parametrize(
    "plant",
    [
        changes_without_a_stamp("replace_slots"),
        changes_without_a_stamp("extend_table"),
        one_row_is_left_out,
        failures_are_not_told,
        long_tables_leave_their_ends,
    ],
)
def test_a_row_that_is_not_updated_is_seen(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    logging.disable(logging.CRITICAL)
    try:
        assert any(mirror.wrong for seed in range(12) for mirror in mirrored(monkeypatch, seed))
    finally:
        logging.disable(logging.NOTSET)
