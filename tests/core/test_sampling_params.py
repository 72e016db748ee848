"""Requests and their parameters refuse every value that means nothing, naming the field."""

from __future__ import annotations

import math

import numpy as np
import pytest

from wicore_trt.errors import InvalidRequestError
from wicore_trt.types import CacheHints, GenerateRequest, SamplingParams, TextRequest

BAD = {
    "max_tokens": (0, -1, 2**40, 1.5, True, math.nan, 10**400),
    "min_tokens": (-1, 0.5),
    "temperature": (-0.1, math.nan, math.inf, 1e9, "hot", 10**400, 5e-324, 9e-7, True),
    "top_k": (-1, 2.5, 2**40),
    "top_p": (0.0, -1.0, 1.01, math.nan),
    "min_p": (-0.1, 1.1, math.nan),
    "repetition_penalty": (0.0, -1.0, math.inf, 1e-45, 1e-38, 0.0099, 100.1),
    "presence_penalty": (-2.1, 2.1, math.nan),
    "frequency_penalty": (-2.1, 2.1, -math.inf),
    "seed": (2**64, -(2**63) - 1, 1.0),
    "n": (0, 33, -1),
    "logprobs": (-1, 21),
    "prompt_logprobs": (-1, 21),
    "logit_bias": (
        {0: math.nan},
        {0: 101.0},
        {-1: 0.0},
        {1: 10**400},
        {True: 1.0},
        [5],
        dict.fromkeys(range(1025), 0.0),
    ),
    "stop": (("",), ("x" * 257,), ("a",) * 17, "abc", (b"a",), ("\ud800",), 5),
    "stop_token_ids": ((-1,), tuple(range(1025)), (1.5,), 5),
    "ignore_eos": (1, None, "yes"),
    "include_stop": (0,),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD.items() for v in values])
def test_bad_values_are_refused(field, value):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{field: value})
    assert error.value.field == field


def test_a_number_of_more_digits_than_python_prints_is_refused():
    with pytest.raises(InvalidRequestError, match=r"max_tokens must be an integer in \[1, 2147483648\], got a int"):
        SamplingParams(max_tokens=10**5000)


def test_min_tokens_must_not_exceed_max_tokens():
    with pytest.raises(InvalidRequestError):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_the_limits_themselves_are_fine():
    SamplingParams(
        max_tokens=1, temperature=100.0, repetition_penalty=0.01, top_p=1.0, min_p=1.0, seed=2**64 - 1, n=32,
        logprobs=20, logit_bias={0: -100.0}, stop=("x" * 256,) * 16, stop_token_ids=tuple(range(1024)),
    )  # fmt: skip


BAD_REQUEST = {
    "cache_salt": ("\ud800", "s" * 257, b"bytes", None),
    "priority": (10**400, -(2**31), 3, -3, math.nan, 1.0, True, None),
    "tenant": ("\udfff", 5),
    "request_id": ("\ud800", 7, "x" * 129),
    "params": (None, {}),
    "cache": (None, "session"),
}
BAD_TEXT = {
    "timeout_s": (math.nan, -1.0, 0.0, math.inf, 10**400, "1"),
    "prompt": (b"bytes", 5),
    "add_bos": (1, None),
}
BAD_IDS = ((3.0, 4.0), (True, False), ("a",), "abc", 5, (-1,), (2**31,), (10**400,), np.array([1.5, 2.5]), [None])


def failing_field(kind, **given) -> str:
    name = "request_key" if kind is GenerateRequest else "request_id"
    made = {name: "r", "params": SamplingParams()} | given
    with pytest.raises(InvalidRequestError) as error:
        kind(**made)
    assert len(str(error.value)) < 300
    return error.value.field


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD_REQUEST.items() for v in values])
def test_bad_fields_of_both_kinds_of_requests_are_named(field, value):
    assert failing_field(TextRequest, **{"prompt": "a", field: value}) == field
    field = field.replace("request_id", "request_key")
    assert failing_field(GenerateRequest, **{"prompt_token_ids": (1,), field: value}) == field


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD_TEXT.items() for v in values])
def test_bad_fields_of_text_requests_are_named(field, value):
    assert failing_field(TextRequest, **{"prompt": "a", field: value}) == field


@pytest.mark.parametrize("ids", BAD_IDS, ids=repr)
def test_token_ids_that_are_no_integers_are_refused(ids):
    assert failing_field(GenerateRequest, prompt_token_ids=ids) == "prompt_token_ids"


@pytest.mark.parametrize("deadline", [math.nan, math.inf, "soon"])
def test_a_deadline_that_is_no_time_is_refused(deadline):
    assert failing_field(GenerateRequest, prompt_token_ids=(1,), deadline=deadline) == "deadline"


@pytest.mark.parametrize(("field", "value"), [("session", "\ud800"), ("session", "s" * 257), ("session", None)])
def test_bad_cache_hints_are_refused(field, value):
    with pytest.raises(InvalidRequestError) as error:
        CacheHints(**{field: value})
    assert error.value.field == field


@pytest.mark.parametrize("ids", [np.array([3, 4]), np.array([3, 4], np.uint16), [3, 4], (np.int64(3), 4), range(3, 5)])
def test_token_ids_of_any_integer_type_become_plain_ones(ids):
    made = GenerateRequest("r", ids, SamplingParams())
    assert made.prompt_token_ids == (3, 4) and {type(i) for i in made.prompt_token_ids} == {int}


def test_a_callers_mapping_is_copied_and_counted_first():
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[7] = math.nan
    assert params.logit_bias == {5: 1.0}
    for field, most in (("logit_bias", (1 << 31) - 1), ("stop_token_ids", (1 << 31) - 1)):
        with pytest.raises(InvalidRequestError):
            SamplingParams(**{field: {most + 1: 0.0} if field == "logit_bias" else (most + 1,)})

    class Unread(dict):
        def __iter__(self):
            raise AssertionError("items were read before they were counted")

        keys = items = __iter__

    with pytest.raises(InvalidRequestError, match="at most 1024"):
        SamplingParams(logit_bias=Unread.fromkeys(range(2000), 0.0))
