"""Drives an executor through prompts and their continuations, and keeps what it said at every position.

Knows executors and pages; not oracles. Invariants: pages are dealt at random, so that nothing leans on their order; a
sequence's pages are its own; the logits that are kept are those of the step that was run, not of a rerun.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.answers.data import Piece, plan_step
from wicore_trt.arithmetic import div_ceil
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.backends.triton.executor import TritonExecutor
from wicore_trt.errors import WicoreError
from wicore_trt.model.spec import GROUPS
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.executor import Executor, KVLayout
from wicore_trt.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
Step = Callable[[list[SequenceSlice]], tuple[list[int], torch.Tensor]]
"""Run a step: the greedy token and the logits float32 [S, vocab] after each slice; valid until the next step."""


def triton_step(executor: Executor, rank: TritonExecutor) -> Step:
    """Tokens are those that the device chose; the logits are what it chose from, on `rank` of the executor."""

    def step(slices: list[SequenceSlice]) -> tuple[list[int], torch.Tensor]:
        result = executor.execute(StepBatch(slices))
        if result.failed:
            raise WicoreError(f"sequences failed: {result.failed}.")
        return [t.token_ids[0] for t in result.sampled], rank.memory.logits[rank.rows_of(slices)].float()

    return step


def torch_step(executor: TorchExecutor) -> Step:
    """The torch operators, by which oracles are made."""

    def step(slices: list[SequenceSlice]) -> tuple[list[int], torch.Tensor]:
        ends = torch.tensor([len(s.token_ids) for s in slices]).cumsum(0) - 1
        logits = executor.logits(StepBatch(slices), ends).float()
        return logits.argmax(1).tolist(), logits

    return step


def count_pages(lengths: Sequence[int], page_tokens: int) -> dict[str, int]:
    """Count KV pages of each layer group for sequences of these lengths that keep them all."""
    return dict.fromkeys(GROUPS, sum(div_ceil(n, page_tokens) for n in lengths))


@dataclass
class Said:
    """Answers of a run at P sequences x T positions: `tokens` int32, `marks` int64, which name the logits bit by bit,
    and the logits `values` float32 [P, T, C] of `Run.ids`."""

    tokens: np.ndarray
    marks: np.ndarray
    values: np.ndarray | None = None


@dataclass
class Run:
    """Prompts through an executor. `forced` int [P, T]: tokens that the sequences go on with in place of their own.
    `ids` int [P, T, C]: whose logits to keep. `seed` deals the pages."""

    step: Step
    layout: KVLayout
    new_tokens: int
    forced: np.ndarray | None = None
    ids: np.ndarray | None = None
    marked: bool = True
    seed: int = 0
    _weights: torch.Tensor | None = field(default=None, init=False)
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def together(self, prompts: Sequence[Sequence[int]], budget: int, which: Sequence[int] | None = None) -> Said:
        """Run all prompts at once, by at most `budget` tokens a step. `which`: their rows in `forced` and `ids`."""
        which = range(len(prompts)) if which is None else which
        shape = (len(prompts), self.new_tokens)
        said = Said(np.full(shape, -1, np.int32), np.zeros(shape, np.int64))
        if self.ids is not None:
            said.values = np.full((*shape, self.ids.shape[2]), np.nan, np.float32)
        tokens = [list(p) for p in prompts]
        lengths = [len(p) for p in prompts]
        wanted = [n + self.new_tokens - 1 for n in lengths]  # the last token is never computed on
        pages, done = self._deal([n + 1 for n in wanted]), [0] * len(prompts)
        while pieces := plan_step(done, lengths, wanted, budget):
            chosen, logits = self.step([self._slice(p, tokens[p.sequence], pages[p.sequence]) for p in pieces])
            for piece in pieces:
                done[piece.sequence] = piece.start + piece.count
            ends = [(row, p.sequence) for row, p in enumerate(pieces) if done[p.sequence] >= lengths[p.sequence]]
            if not ends:
                continue
            places = [(i, done[i] - lengths[i]) for _, i in ends]
            self._keep(said, logits[[row for row, _ in ends]], places, which)
            for (row, i), (_, at) in zip(ends, places, strict=True):
                said.tokens[i, at] = chosen[row]
                tokens[i].append(chosen[row] if self.forced is None else int(self.forced[which[i], at]))
        return said

    def groups(self, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[int]], budget: int) -> Said:
        """Run the prompts of each group at once, group after group; together they are all prompts."""
        parts = [(rows, self.together([prompts[i] for i in rows], budget, rows)) for rows in groups]
        order = np.argsort(np.concatenate([np.asarray(rows) for rows, _ in parts]))
        return Said(*(np.concatenate([getattr(said, n) for _, said in parts])[order] for n in ("tokens", "marks")))

    def _keep(self, said: Said, logits: torch.Tensor, places: Sequence[tuple[int, int]], which: Sequence[int]) -> None:
        rows, at = [i for i, _ in places], [j for _, j in places]
        if self.marked:
            said.marks[rows, at] = self._mark(logits)
        if self.ids is not None and said.values is not None:
            wanted = torch.from_numpy(self.ids[[which[i] for i in rows], at].astype(np.int64)).to(logits.device)
            said.values[rows, at] = logits.gather(1, wanted).cpu().numpy()

    def _mark(self, logits: torch.Tensor) -> np.ndarray:
        """Compute a number per row that any changed bit changes: the sum of all bit patterns times odd random
        numbers, which has no order."""
        if self._weights is None:
            generator = torch.Generator().manual_seed(1)
            drawn = torch.randint(-(1 << 62), 1 << 62, (logits.shape[1],), generator=generator) * 2 + 1
            self._weights = drawn.to(logits.device)
        bits = logits.contiguous().view(torch.int32).to(torch.int64)
        return (bits * self._weights).sum(1).cpu().numpy()

    def _deal(self, lengths: Sequence[int]) -> list[dict[str, list[int]]]:
        """Deal other pages each time, so that a slot does not hold the right values already."""
        size = self.layout.page_tokens
        decks = {g: self._rng.sample(range(n), n) for g, n in self.layout.num_pages.items()}
        counts = [div_ceil(n, size) for n in lengths]
        assert all(sum(counts) <= len(deck) for deck in decks.values()), "the pool is too small for these sequences"
        return [{g: [deck.pop() for _ in range(count)] for g, deck in decks.items()} for count in counts]

    @staticmethod
    def _slice(piece: Piece, tokens: list[int], pages: dict[str, list[int]]) -> SequenceSlice:
        part = tokens[piece.start : piece.start + piece.count]
        return SequenceSlice(piece.sequence, part, piece.start, pages, sample=True, params=GREEDY, prompt_len=1)
