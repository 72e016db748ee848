"""Requests and arrival times: determinism, lengths, no accidental prefix sharing, the Poisson law."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

from wicore_trt.bench.workload import Workload, poisson_arrivals


@pytest.mark.parametrize("vocab", [97, 262_144])
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_requests_have_their_lengths_and_avoid_both_ends_of_the_vocabulary(vocab, seed):
    requests = Workload(vocab, seed=seed).take(50, 33, 7)
    assert all(len(r.prompt_token_ids) == 33 and r.output_tokens == 7 for r in requests)
    seen = {t for r in requests for t in r.prompt_token_ids}
    assert vocab // 16 <= min(seen) and max(seen) < vocab - vocab // 16
    assert max(seen) - min(seen) > 0.8 * vocab  # and uses what is between them


def test_the_same_seed_gives_the_same_requests_in_another_process():
    code = (
        "from wicore_trt.bench.workload import Workload, poisson_arrivals;"
        "print(Workload(1000, seed=5).take(2, 4, 1), poisson_arrivals(3, 2.0, seed=5))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other == f"{Workload(1000, seed=5).take(2, 4, 1)} {poisson_arrivals(3, 2.0, seed=5)}\n"
    assert Workload(1000, seed=5).take(2, 4, 1) != Workload(1000, seed=6).take(2, 4, 1)


def test_a_workload_never_repeats_a_prompt():
    workload = Workload(262_144, seed=3)
    prompts = [r.prompt_token_ids for _ in range(4) for r in workload.take(100, 8, 1)]
    assert len({p[:4] for p in prompts}) == len(prompts)


def test_a_shared_prefix_is_shared_and_the_rest_is_not():
    workload = Workload(262_144, seed=4, shared_prefix=20)
    prompts = [r.prompt_token_ids for _ in range(2) for r in workload.take(10, 30, 1)]
    assert len({p[:20] for p in prompts}) == 1
    assert len({p[20:24] for p in prompts}) == len(prompts)
    assert all(len(p) == 30 for p in prompts)


@pytest.mark.parametrize(("rate", "seed"), [(0.5, 0), (40.0, 1)])
def test_arrivals_are_a_poisson_process(rate, seed):
    moments = poisson_arrivals(20_000, rate, seed=seed)
    gaps = [b - a for a, b in zip([0.0, *moments], moments, strict=False)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / rate, rel=0.05)  # exponential: the deviation is the mean
    assert sum(g > 1 / rate for g in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)  # 1 / e
