"""TritonExecutor in Triton's interpreter: logits against TorchExecutor, padding, pages, greedy tokens, failures."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install wicore-trt[triton]")

from parity.paged import random_chunks, relative_error  # noqa: E402
from runtime.triton_cpu import Driver, executor_of, oracle_of, small_model  # noqa: E402

TOLERANCE = {"bfloat16": 0.03, "float16": 0.004}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_random_chunks_of_several_sequences(dtype: str) -> None:
    model, rng = small_model(3), random.Random(3)
    drivers = [Driver(executor_of(model, dtype), 1), Driver(oracle_of(model, dtype), 2)]
    compare(drivers, [[rng.randrange(64) for _ in range(n)] for n in (13, 9, 5)], rng, TOLERANCE[dtype])


def compare(drivers: list[Any], prompts: list[list[int]], rng: random.Random, tolerance: float) -> None:
    """Feed the prompts in random chunks, mixed, and compare the logits of every step."""
    sequences = [[driver.new_sequence() for _ in prompts] for driver in drivers]
    left = [random_chunks(rng, p, 6) for p in prompts]
    while any(left):
        active = [i for i, chunks in enumerate(left) if chunks]
        work = [(i, left[i].pop(0)) for i in rng.sample(active, rng.randint(1, len(active)))]
        actual, expected = (d.step([(s[i], t) for i, t in work]) for d, s in zip(drivers, sequences, strict=True))
        assert relative_error(actual, expected) < tolerance, work
