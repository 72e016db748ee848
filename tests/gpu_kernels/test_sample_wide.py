"""Rows whose filters leave many tokens, against the host's sampler: in the interpreter, and on a GPU."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import torch
from kernel_checks import Runner
from step_runners import RUNNERS

from wicore_trt.plugins.kernels.step_specs import wide_spec
from wicore_trt.plugins.step_layout import Logits, SampleArrays, wide_launch
from wicore_trt.runtime.batch import SequenceSlice
from wicore_trt.runtime.sampler import Sampler
from wicore_trt.types import SamplingParams


def choose(
    run: Runner, logits: torch.Tensor, params: list[SamplingParams], *, softcap: float = 0.0, left: list[int]
) -> float:
    """The rows `left` are the host's tokens afterwards, the others are as they were; two programs share the rows.
    Returns the seconds of the launch."""
    rows, vocab = logits.shape
    stored = torch.cat([logits, torch.full((1, vocab), math.nan)])
    capped = (torch.tanh(logits.double() / softcap) * softcap).float() if softcap else logits
    starts = [random.randrange(2, 29) for _ in params]
    seeds = [random.getrandbits(64) for _ in params]
    slices = [SequenceSlice(r, [1], starts[r], {}, True, p, 3, seeds[r]) for r, p in enumerate(params)]
    want = [t.token_ids[0] for t in Sampler().sample(capped, slices).sampled]
    status = torch.tensor([2 if r in left else 0 for r in range(rows)] + [2], dtype=torch.int32)
    doubles = {
        name: run.put(torch.tensor([float(getattr(p, field)) for p in params], dtype=torch.float64))
        for name, field in (("temperatures", "temperature"), ("top_p", "top_p"), ("min_p", "min_p"))
    }
    arrays: dict[str, Any] = {
        **doubles,
        "tokens": run.put(torch.full((rows + 1,), -7, dtype=torch.int32)),
        "status": run.put(status),
        "peaks": run.put(capped.amax(1)),
        "top_k": run.ints([p.top_k for p in params]),
        "indices": run.ints([start - 2 for start in starts]),
        "seeds": run.put(torch.tensor([s - (1 << 64) if s >> 63 else s for s in seeds])),
    }
    weights = run.put(torch.full((2, vocab), math.nan, dtype=torch.float64))
    there = Logits(run.put(stored), rows, vocab)
    sampled = SampleArrays(chunk_max=0, chunk_token=0, **arrays)
    begun = time.perf_counter()
    run.launch(wide_spec(vocab, softcap), wide_launch(there, sampled, weights, 2))
    seconds = time.perf_counter() - begun
    assert arrays["status"].tolist() == [0] * rows + [2]
    assert arrays["tokens"].tolist() == [want[r] if r in left else -7 for r in range(rows)] + [-7]
    return seconds


WIDE = [
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=50.0, top_k=900),
    SamplingParams(temperature=3.0, top_k=700, top_p=0.97, min_p=0.5),
    SamplingParams(temperature=20.0, min_p=0.85),
    SamplingParams(top_k=3),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=0.999999, top_k=1 << 30),
]


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("ties", [False, True])
def test_tokens_are_the_hosts(run: Runner, ties: bool) -> None:
    params = [random.choice(WIDE[:2]), random.choice(WIDE[2:4]), random.choice(WIDE[4:])]
    logits = torch.randn(3, 1500)
    if ties:
        logits = (logits * 2).round() / 2
    logits[:, 3::11] = -math.inf
    choose(run, logits, params, left=[random.choice([0, 2]), 1])


@pytest.mark.parametrize("run", RUNNERS)
def test_equal_logits_are_drawn_by_token_id(run: Runner) -> None:
    """All of 2,112 tokens, more than a program reads at once; the nucleus is the first half."""
    choose(run, torch.zeros(1, 2112), [random.choice([SamplingParams(top_p=0.5), SamplingParams(top_k=9)])], left=[0])


@pytest.mark.parametrize("run", RUNNERS)
def test_soft_cap(run: Runner) -> None:
    choose(run, torch.randn(1, 700) * 40 - 100, [SamplingParams(temperature=9.0, top_p=0.8)], softcap=30.0, left=[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gemmas_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the time of a row; the first launch compiles."""
    params = [random.choice(WIDE) for _ in range(4)]
    seconds = [choose(RUNNERS[-1].values[0], torch.randn(4, 262_208) * 2, params, left=[0, 1, 2, 3]) for _ in range(3)]
    with capsys.disabled():
        print(f"\nwide filters over 262,208 tokens: {min(seconds) / 2 * 1e3:.2f} ms a row")
