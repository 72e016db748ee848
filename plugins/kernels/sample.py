"""Logits to token ids on the device, so that the next step's embedding reads them without the host.

Follows `runtime.sampler` for greedy rows and for temperature, top-k, top-p and min-p, with the same random numbers and
the same order of candidates; bias, penalties and log-probabilities stay there. Knows rows of logits only. Invariants: a
row's token depends on that row's logits, parameters, seed and index alone; sums run over fixed blocks. Weights are
float64 as on the host, so a token differs from the host's only where the random number lies within rounding (about
1e-13) of a border.

Four launches: `scan` (all of the vocabulary, over the whole device), `choose` (a program per row: greedy rows and
unfiltered draws end here), `collect` (candidates of filtered rows), `draw_filtered` (a program per row). A step of
greedy rows needs the first two alone, with SAMPLED off. Status of a row: DONE; NOT_FINITE (NaN or +inf among its
logits, or no finite one) and UNDECIDED (the filters leave more tokens than the candidates hold: the host must sample
this row). The token is -1 with both of the latter.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from wicore_trt.plugins.kernels.turns import take_turn

DONE, NOT_FINITE, UNDECIDED = 0, 1, 2
GROUP = 64  # maxima of groups of this many logits bound the candidates from below, as in runtime.sampler
CANDIDATES = 1024  # as runtime.sampler's first try


@triton.jit
def _read(logits, row, token, vocab, SOFTCAP: tl.constexpr):
    """Logits of `token` after the soft cap, SOFTCAP * tanh(x / SOFTCAP) rounded to float32 once (0: none), -inf beyond
    the vocabulary; +inf becomes NaN, so that no cap hides it."""
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    x = tl.where(x == float("inf"), float("nan"), x)
    if SOFTCAP > 0:
        ratio = tl.abs(x).to(tl.float64) / SOFTCAP
        e = tl.exp(-2.0 * tl.where(ratio > 20.0, 20.0, ratio))  # beyond 20 tanh is 1; NaN stays
        y = (SOFTCAP * ((1.0 - e) / (1.0 + e))).to(tl.float32)
        x = tl.where(token < vocab, tl.where(x < 0, -y, y), float("-inf"))
    return x


@triton.jit
def _ordered(x):
    """int32 that order like the float32 values; -0 and +0 are one value and become one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _uniform(seed, index):
    """The number in [0, 1) of `runtime.sampler.uniform`: Philox4x64-10 (Salmon et al., SC 2011) of key (seed, 0) and
    counter (index + 1, 0, 0, 0), 53 bits of the first word. `seed` is uint64, `index` any integer."""
    k0 = seed
    k1 = tl.full((), 0, tl.uint64)
    c0 = index.to(tl.uint64) + 1
    c1 = k1
    c2 = k1
    c3 = k1
    m0 = tl.full((), 0xD2E7470EE14C6C93, tl.uint64)
    m1 = tl.full((), 0xCA5A826395121157, tl.uint64)
    for _ in tl.static_range(10):
        h0 = tl.umulhi(c0, m0)
        h1 = tl.umulhi(c2, m1)
        l0 = c0 * m0
        l1 = c2 * m1
        c0 = h1 ^ c1 ^ k0
        c1 = l1
        c2 = h0 ^ c3 ^ k1
        c3 = l0
        k0 += tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
        k1 += tl.full((), 0xBB67AE8584CAA73B, tl.uint64)
    return (c0 >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _pick(weights, target, i, SIZE: tl.constexpr):
    """First index where the running sum of `weights` exceeds `target`, and the sum before it. Never an entry of weight
    zero, however the sums were rounded."""
    sums = tl.cumsum(weights, 0)
    alive = weights > 0
    index = tl.min(tl.where(alive & (sums > target), i, SIZE), 0)
    last = tl.max(tl.where(alive, i, 0), 0)
    index = tl.minimum(index, last)
    return index, tl.sum(tl.where(i == index - 1, sums, 0.0), 0)


@triton.jit
def scan(
    logits,
    temperatures,
    chunk_max,
    chunk_token,
    chunk_mass,
    group_max,
    vocab,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    SAMPLED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DEPENDENT: tl.constexpr = 0,
):
    """Maximum (NaN where a chunk holds NaN or +inf) and its lowest token id of each CHUNK of float32 logits [R, vocab].

    SAMPLED: for rows with temperatures[r] > 0 (float64) also the mass sum(exp((x - chunk's maximum) / temperature)),
    float64, and the maxima of groups of GROUP. Arrays are [R, chunks], group_max [R, chunks * CHUNK / GROUP].
    Grid: (cdiv(vocab, CHUNK), R).
    """
    take_turn(DEPENDENT)
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    chunks = tl.num_programs(0)
    i = tl.arange(0, CHUNK)
    token = chunk * CHUNK + i
    x = _read(logits, row, token, vocab, SOFTCAP)
    bad = tl.max((x != x).to(tl.int32), 0) > 0
    peak = tl.max(x, 0)
    best = tl.min(tl.where(x == peak, token, 0x7FFFFFFF), 0)
    out = row * chunks + chunk
    tl.store(chunk_max + out, tl.where(bad, float("nan"), peak))
    tl.store(chunk_token + out, best)
    if SAMPLED:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            shift = tl.where(peak == float("-inf"), 0.0, peak)  # a chunk of masked tokens has no mass
            weights = tl.exp((x.to(tl.float64) - shift.to(tl.float64)) / temperature)
            tl.store(chunk_mass + out, tl.sum(weights, 0))
            maxima = tl.max(tl.reshape(x, (CHUNK // GROUP, GROUP)), 1)
            g = tl.arange(0, CHUNK // GROUP)
            tl.store(group_max + out * (CHUNK // GROUP) + g, maxima)


@triton.jit
def choose(
    logits,
    temperatures,
    top_k,
    top_p,
    min_p,
    seeds,
    indices,
    chunk_max,
    chunk_token,
    chunk_mass,
    group_max,
    tokens,
    status,
    least,
    peaks,
    masses,
    counts,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SAMPLED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DEPENDENT: tl.constexpr = 0,
):
    """tokens[r] and status[r] (int32) of greedy and unfiltered rows, from what `scan` found. CHUNKS and GROUPS are
    powers of two of at least `chunks` and chunks * CHUNK / GROUP.

    SAMPLED: parameters per row as in SamplingParams: temperatures, top_p, min_p float64, top_k int32, seeds int64 (the
    64 bits), indices int32 (how many tokens were output before). Unfiltered rows with temperature > 0 draw in the order
    of token ids. Filtered rows get tokens -1, UNDECIDED, and for the kernels to come: `least` (float32, a logit that
    enough candidates reach), `peaks` float32, `masses` float64 of the whole row, counts 0; the others get counts -1.
    Grid: (R,).
    """
    take_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    there = c < chunks
    maxima = tl.load(chunk_max + row * chunks + c, mask=there, other=float("-inf"))
    nans = tl.max((maxima != maxima).to(tl.int32), 0)
    peak = tl.max(maxima, 0)
    firsts = tl.load(chunk_token + row * chunks + c, mask=there, other=0x7FFFFFFF)
    token = tl.min(tl.where(maxima == peak, firsts, 0x7FFFFFFF), 0)
    finite = (nans == 0) & (peak > float("-inf"))
    state = tl.where(finite, 0, 1)
    if SAMPLED:
        pending = -1
        temperature = tl.load(temperatures + row)
        if finite & (temperature > 0):
            k = tl.load(top_k + row)
            limited = (k > 0) & (k < vocab)
            scaled = tl.load(chunk_mass + row * chunks + c, mask=there, other=0.0)
            scaled *= tl.exp((maxima.to(tl.float64) - peak.to(tl.float64)) / temperature)
            if limited | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0):
                g = tl.arange(0, GROUPS)
                groups = chunks * (CHUNK // GROUP)
                keys = _ordered(tl.load(group_max + row * groups + g, mask=g < groups, other=float("-inf")))
                wanted = tl.where(limited & (k < CANDIDATES), k, CANDIDATES)
                # The largest key that `wanted` groups reach, bit by bit from the sign on: at least as many logits do.
                low = tl.where(tl.sum((keys >= 0).to(tl.int32), 0) >= wanted, 0, -0x7FFFFFFF - 1)
                for bit in range(31):
                    higher = low | (1 << (30 - bit))
                    low = tl.where(tl.sum((keys >= higher).to(tl.int32), 0) >= wanted, higher, low)
                low = tl.maximum(low, -0x7F800001)  # the key of -inf: a vocabulary of fewer groups is taken whole
                tl.store(least + row, tl.where(low < 0, low ^ 0x7FFFFFFF, low).to(tl.float32, bitcast=True))
                tl.store(peaks + row, peak)
                tl.store(masses + row, tl.sum(scaled, 0))
                pending = 0
                token = -1
                state = 2
            else:
                number = _uniform(tl.load(seeds + row).to(tl.uint64, bitcast=True), tl.load(indices + row))
                target = number * tl.sum(scaled, 0)
                chunk, before = _pick(scaled, target, c, CHUNKS)
                i = tl.arange(0, CHUNK)
                inside = chunk * CHUNK + i
                x = _read(logits, row, inside, vocab, SOFTCAP)
                weights = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / temperature)
                index, _ = _pick(weights, target - before, i, CHUNK)
                token = chunk * CHUNK + index
        tl.store(counts + row, pending)
    tl.store(tokens + row, tl.where(finite, token, -1))
    tl.store(status + row, state)


@triton.jit
def collect(
    logits,
    least,
    counts,
    candidates,
    vocab,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DEPENDENT: tl.constexpr = 0,
):
    """Puts every logit of at least least[r] into candidates [R, CAPACITY] (int64: ordered logit, then the lower token
    id first), in any order, and counts them in counts[r], also those that find no room. Rows of count -1 are left
    alone. Grid: (cdiv(vocab, CHUNK), R)."""
    take_turn(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(counts + row) >= 0:
        token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        x = _read(logits, row, token, vocab, SOFTCAP)
        found = (token < vocab) & (x >= tl.load(least + row))
        ones = found.to(tl.int32)
        number = tl.sum(ones, 0)
        if number > 0:
            slot = tl.atomic_add(counts + row, number, sem="relaxed") + tl.cumsum(ones, 0) - 1
            key = (_ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
            tl.store(candidates + row * CAPACITY + slot, key, mask=found & (slot < CAPACITY))


@triton.jit
def draw_filtered(
    candidates,
    counts,
    temperatures,
    top_k,
    top_p,
    min_p,
    seeds,
    indices,
    peaks,
    masses,
    tokens,
    status,
    vocab,
    CAPACITY: tl.constexpr,
    DEPENDENT: tl.constexpr = 0,
):
    """tokens[r] and status[r] of the rows that `choose` left UNDECIDED, from what `collect` found: sorted, cut by
    top-k, top-p and min-p in this order, and drawn in the order of the candidates. A row stays UNDECIDED where more
    tokens reach `least` than CAPACITY, or where the filters leave all candidates and might leave more. Grid: (R,)."""
    take_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    if (count >= 0) & (count <= CAPACITY):
        i = tl.arange(0, CAPACITY)
        keys = tl.load(candidates + row * CAPACITY + i, mask=i < count, other=-0x7FFFFFFFFFFFFFFF)
        keys = tl.sort(keys, descending=True)
        high = (keys >> 32).to(tl.int32)
        values = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
        k = tl.load(top_k + row)
        limited = (k > 0) & (k < vocab)
        limit = tl.where(limited, k, vocab)
        considered = tl.minimum(count, limit)
        some = i < considered
        shifted = tl.where(some, values, float("-inf")).to(tl.float64) - tl.load(peaks + row).to(tl.float64)
        weights = tl.exp(shifted / tl.load(temperatures + row))
        sums = tl.cumsum(weights, 0)
        mass = tl.load(masses + row)
        if limited:
            mass = tl.sum(weights, 0)
        keep = considered
        p = tl.load(top_p + row)
        if p < 1.0:
            keep = tl.minimum(keep, 1 + tl.sum((some & (sums < p * mass)).to(tl.int32), 0))
        keep = tl.minimum(keep, tl.sum((some & (weights >= tl.load(min_p + row))).to(tl.int32), 0))
        if (keep < considered) | (considered == limit):
            kept = tl.where(i < keep, weights, 0.0)
            number = _uniform(tl.load(seeds + row).to(tl.uint64, bitcast=True), tl.load(indices + row))
            index, _ = _pick(kept, number * tl.sum(kept, 0), i, CAPACITY)
            low = tl.sum(tl.where(i == index, keys & 0x7FFFFFFF, 0), 0)
            tl.store(tokens + row, (0x7FFFFFFF - low).to(tl.int32))
            tl.store(status + row, 0)
