"""SamplingParams refuses every value that means nothing, naming the field."""

from __future__ import annotations

import math

import pytest

from wicore_trt.errors import InvalidRequestError
from wicore_trt.types import SamplingParams

BAD = {
    "max_tokens": (0, -1, 2**40, 1.5, True, math.nan),
    "min_tokens": (-1, 0.5),
    "temperature": (-0.1, math.nan, math.inf, 1e9, "hot"),
    "top_k": (-1, 2.5, 2**40),
    "top_p": (0.0, -1.0, 1.01, math.nan),
    "min_p": (-0.1, 1.1, math.nan),
    "repetition_penalty": (0.0, -1.0, math.inf),
    "presence_penalty": (-2.1, 2.1, math.nan),
    "frequency_penalty": (-2.1, 2.1, -math.inf),
    "seed": (2**64, -(2**63) - 1, 1.0),
    "n": (0, 33, -1),
    "logprobs": (-1, 21),
    "logit_bias": ({0: math.nan}, {0: 101.0}, {-1: 0.0}, dict.fromkeys(range(1025), 0.0)),
    "stop": (("",), ("x" * 257,), ("a",) * 17),
    "stop_token_ids": ((-1,), tuple(range(1025)), (1.5,)),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD.items() for v in values])
def test_bad_values_are_refused(field, value):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{field: value})
    assert error.value.field == field


def test_min_tokens_must_not_exceed_max_tokens():
    with pytest.raises(InvalidRequestError):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_the_limits_themselves_are_fine():
    SamplingParams(
        max_tokens=1, temperature=100.0, top_p=1.0, min_p=1.0, seed=2**64 - 1, n=32, logprobs=20,
        logit_bias={0: -100.0}, stop=("x" * 256,) * 16, stop_token_ids=tuple(range(1024)),
    )  # fmt: skip
