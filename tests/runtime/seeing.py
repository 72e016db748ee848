"""Drives executors with images in prompts, given their features."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from parity.paged import PagedSequence, relative_error
from parity.tiny import TinyModel
from runtime.triton_cpu import Driver

from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.dtypes import TORCH_DTYPES

SLOTS, SOFT = 3, 47
Part = list[int] | int
"""Token ids, or the slot of an image."""


class Seeing(Driver):
    """`Driver` of sequences made of parts."""

    def __init__(self, executor: Any, features: torch.Tensor, seed: int = 0) -> None:
        super().__init__(executor, seed)
        held = executor.images
        if held is not None and held.features.shape[1:] == features.shape[1:]:  # where graphs read them
            with torch.inference_mode():
                held.features[: len(features)].copy_(features)
        else:
            executor.images = SimpleNamespace(features=features, tokens=features.shape[1], close=lambda: None)
        if more := getattr(getattr(getattr(executor, "model", None), "launcher", None), "more", None):
            more.append(features)
        self.tokens = features.shape[1]
        self.images: tuple[tuple[int, int, int], ...] = ()

    def _slice(self, sequence: PagedSequence, token_ids: list[int]) -> SequenceSlice:
        piece = super()._slice(sequence, token_ids)
        piece.images = self.images
        return piece

    def piece(self, sequence: PagedSequence, parts: Sequence[Part]) -> SequenceSlice:
        """The next tokens of a sequence."""
        token_ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, int):
                images.append((len(token_ids), self.tokens, part))
            token_ids += [SOFT] * self.tokens if isinstance(part, int) else part
        self.images = tuple(images)
        found = self._slice(sequence, token_ids)
        self.images = ()
        sequence.token_ids += token_ids
        return found

    def see(self, work: Sequence[tuple[PagedSequence, Sequence[Part]]], **batch: Any) -> torch.Tensor:
        """Logits behind the given parts of each sequence, computed in one step; `attention` is what was measured."""
        result = self.executor.execute(StepBatch([self.piece(*given) for given in work], **batch))
        self.attention = result.attention
        for sequence, _ in work:
            self._slide(sequence)
        return self.sampler.logits


def features_of(model: TinyModel, dtype: str, tokens: int) -> torch.Tensor:
    return torch.randn(SLOTS, tokens, model.spec.hidden_size).to(TORCH_DTYPES[dtype])


def count_images(executor: Any) -> list[int]:
    """Tokens of the graphs with images that run from now on."""
    ran: list[int] = []
    for plan, graph in [*executor.prompt_graphs.items()]:
        if plan.images:
            executor.prompt_graphs[plan] = lambda graph=graph, n=plan.tokens: (ran.append(n), graph())
    return ran


def text(count: int) -> list[int]:
    return [random.randrange(SOFT) for _ in range(count)]


def compare(
    mine: Seeing, oracle: Seeing, steps: Sequence[Sequence[list[Part]]], tolerance: float, **batch: Any
) -> None:
    sequences = [[driver.new_sequence() for _ in steps[0]] for driver in (mine, oracle)]
    for parts in steps:
        found = [
            d.see(list(zip(own, parts, strict=True)), **batch) for d, own in zip((mine, oracle), sequences, strict=True)
        ]
        error = relative_error(*found)
        print(f"logits differ by {error:.4f}")
        assert error < tolerance, parts
        assert {*mine.attention} == {*oracle.attention}
        for seq_id, masses in mine.attention.items():
            assert torch.allclose(torch.tensor(masses), torch.tensor(oracle.attention[seq_id]), rtol=0.1, atol=0.1)
