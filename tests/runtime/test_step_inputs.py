"""StepInputs against a token-by-token reading of the batch."""

from __future__ import annotations

import random

import pytest
import torch

from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.step_inputs import StepInputs

GROUPS = ("global", "local")
PAGE_TOKENS = 4
LAYOUT = KVLayout(PAGE_TOKENS, "float32", {"global": 100, "local": 50}, {"global": 1, "local": 1})


def random_slice(rng: random.Random, seq_id: int) -> SequenceSlice:
    start, count = rng.choice((0, rng.randrange(40))), rng.choice((1, rng.randint(1, 30)))
    pages = -(-(start + count) // PAGE_TOKENS) + rng.randrange(3)  # a scheduler may reserve ahead
    tables = {g: rng.sample(range(LAYOUT.num_pages[g]), pages) for g in GROUPS}
    tables["local"][: start // PAGE_TOKENS // 2] = [-1] * (start // PAGE_TOKENS // 2)
    images, at = list[tuple[int, int, int]](), rng.randrange(4)
    while rng.random() < 0.6 and (size := rng.randint(1, 9)) + at <= count:
        images.append((at, size, rng.randrange(5)))
        at += size + rng.randrange(3)
    ids = [rng.randrange(1000) for _ in range(count)]
    return SequenceSlice(seq_id, ids, start, tables, rng.random() < 0.5, images=tuple(images))


@pytest.mark.parametrize("seed", range(20))
def test_matches_batch(seed: int) -> None:
    rng = random.Random(seed)
    slices = [random_slice(rng, i) for i in range(rng.randint(1, 6))]
    inputs = StepInputs.from_batch(StepBatch(slices), LAYOUT, GROUPS)
    tokens, positions, rows, ends, images = [], [], [], [], []
    for i, s in enumerate(slices):
        assert inputs.cu_seqlens[i] == len(tokens)
        images += [(len(tokens) + first, size, slot) for first, size, slot in s.images]
        for n in range(len(s.token_ids)):
            own = [first + size for first, size, _ in s.images if first <= n < first + size]
            ends.append(s.start + (own[0] if own else n + 1))
        tokens += s.token_ids
        positions += range(s.start, s.start + len(s.token_ids))
        if s.sample:
            rows.append(len(tokens) - 1)
        for group in GROUPS:
            table = inputs.page_tables[group][i].tolist()
            used = -(-(s.start + len(s.token_ids)) // PAGE_TOKENS)
            assert table == s.pages[group][:used] + [-1] * (len(table) - used)
    assert inputs.cu_seqlens[-1] == len(tokens)
    assert inputs.token_ids.tolist() == tokens and inputs.token_ids.dtype == torch.int64
    assert inputs.positions.tolist() == positions and inputs.positions.dtype == torch.int32
    assert inputs.sample_rows.tolist() == rows and inputs.sample_rows.dtype == torch.int64
    assert list(inputs.images) == images
    if images:
        assert inputs.key_ends is not None and inputs.key_ends.tolist() == ends and inputs.key_ends.dtype == torch.int32
    else:
        assert inputs.key_ends is None, "steps of text have none"
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in inputs.page_tables.values())


@pytest.mark.parametrize("pages", [[0, 100], [0, -2], [0]])
def test_refuses_pages_outside_the_pool_or_missing(pages: list[int]) -> None:
    batch = StepBatch([SequenceSlice(0, [1] * 6, 0, {"global": pages})])
    with pytest.raises(AssertionError):
        StepInputs.from_batch(batch, LAYOUT, ("global",))


@pytest.mark.parametrize("image", [(3, 4, 0), (-1, 2, 0), (2, 0, 0)])
def test_refuses_images_that_are_not_whole(image: tuple[int, int, int]) -> None:
    batch = StepBatch([SequenceSlice(0, [1] * 6, 0, {"global": [0, 1]}, images=(image,))])
    with pytest.raises(AssertionError):
        StepInputs.from_batch(batch, LAYOUT, ("global",))
