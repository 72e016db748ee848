"""A link that tears, loses, swaps and changes pages, or digests that are wrong: every answer is right all the same.

The real copier, in batches, on a device whose streams run in threads; each step checks each position that it reads.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import campaign
import pytest

pytest.importorskip("torch")

from campaign import Shape, Stack
from lanes import Coder, Digests, Lane
from late_device import LateExecutor

from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.plugins.code_layout import PageCode
from wicore_trt.runtime import page_copier

Piece = tuple[int, int, int]
KINDS = ("flipped", "torn", "lost", "two swapped", "another page", "wrong digest")


class Lies:
    """Goes through KINDS; one batch of copies in `EVERY` gets the next of them."""

    EVERY = 4

    def __init__(self, seed: int) -> None:
        self.told: Counter[str] = Counter()
        self.rng = random.Random(seed)
        self._kinds = cycle(KINDS)

    def next(self) -> str:
        return next(self._kinds) if self.rng.randrange(self.EVERY) == 0 else ""


class LyingLane(Lane):
    """`kind` is the lie about the batch that is being put on the lane."""

    def __init__(self, lies: Lies, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.lies, self.kind = lies, ""

    def copy(self, pieces: Iterable[Piece]) -> None:
        rng, made = self.lies.rng, list(pieces)
        self.kind = self.kind or self.lies.next()
        at, other = rng.randrange(len(made)), rng.randrange(len(made))
        (target, source, count), (there, elsewhere, size) = made[at], made[other]
        flip = None
        if self.kind == "flipped":
            byte = ctypes.c_ubyte.from_address(target + rng.randrange(count))
            flip = partial(_flip, byte, 1 << rng.randrange(8))
        elif self.kind == "torn":
            made[at] = (target, source, count // 2)
        elif self.kind == "lost":
            del made[at]
        elif at != other and count == size and self.kind in ("two swapped", "another page"):
            made[at] = (target, elsewhere, count)
            if self.kind == "two swapped":
                made[other] = (there, source, count)
        elif self.kind != "wrong digest":
            self.kind = ""
        self.lies.told[self.kind] += 1
        super().copy(made)
        if flip is not None:
            self.put(flip)
        if self.kind != "wrong digest":
            self.kind = ""


def _flip(byte: ctypes.c_ubyte, bit: int) -> None:
    byte.value ^= bit


class LyingDigests(Digests):
    """Of a batch that leaves they come before its copies, of one that comes behind them."""

    def ask(self, lane: LyingLane, pages: Sequence[tuple[int, int]]) -> Any:
        def start(behind: Lane) -> Callable[[], Sequence[bytes]]:
            found, kind = self.start(behind, pages), lane.kind
            if kind != "wrong digest":
                return found
            lane.kind = ""
            return lambda: [bytes(16), *found()[1:]]

        return start


class LyingCoder(Coder):
    """Encodes or decodes one page of `EVERY` wrong, or says that it fits."""

    EVERY = 12

    def __init__(self, lies: Lies, codes: Mapping[str, PageCode]) -> None:
        super().__init__(codes)
        self._lies, self._last = lies, b""

    def _next(self, *kinds: str) -> str:
        kind = self._lies.rng.choice(kinds) if self._lies.rng.randrange(self.EVERY) == 0 else ""
        self._lies.told[kind] += 1
        return kind

    def encode_one(self, code: PageCode, page: memoryview, coded: memoryview) -> bytes:
        before, seal = bytes(coded), super().encode_one(code, page, coded)
        kind = self._next("encoded wrong", "stale when encoded", "said to fit")
        if kind == "encoded wrong":
            coded[self._lies.rng.randrange(16, len(coded))] ^= 255
        elif kind == "stale when encoded":
            coded[:] = before
        elif kind == "said to fit":
            coded[12:16] = bytes(4)
        return seal

    def decode_one(self, code: PageCode, page: memoryview, coded: memoryview) -> bytes:
        kind, before = self._next("decoded wrong", "stale when decoded", "not decoded"), bytes(page)
        if kind == "stale when decoded":
            coded[:] = self._last[: len(coded)].ljust(len(coded), b"\0")
        self._last = bytes(coded)
        super().decode_one(code, page, coded)
        if kind == "decoded wrong":
            page[self._lies.rng.randrange(len(page))] ^= 1
        elif kind == "not decoded":
            page[:] = before
        return self._digest.compute_digest([page])


CODER_KINDS = (
    "encoded wrong", "stale when encoded", "said to fit", "decoded wrong", "stale when decoded", "not decoded"
)  # fmt: skip


@pytest.mark.parametrize(
    ("coded", "disk"), [pytest.param(False, False, marks=pytest.mark.long), (False, True), (True, True)]
)
def test_no_lie_of_the_link_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: bool, coded: bool
) -> None:
    seed = random.randrange(1 << 30)
    rng, lies = random.Random(seed), Lies(seed)
    executor = partial(LateExecutor, seed=seed, lane=partial(LyingLane, lies), digests=LyingDigests)
    if coded:
        executor.keywords["coder"] = partial(LyingCoder, lies)
    monkeypatch.setattr(campaign, "FakeExecutor", executor)
    monkeypatch.setattr(page_copier, "BATCH", 3)
    shape = Shape(pages={GLOBAL: 40, LOCAL: 32}, max_batch_tokens=rng.choice((5, 8, 14)), window=rng.choice((3, 8)))
    slots, kinds, more = rng.choice((40, 120)), KINDS, dict[str, object]()
    if coded:
        slots, kinds, more = 6 * slots, (*KINDS, *CODER_KINDS), {"compression": "lossless"}
    stack = Stack(tmp_path if disk else None, seed=seed, shape=shape, host_slots=slots, **more)
    noticed = rounds = 0
    while rounds < 40 or (rounds < 400 and (len(lies.told) <= len(kinds) or not noticed)):
        stack.serve(3)
        stack.forget_device()
        noticed, rounds = stack.tiers.movers.host_traffic.failures["corrupt"], rounds + 1
    stack.settle(60.0, check=True)
    assert stack.wrong == 0 and stack.finished, (seed, shape)
    assert set(kinds) <= set(lies.told) and noticed, (lies.told, noticed, rounds)
    assert not coded or stack.tiers.movers.host_traffic.failures["unfit"], "every page had a code"
    stack.check_idle()
    stack.close()
