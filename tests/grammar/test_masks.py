"""Masks in the sampler: rows that have none do not notice, rows that nothing is left of fail by themselves."""

from __future__ import annotations

import torch

from wicore_trt.runtime.batch import SequenceSlice
from wicore_trt.runtime.sampler import NONE_ALLOWED, NOT_FINITE, Sampler
from wicore_trt.types import SamplingParams

VOCAB = 21


def mask(*tokens: int) -> bytes:
    bits = bytearray(3)
    for token in tokens:
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


def row(seq_id: int, mask=None, **params) -> SequenceSlice:
    values = SamplingParams(**{"temperature": 0.0, **params})
    return SequenceSlice(seq_id, [1], 0, {}, True, values, 1, seq_id, mask=mask)


def test_each_row_by_itself() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[2, [3, 4]] = -torch.inf
    logits[4, 0] = torch.nan
    raw = logits.clone()
    slices = [
        row(0),
        row(1, mask(7, 20), temperature=1.5, logit_bias={5: 100.0}),
        row(2, mask(3, 4)),
        row(3, "no mask"),
        row(4, "no mask"),
        row(5, mask(9), logprobs=1, repetition_penalty=2.0),
    ]
    found = Sampler().sample(logits, slices)
    tokens = {one.seq_id: one for one in found.sampled}
    assert found.failed == {2: NONE_ALLOWED, 3: "no mask", 4: NOT_FINITE}
    assert (
        tokens[0].token_ids[0] == int(raw[0].argmax())
        and tokens[1].token_ids[0] in (7, 20)
        and tokens[5].token_ids == (9,)
    )
    truth = raw[5].double().log_softmax(-1)
    assert abs(tokens[5].logprobs[0].logprob - float(truth[9])) < 1e-6
    assert tokens[5].logprobs[0].top[0][0] == int(raw[5].argmax())
    assert torch.equal(logits.nan_to_num(0), raw.nan_to_num(0)), "the logits are left as they were"
