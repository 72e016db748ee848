"""Drive an executor as a scheduler would, with random page slots, and see the logits of every sampled row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.model.spec import GROUPS, LOCAL
from wicore_trt.runtime.batch import SampledTokens, SequenceSlice, StepBatch, StepResult
from wicore_trt.runtime.sampler import Sampler
from wicore_trt.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class RecordingSampler(Sampler):
    """Stands in for the executor's sampler: greedy, and keeps the step's logits [R, vocab]."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.empty(0)

    def sample(self, logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> StepResult:
        self.logits = logits.float().cpu().clone()
        tokens = logits.argmax(1).tolist()
        return StepResult([SampledTokens(s.seq_id, (t,)) for s, t in zip(slices, tokens, strict=True)])


@dataclass
class PagedSequence:
    """Tokens computed so far and the pool slots that hold them."""

    seq_id: int
    token_ids: list[int] = field(default_factory=list)
    pages: dict[str, list[int]] = field(default_factory=lambda: {g: [] for g in GROUPS})


class PagedDriver:
    """Owns an executor's pools. Slots are handed out at random; a slot that is given back is poisoned again."""

    def __init__(self, executor: TorchExecutor, seed: int = 0) -> None:
        self.executor = executor
        self.rng = random.Random(seed)
        self.sampler = RecordingSampler()
        executor._sampler = self.sampler
        self._free = {g: list(slots) for g, slots in executor.layout.separate_slots().items()}
        self._count = 0

    def new_sequence(self) -> PagedSequence:
        self._count += 1
        return PagedSequence(self._count)

    def step(self, work: Sequence[tuple[PagedSequence, list[int]]]) -> torch.Tensor:
        """Compute the given next tokens of each sequence in one step: logits [len(work), vocab] after each."""
        slices = [self._slice(sequence, token_ids) for sequence, token_ids in work]
        result = self.executor.execute(StepBatch(slices))
        assert [t.seq_id for t in result.sampled] == [s.seq_id for s, _ in work]
        for sequence, token_ids in work:
            sequence.token_ids += token_ids
            self._slide(sequence)
        return self.sampler.logits

    def _slice(self, sequence: PagedSequence, token_ids: list[int]) -> SequenceSlice:
        start = len(sequence.token_ids)
        needed = -(-(start + len(token_ids)) // self.executor.layout.page_tokens)
        for group, free in self._free.items():
            while len(sequence.pages[group]) < needed:
                sequence.pages[group].append(free.pop(self.rng.randrange(len(free))))
        pages = {g: list(p) for g, p in sequence.pages.items()}
        return SequenceSlice(sequence.seq_id, token_ids, start, pages, sample=True, params=GREEDY)

    def _slide(self, sequence: PagedSequence) -> None:
        """Give back the local pages that no later token sees."""
        first_visible = max(0, len(sequence.token_ids) - self.executor.spec.sliding_window + 1)
        for j in range(first_visible // self.executor.layout.page_tokens):
            self._give_back(LOCAL, sequence.pages[LOCAL], j)

    def finish(self, sequence: PagedSequence) -> None:
        for group in self._free:
            for j in range(len(sequence.pages[group])):
                self._give_back(group, sequence.pages[group], j)

    def _give_back(self, group: str, pages: list[int], j: int) -> None:
        if group in self._free and pages and pages[j] >= 0:
            self.executor.pools[group][pages[j]] = torch.nan
            self._free[group].append(pages[j])
            pages[j] = -1


def random_chunks(rng: random.Random, token_ids: list[int], largest: int) -> list[list[int]]:
    """Cut a prompt at random, single tokens included."""
    chunks = []
    while token_ids:
        size = rng.choice((1, rng.randint(1, largest), largest))
        chunks.append(token_ids[:size])
        token_ids = token_ids[size:]
    return chunks


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max |a - b| / max |b|; infinite when something is not finite."""
    if not actual.isfinite().all():
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max())
