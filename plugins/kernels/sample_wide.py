"""Tokens of the rows that `kernels.sample` left UNDECIDED: filters that leave more tokens than its candidates hold.

The same distribution, order of candidates and random number, without sorting: the k-th token, the end of the nucleus
and the drawn token are each the last key of the shortest prefix that reaches a sum or count. A pass over the vocabulary
finds each bit of that key. About 150 passes, so milliseconds a row; it is for rows that are rare. Knows rows of logits
only. Invariants: a row's token depends on that row alone; every row is decided.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.sample import UNDECIDED, _ordered, _read, _uniform

LEFT = tl.constexpr(UNDECIDED)


@triton.jit
def _reach(logits, weights, row, vocab, key, least, CHUNK: tl.constexpr, SHIFT: tl.constexpr, SOFTCAP: tl.constexpr):
    """Number and mass of the tokens whose key is at least `key` and whose weight is at least `least`. Keys are int64:
    the ordered logit, then the lower token id first."""
    i = tl.arange(0, CHUNK)
    numbers = tl.zeros((CHUNK,), tl.int32)
    masses = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, vocab, CHUNK):
        token = start + i
        x = _read(logits, row, token, vocab, SOFTCAP)
        keys = ((_ordered(x).to(tl.int64) + 0x80000000) << SHIFT) | ((1 << SHIFT) - 1 - token).to(tl.int64)
        weight = tl.load(weights + token, mask=token < vocab, other=0.0)
        found = (token < vocab) & (keys >= key) & (weight >= least)
        numbers += found.to(tl.int32)
        masses += tl.where(found, weight, 0.0)
    return tl.sum(numbers, 0), tl.sum(masses, 0)


@triton.jit
def _last(
    logits,
    weights,
    row,
    vocab,
    floor,
    least,
    number,
    above,
    reached,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """The largest key from which on there are `number` tokens, and a mass of more than `above` or at least `reached`;
    of those from `floor` on, which is taken when no key does."""
    low = tl.full((), 0, tl.int64)
    for bit in range(32 + SHIFT):
        key = low | (tl.full((), 1, tl.int64) << (31 + SHIFT - bit))
        count, mass = _reach(logits, weights, row, vocab, key, least, CHUNK, SHIFT, SOFTCAP)
        low = tl.where((count >= number) & ((mass > above) | (mass >= reached)), key, low)
    return tl.maximum(low, floor)


@triton.jit
def draw_wide(
    logits,
    weights,
    temperatures,
    top_k,
    top_p,
    min_p,
    seeds,
    indices,
    peaks,
    tokens,
    status,
    rows,
    vocab,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """tokens[r] and status[r] of the UNDECIDED ones of `rows` rows; parameters as in `sample.choose`. `weights` is
    float64 working memory [programs, vocab]; vocab is at most 1 << SHIFT. Grid: (programs,)."""
    own = weights + tl.program_id(0).to(tl.int64) * vocab
    for r in range(tl.program_id(0), rows, tl.num_programs(0)):
        if tl.load(status + r) == LEFT:
            row = tl.cast(r, tl.int64)
            peak, temperature = tl.load(peaks + row).to(tl.float64), tl.load(temperatures + row)
            i = tl.arange(0, CHUNK)
            for start in range(0, vocab, CHUNK):
                x = _read(logits, row, start + i, vocab, SOFTCAP)
                tl.store(own + start + i, tl.exp((x.to(tl.float64) - peak) / temperature), mask=start + i < vocab)
            tl.debug_barrier()  # other threads of the program read them
            never = tl.full((), float("inf"), tl.float64)
            everything = tl.full((), 0.0, tl.float64)
            floor = tl.full((), 0, tl.int64)
            k = tl.load(top_k + row)
            if (k > 0) & (k < vocab):
                floor = _last(logits, own, row, vocab, floor, everything, k, -1.0, never, CHUNK, SHIFT, SOFTCAP)
            p = tl.load(top_p + row)
            if p < 1.0:
                _, mass = _reach(logits, own, row, vocab, floor, everything, CHUNK, SHIFT, SOFTCAP)
                floor = _last(logits, own, row, vocab, floor, everything, 0, never, p * mass, CHUNK, SHIFT, SOFTCAP)
            least = tl.load(min_p + row)
            _, mass = _reach(logits, own, row, vocab, floor, least, CHUNK, SHIFT, SOFTCAP)
            number = _uniform(tl.load(seeds + row).to(tl.uint64, bitcast=True), tl.load(indices + row))
            key = _last(logits, own, row, vocab, floor, least, 0, number * mass, mass, CHUNK, SHIFT, SOFTCAP)
            tl.store(tokens + row, ((1 << SHIFT) - 1 - (key & ((1 << SHIFT) - 1))).to(tl.int32))
            tl.store(status + row, 0)
            tl.debug_barrier()  # the weights are overwritten by the next row's
