"""Geometry of a step as tensors, which every lowering reads; built once per step from the plain batch.

Knows the batch and the page size; must not know weights, devices or operators. Invariant: the tensors hold all that
`StepBatch` says about computing (sampling parameters apart), in the order of its slices.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import ge

import numpy as np
import torch

from wicore_trt.arithmetic import div_ceil
from wicore_trt.runtime.batch import StepBatch
from wicore_trt.runtime.executor import KVLayout

ABSENT = -1


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Contiguous CPU tensors of a step with N tokens in S slices, of which R are sampled. Tokens of slice s are rows
    [cu_seqlens[s], cu_seqlens[s + 1]) with consecutive positions. `page_tables[group][s, j]` is the pool slot of
    positions [j * page_tokens, (j + 1) * page_tokens) of slice s; -1 for a page that slid out of the window or lies
    after the slice's end. `sample_rows`, ascending, are the rows before the slices' targets and the last rows of the
    slices that sample. `images` are the slices' (first row, count, slot). With images a row sees keys up to `key_ends`,
    exclusive: the end of its image, for text the row's own position + 1."""

    token_ids: torch.Tensor  # int64[N]
    positions: torch.Tensor  # int32[N]
    cu_seqlens: torch.Tensor  # int32[S + 1]
    page_tables: dict[str, torch.Tensor]  # group -> int32[S, P], P the pages of the longest slice
    sample_rows: torch.Tensor  # int64[R]
    images: tuple[tuple[int, int, int], ...] = ()
    key_ends: torch.Tensor | None = None  # int32[N]; None without images

    @classmethod
    def from_batch(cls, batch: StepBatch, layout: KVLayout, groups: Sequence[str]) -> StepInputs:
        """Flatten `batch` for the model's layer groups `groups`, in a constant number of tensor operations."""
        slices = batch.slices
        counts = [len(s.token_ids) for s in slices]
        starts = [s.start for s in slices]
        assert slices and min(counts) > 0 and min(starts) >= 0, "a step has slices and they have tokens"
        # Lists where there is a number a slice: behind a step over all weights each numpy call costs some 8 us.
        ends = list(accumulate(counts, initial=0))
        cu_seqlens, positions = np.array(ends, np.int32), np.array(starts, np.int32)
        token_ids = np.array([token for s in slices for token in s.token_ids], np.int64)
        if ends[-1] > len(slices):
            positions = np.arange(ends[-1], dtype=np.int32) + np.repeat(positions - cu_seqlens[:-1], counts)
        sample_rows = np.array([end - 1 for end, s in zip(ends[1:], slices, strict=True) if s.sample], np.int64)
        if any(targets := [s.targets for s in slices]):
            scored = [np.arange(len(t)) + begin for t, begin in zip(targets, cu_seqlens, strict=False)]
            sample_rows = np.sort(np.concatenate([sample_rows, *scored]))
        images, key_ends = list[tuple[int, int, int]](), None
        if any(seen := [s.images for s in slices]):
            key_ends = positions + np.int32(1)
            for s, own, begin in zip(slices, seen, ends, strict=False):
                for first, count, slot in own:
                    assert 0 <= first < first + count <= len(s.token_ids), "a step computes an image whole"
                    images.append((begin + first, count, slot))
                    key_ends[begin + first : begin + first + count] = s.start + first + count
        used = [div_ceil(start + count, layout.page_tokens) for start, count in zip(starts, counts, strict=True)]
        inside = np.arange(max(used)) < np.array(used)[:, None]
        return cls(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            page_tables={
                g: torch.from_numpy(page_table([s.pages[g] for s in slices], used, inside, layout.num_pages[g]))
                for g in groups
            },
            sample_rows=torch.from_numpy(sample_rows),
            images=tuple(images),
            key_ends=None if key_ends is None else torch.from_numpy(key_ends),
        )


def page_table(tables: list[Sequence[int]], used: list[int], inside: np.ndarray, num_pages: int) -> np.ndarray:
    """Make an int32 table of the shape of `inside` [S, pages]: the first used[s] pages, all in the pool, else
    ABSENT."""
    lengths = [len(table) for table in tables]
    if lengths != used:  # some were reserved ahead
        assert all(map(ge, lengths, used)), "a sequence lacks pages"
        tables = [table[:count] for table, count in zip(tables, used, strict=True)]
    # one copy for all rows: arrays give their memory as it is
    flat = np.frombuffer(b"".join([t if isinstance(t, array) else array("i", t) for t in tables]), np.int32)
    # Kernels index the pool with these unchecked, so a bad page must stop here.
    assert not flat.size or (flat.min() >= ABSENT and flat.max() < num_pages), "a page is outside its pool"
    table = np.full(inside.shape, ABSENT, np.int32)
    table[inside] = flat
    return table
