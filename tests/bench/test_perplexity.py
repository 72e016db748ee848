"""Perplexity over windows against direct computations, the engine's against transformers'."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from parity.tiny import tiny_model

from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.bench.perplexity import (
    ROWS,
    chosen_logprobs,
    compute_perplexity,
    cut_windows,
    default_text,
    pages_for,
    score_tokens,
)
from wicore_trt.errors import ConfigError
from wicore_trt.runtime.options import ExecutorOptions

BOS = 2


@pytest.mark.parametrize("seed", range(20))
def test_windows_score_every_token_once_with_enough_before_it(seed):
    rng = random.Random(seed)
    context, count = rng.randint(2, 40), rng.randint(1, 200)
    stride = rng.randint(1, context)
    scored = []
    for number, (begin, end, first) in enumerate(cut_windows(count, context, stride)):
        assert 0 <= begin <= first < end <= count and end - begin <= context
        assert number == 0 or first - begin >= context - stride
        scored += range(first, end)
    assert scored == list(range(count))


@pytest.mark.parametrize("bos_id", [BOS, None])
@pytest.mark.parametrize("stride", [None, 1, 5, 15])
def test_perplexity_of_a_known_distribution(bos_id, stride):
    """A scorer whose probabilities depend on token and prefix length: the mean is computed here token by token."""
    context, tokens = 16, [random.Random(1).randrange(50) for _ in range(101)]
    seen = []

    def scorer(window, first):
        assert len(window) <= context and window[0] == (BOS if bos_id is not None else window[0])
        assert all(isinstance(t, int) for t in window) and first >= 1
        seen.extend(window[first:])
        return [-0.01 * t for t in window[first:]]

    result = compute_perplexity(scorer, tokens, bos_id=bos_id, context=context, stride=stride)
    expected = tokens if bos_id is not None else tokens[1:]
    assert seen == expected and result.tokens == len(expected)
    assert result.value == pytest.approx(math.exp(0.01 * np.mean(expected)))


@pytest.mark.parametrize(("stride", "bos_id"), [(0, BOS), (16, BOS), (16, None)])
def test_a_stride_that_would_skip_tokens_is_refused(stride, bos_id):
    with pytest.raises(ConfigError, match="stride"):
        compute_perplexity(lambda w, f: [], [1] * 50, bos_id=bos_id, context=16, stride=stride)


def test_chosen_logprobs_against_numpy():
    logits = torch.randn(7, 33) * 20
    targets = torch.randint(0, 33, (7,))
    wide = logits.double().numpy()
    probabilities = np.exp(wide - wide.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    expected = np.log(probabilities[np.arange(7), targets.numpy()])
    np.testing.assert_allclose(chosen_logprobs(logits, targets), expected, atol=1e-5)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_an_engine_scores_like_transformers(seed, kernels):
    """Windows longer than a chunk of rows and than the sliding window, page size that does not divide them."""
    model = tiny_model(seed)
    rng = random.Random(seed)
    tokens = [rng.randrange(model.spec.vocab_size) for _ in range(500)]
    context, stride, page_tokens = ROWS + 71, rng.choice((40, 150)), rng.choice((4, 16))
    settings = ExecutorOptions(
        device="cpu", kernels=kernels, page_tokens=page_tokens, kv_pages=pages_for(context, page_tokens),
        max_batch_tokens=ROWS,
    )  # fmt: skip
    executor = TorchExecutor.from_tensors(model.spec, "float32", model.tensors, settings)
    ours = compute_perplexity(
        lambda w, f: score_tokens(executor, w, f), tokens, bos_id=BOS, context=context, stride=stride
    )

    total, done, begin = 0.0, 0, 0
    while done < len(tokens):
        window = [BOS, *tokens[begin : begin + context - 1]]
        logprobs = model.hf_logits(window).double().log_softmax(-1)
        for position in range(1 + done - begin, len(window)):
            total -= logprobs[position - 1, window[position]].item()
        done, begin = begin + len(window) - 1, begin + stride
    assert ours.tokens == len(tokens)
    assert ours.nll == pytest.approx(total / len(tokens), abs=2e-5)


def test_the_default_text_is_long_real_prose():
    text = default_text()
    assert len(text) > 200_000 and "Assert statements are a convenient way" in text
