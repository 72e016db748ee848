"""Logits of random tiny models against transformers in float32."""

from __future__ import annotations

import random

import pytest
from parity.paged import PagedDriver, random_chunks, relative_error
from parity.tiny import TinyModel, tiny_model

from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.runtime.options import ExecutorOptions

TOLERANCE = 1e-4


def driver_of(model: TinyModel, kernels: str, seed: int, dtype: str = "float32") -> PagedDriver:
    settings = ExecutorOptions(
        device="cpu",
        kernels=kernels,
        page_tokens=random.Random(seed).choice((4, 8, 16)),
        kv_pages={"global": 200, "local": 200},
        max_batch_tokens=256,
    )
    return PagedDriver(TorchExecutor.from_tensors(model.spec, dtype, model.tensors, settings), seed)


@pytest.mark.parametrize("seed", range(14))
def test_one_sequence_in_chunks(seed: int, kernels: str) -> None:
    """Prompts longer than the window, cut at random, then decode steps; compared wherever a chunk ends."""
    model, rng = tiny_model(seed), random.Random(seed)
    driver = driver_of(model, kernels, seed)
    length = model.spec.sliding_window * 3 + rng.randint(10, 60)
    token_ids = [rng.randrange(model.spec.vocab_size) for _ in range(length)]
    expected = model.hf_logits(token_ids)
    sequence = driver.new_sequence()
    for chunk in [*random_chunks(rng, token_ids[:-6], 40), *([t] for t in token_ids[-6:])]:
        logits = driver.step([(sequence, chunk)])
        at = len(sequence.token_ids) - 1
        assert relative_error(logits[0], expected[at]) < TOLERANCE, f"position {at}"


@pytest.mark.parametrize("seed", range(100, 104))
def test_mixed_batches(seed: int, kernels: str) -> None:
    """Prefill and decode of several sequences in the same steps, in random order, coming and going."""
    model, rng = tiny_model(seed), random.Random(seed)
    driver = driver_of(model, kernels, seed)
    prompts = [[rng.randrange(model.spec.vocab_size) for _ in range(rng.randint(3, 90))] for _ in range(5)]
    expected = [model.hf_logits(p) for p in prompts]
    sequences = [driver.new_sequence() for _ in prompts]
    left = [random_chunks(rng, p, 25) for p in prompts]
    while any(left):
        active = [i for i, chunks in enumerate(left) if chunks]
        chosen = rng.sample(active, rng.randint(1, len(active)))
        logits = driver.step([(sequences[i], left[i].pop(0)) for i in chosen])
        for row, i in zip(logits, chosen, strict=True):
            at = len(sequences[i].token_ids) - 1
            assert relative_error(row, expected[i][at]) < TOLERANCE, f"sequence {i} position {at}"
            if not left[i]:
                driver.finish(sequences[i])


@pytest.mark.parametrize("pattern", [1, 7])
def test_models_with_one_layer_group(pattern: int, kernels: str) -> None:
    """All layers global, or all local."""
    model = tiny_model(7, num_hidden_layers=3, sliding_window_pattern=pattern)
    assert len(set(model.spec.layer_groups)) == 1
    driver = driver_of(model, kernels, 7)
    token_ids = list(range(2, 90))
    logits = driver.step([(driver.new_sequence(), token_ids)])
    assert relative_error(logits[0], model.hf_logits(token_ids)[-1]) < TOLERANCE
