"""Exchanges of ranks in the interpreter: processes that share memory meet, push, pull and gather, after delays."""

from __future__ import annotations

import mmap
import multiprocessing
import random
import time
from dataclasses import dataclass

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import torch
from gpu_kernels import interpreted
from kernel_checks import TORCH

from wicore_trt.plugins import exchange_layout, step_layout
from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.exchange_layout import (
    BROKEN,
    LOGITS,
    NORMED,
    NORMED_SCALES,
    PUSHED_ROWS,
    RESIDUAL,
    ExchangeLayout,
)
from wicore_trt.plugins.kernels import exchange
from wicore_trt.plugins.kernels.step_specs import NormShape, add_norm_spec, collect_spec, gather_spec, meet_spec
from wicore_trt.plugins.layout import Launch
from wicore_trt.plugins.step_layout import NormOut

HIDDEN, TOKENS, COLUMNS = 64, 6, 24
WAYS = "push", "push", "pull", "own", "gather"


@dataclass
class Block:
    """Memory of all ranks, mapped before they are forked, so that addresses are the same in each."""

    layout: ExchangeLayout

    def __post_init__(self) -> None:
        size = self.layout.size_bytes
        self.all = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for _ in range(self.layout.ranks)]
        self.peers = torch.tensor([block.data_ptr() for block in self.all])
        self.failed = torch.frombuffer(mmap.mmap(-1, 4), dtype=torch.int32)
        self.turn = multiprocessing.get_context("fork").Lock()

    def part(self, rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
        begin, end = self.layout.part_offsets[number : number + 2]
        return self.all[rank][begin:end].view(dtype)


@dataclass
class Rank:
    """One rank of `block`; `seed` is the same on all, delays are not."""

    block: Block
    rank: int
    dtype: str
    seed: int

    def __post_init__(self) -> None:
        self.ranks = self.block.layout.ranks
        self.ranked = {"peers": self.block.peers, "rank": self.rank, "failed": self.block.failed}
        self.common, self.delays = torch.Generator().manual_seed(self.seed), random.Random(self.rank)
        self.residual = torch.randn(TOKENS, HIDDEN, generator=self.common)
        fp8 = self.dtype == "fp8"
        self.shape, self.turn = NormShape(HIDDEN, "bfloat16" if fp8 else self.dtype, fp8), 0
        self.out = torch.uint8 if fp8 else TORCH[self.dtype]

    def run(self, steps: int) -> None:
        chosen = random.Random(self.seed)
        for _ in range(steps):
            way = chosen.choice(WAYS if self.block.layout.owns_rows else [way for way in WAYS if way != "own"])
            getattr(self, way)(chosen.randint(1, TOKENS), chosen)

    def push(self, rows: int, chosen: random.Random) -> None:
        x = self.products(rows, torch.float32)
        taken = torch.tensor(chosen.sample(range(TOKENS), rows), dtype=torch.int32) if chosen.random() < 0.3 else None
        if taken is not None:
            x = self.products(TOKENS, torch.float32)
        parts = [each.to(TORCH[exchange_layout.pushed_type(self.shape.dtype)]) for each in x]
        self.norm(x[self.rank], parts, rows, taken, "push")

    def own(self, rows: int, chosen: random.Random) -> None:
        """As `pull`, of all rows or of some; behind it rows of the residual come to all ranks."""
        taken = torch.tensor(chosen.sample(range(TOKENS), rows), dtype=torch.int32) if chosen.random() < 0.3 else None
        self.pull(rows if taken is None else TOKENS, chosen, "own", taken)
        wanted, count = torch.tensor(chosen.sample(range(TOKENS), rows), dtype=torch.int32), rows
        found, spec = torch.full((count, HIDDEN), torch.nan), collect_spec(self.ranks, HIDDEN)
        residual = self.block.part(self.rank, RESIDUAL, torch.float32)
        self.launch(spec, exchange_layout.collect_launch(residual, wanted, found, count, self.ranked))
        assert torch.equal(found, self.residual[wanted.long()])
        self.meet()  # as an exchange of the next step would

    def pull(self, rows: int, chosen: random.Random, way: str = "pull", taken: torch.Tensor | None = None) -> None:
        dtype = torch.float32 if chosen.random() < 0.5 else torch.bfloat16
        x = self.products(rows, dtype)
        buffer = self.block.part(self.rank, self.turn, dtype)[: rows * HIDDEN].view(rows, HIDDEN)
        self.turn ^= 1
        self.delay()
        buffer.copy_(x[self.rank])
        self.meet()
        self.norm(buffer, x, rows if taken is None else len(taken), taken, way)

    def gather(self, rows: int, chosen: random.Random) -> None:
        x = self.products(rows, torch.float32, COLUMNS)
        part = self.block.part(self.rank, LOGITS, torch.float32)[: rows * COLUMNS].view(rows, COLUMNS)
        part.copy_(x[self.rank])
        self.meet()
        logits = torch.full((rows, self.ranks * COLUMNS), torch.nan)
        spec = gather_spec(self.ranks, COLUMNS)
        self.launch(spec, exchange_layout.gather_launch(spec.constants, part, logits, rows, self.ranked))
        assert torch.equal(logits, torch.cat(x, 1))
        self.meet()  # as an exchange of the next step would

    def norm(self, x: torch.Tensor, parts: list[torch.Tensor], rows: int, taken: torch.Tensor | None, way: str) -> None:
        """Of one rank with the sum in rank order, and of all ranks: the same bits."""
        total = torch.zeros(parts[0].shape)
        for part in parts:
            total += part.float()
        weights = tuple(torch.rand(HIDDEN, generator=self.common) for _ in range(2))
        results = []
        for several in (False, True):
            residual, out = self.residual.clone(), torch.zeros(rows, HIDDEN, dtype=self.out)
            scales = torch.zeros(rows)
            if several and way == "own":
                residual = self.block.part(self.rank, RESIDUAL, torch.float32)[: TOKENS * HIDDEN].view(TOKENS, HIDDEN)
                residual[self.rank :: self.ranks] = self.residual[self.rank :: self.ranks]
                out = self.block.part(self.rank, NORMED, self.out)[: rows * HIDDEN].view(rows, HIDDEN)
                scales = self.block.part(self.rank, NORMED_SCALES, torch.float32)[:rows]
            call = step_layout.add_norm_launch(
                residual, x if several else total, weights, NormOut(out, scales if self.shape.fp8 else 0), rows, 1e-6,
                gathered=0 if taken is None else taken, ranked=self.ranked if several else None,
            )  # fmt: skip
            x_dtype = str(x.dtype if several else torch.float32).removeprefix("torch.")
            several_ranks = {"ranks": self.ranks, "way": way} if several else {}
            spec = add_norm_spec(self.shape, 4, x_dtype=x_dtype, gather=taken is not None, **several_ranks)
            self.launch(spec, call)
            results.append((residual, out, scales))
        mine = slice(self.rank, None, self.ranks) if way == "own" else slice(None)
        assert torch.equal(results[0][0][mine], results[1][0][mine])
        if way == "own":
            self.meet()
        for one, all_ranks in zip(results[0][1:], results[1][1:], strict=True):
            assert torch.equal(one, all_ranks)
        self.residual = results[0][0]

    def products(self, rows: int, dtype: torch.dtype, columns: int = HIDDEN) -> list[torch.Tensor]:
        found = [torch.randn(rows, columns, generator=self.common) for _ in range(self.ranks)]
        for part in found:
            part[0, :4] = torch.tensor([0.0, -0.0, 1e-30, -1e-45])
        return [part.to(dtype) for part in found]

    def meet(self) -> None:
        self.launch(meet_spec(self.ranks), exchange_layout.meet_launch(self.ranked))

    def launch(self, spec: KernelSpec, call: Launch) -> None:
        self.delay()
        interpreted.launch(spec, call, self.block.all, self.block.turn)

    def delay(self) -> None:
        if self.delays.random() < 0.3:
            time.sleep(self.delays.random() * 0.01)


def run_ranks(ranks: int, dtype: str, steps: int) -> Block:
    pushed = "float32" if dtype == "float16" else "bfloat16"
    block = Block(ExchangeLayout(ranks, HIDDEN, pushed, PUSHED_ROWS + 1, 4, TOKENS, COLUMNS))
    context = multiprocessing.get_context("fork")
    found = [context.Process(target=Rank(block, rank, dtype, 5).run, args=(steps,)) for rank in range(ranks)]
    for process in found:
        process.start()
    for process in found:
        process.join(60 + steps)
        process.kill()
    assert [process.exitcode for process in found] == [0] * ranks
    return block


@pytest.mark.parametrize(
    ("ranks", "dtype", "steps"),
    [(2, "bfloat16", 12), (3, "float16", 6), (4, "fp8", 5), pytest.param(4, "bfloat16", 60, marks=pytest.mark.long)],
)
def test_ranks_hold_the_sum_in_rank_order(ranks: int, dtype: str, steps: int) -> None:
    block = run_ranks(ranks, dtype, steps)
    assert not block.failed.any()
    slots = [each[exchange_layout.SLOTS_BYTES : block.layout.part_offsets[0]] for each in block.all]
    assert not any(each.any() for each in slots), "slots are cleared"


def test_a_rank_alone_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SPINS", type(exchange.SPINS)(5))
    block = Block(ExchangeLayout(2, HIDDEN, "bfloat16", TOKENS, 4, TOKENS, COLUMNS))
    Rank(block, 0, "bfloat16", 5).meet()
    assert block.failed.item() == 1 and block.all[0].view(torch.int32)[BROKEN] == 1
    block.failed.zero_()
    with pytest.raises(AssertionError):
        Rank(block, 0, "bfloat16", 5).push(2, random.Random(0))
    assert block.failed.item() == 1
