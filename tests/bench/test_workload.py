"""Requests: determinism, lengths, no accidental prefix sharing."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import pytest
from bench.made_requests import make_requests

from wicore_trt.bench.workload import PromptPart, WordList, draw_arrivals


@pytest.mark.parametrize("vocab", [97, 262_144])
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_requests_have_their_lengths_and_avoid_both_ends_of_the_vocabulary(vocab, seed):
    requests = make_requests(vocab, 50, 33, 7, seed=seed)
    assert all(len(r.prompt_token_ids) == 33 and r.output_tokens == 7 for r in requests)
    seen = {t for r in requests for t in r.prompt_token_ids}
    assert vocab // 16 <= min(seen) and max(seen) < vocab - vocab // 16
    assert max(seen) - min(seen) > 0.8 * vocab  # and uses what is between them


def test_the_same_seed_gives_the_same_requests_in_another_process():
    code = (
        "from itertools import islice;"
        "from wicore_trt.bench.workload import PromptPart, WordList, draw_arrivals;"
        "print(WordList(1000, seed=5).tokens(PromptPart('a', 4)), list(islice(draw_arrivals(2.0, seed=5), 3)))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    tokens = WordList(1000, seed=5).tokens(PromptPart("a", 4))
    assert other == f"{tokens} {list(islice(draw_arrivals(2.0, seed=5), 3))}\n"
    assert make_requests(1000, 2, 4, 1, seed=5) != make_requests(1000, 2, 4, 1, seed=6)


def test_no_prompt_is_made_twice():
    prompts = [r.prompt_token_ids for r in make_requests(262_144, 400, 8, 1, seed=3)]
    assert len({p[:4] for p in prompts}) == len(prompts)


def test_a_shared_prefix_is_shared_and_the_rest_is_not():
    prompts = [r.prompt_token_ids for r in make_requests(262_144, 20, 30, 1, seed=4, shared_prefix=20)]
    assert len({p[:20] for p in prompts}) == 1
    assert len({p[20:24] for p in prompts}) == len(prompts)
    assert all(len(p) == 30 for p in prompts)
