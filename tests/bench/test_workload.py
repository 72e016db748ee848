"""Requests: determinism, lengths, no accidental prefix sharing."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import pytest

from wicore_trt.bench.workload import Workload, draw_arrivals


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
        "from itertools import islice;"
        "from wicore_trt.bench.workload import Workload, draw_arrivals;"
        "print(Workload(1000, seed=5).take(2, 4, 1), list(islice(draw_arrivals(2.0, seed=5), 3)))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other == f"{Workload(1000, seed=5).take(2, 4, 1)} {list(islice(draw_arrivals(2.0, seed=5), 3))}\n"
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
