"""The sampler against oracles: filters, penalties, distribution, batch invariance, log-probabilities, faults (I14)."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wicore_trt.runtime import sampler as module
from wicore_trt.runtime.batch import SequenceSlice, StepResult
from wicore_trt.runtime.sampler import Sampler, draw_uniform
from wicore_trt.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def piece(
    params: SamplingParams, *, seq_id: int = 0, seed: int = 0, prompt: tuple[int, ...] = (0,),
    output: tuple[int, ...] = (), suppress_eos: bool = False, stop_ids: tuple[int, ...] = (),
) -> SequenceSlice:  # fmt: skip
    history = [*prompt, *output]
    return SequenceSlice(
        seq_id=seq_id, token_ids=history[-1:], start=len(history) - 1, pages={}, sample=True, params=params,
        earlier_ids=history[:-1], prompt_len=len(prompt), seed=seed, suppress_eos=suppress_eos, stop_ids=stop_ids,
    )  # fmt: skip


def one(logits: np.ndarray | list[float], slice_: SequenceSlice) -> int:
    result = Sampler().sample(torch.tensor(np.asarray(logits, np.float32))[None], [slice_])
    assert not result.failed
    return result.sampled[0].token_ids[0]


def random_logits(seed: int, vocab: int, rows: int | None = None, scale: float = 3.0) -> np.ndarray:
    """Rounded, so that equal logits occur."""
    shape = vocab if rows is None else (rows, vocab)
    return (np.random.default_rng(seed).normal(0, scale, shape).round(2)).astype(np.float32)


def order_of(logits: np.ndarray) -> np.ndarray:
    return np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))


def oracle_distribution(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Probability of each token: temperature, top-k, top-p, min-p one after another, renormalised each time."""
    scaled = logits.astype(np.float64) / p.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = order_of(logits)
    if p.top_k:
        probs[order[p.top_k :]] = 0
        probs /= probs.sum()
    if p.top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
        probs[order[before >= p.top_p]] = 0
        probs /= probs.sum()
    probs[probs < p.min_p * probs.max()] = 0
    return probs / probs.sum()


def oracle_token(logits: np.ndarray, p: SamplingParams, u: float) -> set[int]:
    """Inverse of the cumulative distribution at u. More than one when u or top_p is within rounding of a step."""
    filtered = 0 < p.top_k < len(logits) or p.top_p < 1 or p.min_p > 0
    order = order_of(logits) if filtered else np.arange(len(logits))
    tokens = set()
    for top_p in {p.top_p, p.top_p * (1 - 1e-9), min(1.0, p.top_p * (1 + 1e-9))} if p.top_p < 1 else {1.0}:
        sums = np.cumsum(oracle_distribution(logits, replace(p, top_p=top_p))[order])
        tokens |= {int(order[min(np.searchsorted(sums, v, "right"), len(sums) - 1)]) for v in (u - 1e-9, u, u + 1e-9)}
    return tokens


def test_uniform_numbers_are_counter_based() -> None:
    numbers = np.array([[draw_uniform(seed, position) for position in range(200)] for seed in range(50)])
    assert numbers.min() >= 0 and numbers.max() < 1 and len(np.unique(numbers)) == numbers.size
    assert abs(numbers.mean() - 0.5) < 0.01 and abs(numbers.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.03
    assert draw_uniform(-1, 3) == draw_uniform(2**64 - 1, 3)
    assert draw_uniform(7, 11) == np.random.Generator(np.random.Philox(key=7, counter=11)).random()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        pytest.param(SamplingParams(temperature=0.5), marks=pytest.mark.long),
        pytest.param(SamplingParams(temperature=2.0, top_k=7), marks=pytest.mark.long),
        pytest.param(SamplingParams(temperature=1.3, top_p=0.8), marks=pytest.mark.long),
        SamplingParams(min_p=0.1, top_p=0.95, top_k=9),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    draws = 6000
    logits = random_logits(5, 12, scale=1.5)
    expected = oracle_distribution(logits, params) * draws
    sampler, counts = Sampler(), np.zeros(12)
    rows = torch.tensor(logits).expand(100, 12).contiguous()
    for start in range(0, draws, 100):
        pieces = [piece(params, seq_id=i, seed=start + i) for i in range(100)]
        for found in sampler.sample(rows, pieces).sampled:
            counts[found.token_ids[0]] += 1
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # beyond the 99.9th percentile; seeds are fixed


PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.floats(0.05, 3.0), st.sampled_from([1.0, 1e-6, 100.0])),
    top_k=st.one_of(st.just(0), st.integers(1, 80)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


@settings(max_examples=400, deadline=None)
@given(PARAMS, st.integers(0, 2**32), st.integers(1, 1500), st.integers(-(2**63), 2**64 - 1), st.integers(0, 3))
def test_filters_against_float64(p: SamplingParams, data: int, vocab: int, seed: int, position: int) -> None:
    logits = random_logits(data, vocab)
    expected = oracle_token(logits, p, draw_uniform(seed, position))
    assert one(logits, piece(p, seed=seed, output=(0,) * position)) in expected


@pytest.mark.parametrize("candidates", [1, 2, 17, 1 << 20])
@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0])
def test_candidate_limit_changes_nothing(candidates: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor(random_logits(3, 3000, 60, scale))
    rng = np.random.default_rng(4)
    pieces = [
        piece(
            SamplingParams(
                top_k=i % 2 * int(rng.integers(1, 40)), top_p=float(rng.uniform(0.1, 1)), min_p=float(i % 3 / 20)
            ),
            seq_id=i,
            seed=i,
        )
        for i in range(60)
    ]
    before = Sampler().sample(logits, pieces)
    monkeypatch.setattr(module, "_CANDIDATES", candidates)
    assert Sampler().sample(logits, pieces) == before


MIXED = [
    GREEDY,
    replace(GREEDY, logprobs=3),
    SamplingParams(),
    SamplingParams(temperature=0.7, logprobs=0),
    SamplingParams(temperature=100.0, top_p=0.999),
    SamplingParams(top_k=50, top_p=0.9, min_p=0.01, logprobs=20),
    SamplingParams(min_p=0.05, repetition_penalty=1.3, logprobs=1),
    SamplingParams(presence_penalty=1.0, frequency_penalty=-0.5, logit_bias={3: 4.0}),
    SamplingParams(top_k=2000, temperature=3.0),
]


@pytest.mark.parametrize("vocab", [5, 700, 4000])
def test_a_row_does_not_depend_on_the_batch(vocab: int) -> None:
    rows = 45
    logits = torch.tensor(random_logits(vocab, vocab, rows, 1.0))
    rng = np.random.default_rng(1)
    pieces = [
        piece(
            MIXED[i % len(MIXED)], seq_id=i, seed=i, prompt=tuple(rng.integers(0, vocab, 4).tolist()),
            output=tuple(rng.integers(0, vocab, i % 6).tolist()), suppress_eos=i % 4 == 0, stop_ids=(1, 2),
        )
        for i in range(rows)
    ]  # fmt: skip
    together = Sampler().sample(logits, pieces)
    alone = [Sampler().sample(logits[i : i + 1].clone(), pieces[i : i + 1]).sampled[0] for i in range(rows)]
    assert together.sampled == alone
    order = rng.permutation(rows)
    shuffled = Sampler().sample(logits[order], [pieces[i] for i in order])
    assert shuffled.sampled == [together.sampled[i] for i in order]


def test_greedy_takes_the_lowest_index_of_ties() -> None:
    assert one([0, 5, 5, 1, 5], piece(GREEDY)) == 1
    assert one([-1, -1], piece(GREEDY)) == 0
    assert one([1, 2, 3], piece(replace(GREEDY, logit_bias={0: 1.0, 1: 1.0}))) == 1


def test_top_k_keeps_exactly_k_of_ties() -> None:
    seen = {one([1.0] * 50, piece(SamplingParams(top_k=3), seed=seed)) for seed in range(60)}
    assert seen == {0, 1, 2}


def test_extremes() -> None:
    logits = random_logits(9, 3000)
    best = int(logits.argmax())
    assert one(logits, piece(SamplingParams(temperature=1e-6))) == best
    assert one(logits, piece(SamplingParams(top_k=1, temperature=100.0))) == best
    assert one(logits, piece(SamplingParams(top_p=1e-12, temperature=100.0))) == best
    assert one(logits, piece(SamplingParams(min_p=1.0))) == best
    big, off = SamplingParams(top_k=1 << 31), SamplingParams()
    assert one(logits, piece(big, seed=3)) == one(logits, piece(off, seed=3))
    flat = [one(logits, piece(SamplingParams(temperature=100.0), seed=s)) for s in range(200)]
    assert len(set(flat)) > 150
    masked = np.full(3000, -np.inf, np.float32)
    masked[[5, 2999]] = 0
    for p in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=40), SamplingParams(min_p=0.01)):
        assert {one(masked, piece(p, seed=s)) for s in range(30)} == {5, 2999}


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_ends_of_the_unit_interval(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "draw_uniform", lambda seed, position: number)
    logits = np.full(2000, -np.inf, np.float32)
    logits[[7, 30, 1500]] = [0.1, 0.3, 0.2]
    for p, low, high in (
        (SamplingParams(), 7, 1500),
        (SamplingParams(top_p=0.99), 30, 7),
        (SamplingParams(top_k=9), 30, 7),
    ):
        assert one(logits, piece(p)) == (high if number else low)


@pytest.mark.parametrize("target", [2.0, 2.5])
def test_rounding_past_the_end_takes_the_last_possible_token(target: float) -> None:
    assert module._pick_index(np.array([0.0, 1.0, 1.0, 0.0, 0.0]), target)[0] == 2


def oracle_edit(logits: np.ndarray, s: SequenceSlice) -> np.ndarray:
    history = [*s.earlier_ids, *s.token_ids]
    p, edited = s.params, logits.astype(np.float64)
    assert p is not None
    for token, bias in p.logit_bias.items():
        edited[token] += bias
    for token in set(history):
        edited[token] = (
            edited[token] / p.repetition_penalty if edited[token] > 0 else edited[token] * p.repetition_penalty
        )
    for token in set(history[s.prompt_len :]):
        count = history[s.prompt_len :].count(token)
        edited[token] -= p.presence_penalty + p.frequency_penalty * count
    if s.suppress_eos:
        edited[list(s.stop_ids)] = -np.inf
    return edited


TOKENS = st.lists(st.integers(0, 9), max_size=12).map(tuple)


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        SamplingParams,
        temperature=st.just(0.0),
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
        presence_penalty=st.sampled_from([0.0, -1.0, 2.0]),
        frequency_penalty=st.sampled_from([0.0, -0.3, 0.7]),
        logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-5, 5), max_size=3),
    ),
    st.integers(0, 2**32),
    TOKENS.filter(len),
    TOKENS,
    st.booleans(),
)
def test_penalties(p: SamplingParams, data: int, prompt: tuple[int, ...], output: tuple[int, ...], eos: bool) -> None:
    logits = np.random.default_rng(data).normal(0, 2, 10).astype(np.float32)
    kept = logits.copy()
    sampler = Sampler()
    for length in range(len(output) + 1):  # one sampler over a growing history, as an engine does it
        s = piece(p, prompt=prompt, output=output[:length], suppress_eos=eos, stop_ids=(1, 3))
        expected = oracle_edit(logits, s)
        token = sampler.sample(torch.from_numpy(logits)[None], [s]).sampled[0].token_ids[0]
        assert expected[token] >= expected.max() - 1e-5
        assert not (eos and token in (1, 3))
    assert np.array_equal(kept, logits)


def test_counts_follow_the_history() -> None:
    params = replace(GREEDY, frequency_penalty=1.0)
    logits, sampler = torch.tensor([[3.0, 2.5, 0.0, -9.0]]), Sampler()

    def token(prompt: tuple[int, ...], output: tuple[int, ...]) -> int:
        return sampler.sample(logits, [piece(params, prompt=prompt, output=output)]).sampled[0].token_ids[0]

    assert [token((0,), ()), token((0,), (0,)), token((0,), (0, 1)), token((0,), (0, 1, 1, 1))] == [0, 1, 0, 0]
    assert token((0,), (0,)) == 1  # the history shrank
    assert token((0, 0), (0,)) == 1 and token((0, 0, 0), ()) == 0  # the prompt is another one
    assert token((3,), (0, 0, 2)) == 1
    sampler.release(0)
    sampler.release(77)
    assert token((3,), (1, 1, 2)) == 0  # the id is used again, by a history that ends alike


def test_bias_of_a_hundred_decides() -> None:
    logits = random_logits(2, 500)
    for p in (GREEDY, SamplingParams(), SamplingParams(top_p=0.9)):
        assert one(logits, piece(replace(p, logit_bias={77: 100.0}))) == 77
        banned = {int(t): -100.0 for t in order_of(logits)[:10]}
        assert all(one(logits, piece(replace(p, logit_bias=banned), seed=s)) not in banned for s in range(20))


def test_suppression_covers_ids_beyond_the_vocabulary() -> None:
    logits = [9.0, 8.0, 1.0]
    assert one(logits, piece(GREEDY, suppress_eos=True, stop_ids=(0, 1, 99))) == 2
    assert one(logits, piece(GREEDY, suppress_eos=False, stop_ids=(0, 1))) == 0
    assert one(logits, piece(GREEDY, suppress_eos=True)) == 0


@pytest.mark.parametrize("vocab", [30, 3000])
def test_logprobs_are_raw(vocab: int) -> None:
    logits = random_logits(8, vocab)
    wide = logits.astype(np.float64)
    raw = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    order = order_of(logits)
    bias = {int(order[-1]): 100.0}
    for p in (
        replace(GREEDY, logprobs=5),
        replace(GREEDY, logprobs=20, logit_bias=bias),
        SamplingParams(temperature=9.0, top_k=20, logprobs=0),
        SamplingParams(temperature=0.3, repetition_penalty=2.0, logprobs=1),
    ):
        s = piece(p, prompt=tuple(order[:3].tolist()))
        got = Sampler().sample(torch.tensor(logits)[None], [s]).sampled[0]
        [logprob] = got.logprobs
        assert (logprob.token_id,) == got.token_ids
        assert logprob.logprob == pytest.approx(raw[logprob.token_id], abs=1e-9)
        assert [i for i, _ in logprob.top] == order[: p.logprobs].tolist()
        assert [v for _, v in logprob.top] == pytest.approx(raw[order[: p.logprobs]].tolist(), abs=1e-9)
    assert Sampler().sample(torch.tensor(logits)[None], [piece(GREEDY)]).sampled[0].logprobs == ()


def test_logprobs_of_a_small_or_masked_vocabulary() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, 0.0]])
    [found] = Sampler().sample(logits, [piece(SamplingParams(temperature=0.0, logprobs=20))]).sampled
    assert [i for i, _ in found.logprobs[0].top] == [2, 0, 3]
    assert sum(math.exp(v) for _, v in found.logprobs[0].top) == pytest.approx(1)


@pytest.mark.parametrize("params", [GREEDY, *MIXED], ids=str)
def test_rows_that_are_not_finite_fail_alone(params: SamplingParams) -> None:
    good = random_logits(1, 2000, 6)
    bad = good.copy()
    bad[1, 1234] = np.nan
    bad[3, 0] = np.inf
    bad[4] = -np.inf
    pieces = [piece(params, seq_id=10 + i, seed=i, suppress_eos=True, stop_ids=(1234, 0)) for i in range(6)]
    fine: StepResult = Sampler().sample(torch.tensor(good), pieces)
    result = Sampler().sample(torch.tensor(bad), pieces)
    assert result.failed == dict.fromkeys((11, 13, 14), "logits are not finite")
    assert result.sampled == [fine.sampled[i] for i in (0, 2, 5)]


def test_stop_tokens_that_leave_nothing_to_choose_are_chosen_from_all_the_same() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(temperature=0.01)):
        result = Sampler().sample(logits, [piece(params, suppress_eos=True, stop_ids=(0, 1))])
        assert not result.failed and [found.token_ids for found in result.sampled] == [(1,)]


@pytest.mark.parametrize("seed", range(4))
def test_no_parameters_of_a_client_make_a_finite_row_fail(seed: int) -> None:
    """Logits at the ends of float32, and every parameter at the ends of its range."""
    rng, vocab = random.Random(seed), 50
    ends = (1e-30, 1.0, 1e10, 3.4e38, -1.0, -1e10, -3.4e38, -np.inf)
    for _ in range(100):
        row = [rng.choice(ends) for _ in range(vocab)]
        row[rng.randrange(vocab)] = 2.0
        params = SamplingParams(
            temperature=rng.choice((0.0, 1e-6, 1.0, 100.0)),
            top_k=rng.choice((0, 1, 1 << 31)),
            top_p=rng.choice((5e-324, 0.5, 1.0)),
            min_p=rng.choice((0.0, 5e-324, 1.0)),
            repetition_penalty=rng.choice((0.01, 1.0, 100.0)),
            presence_penalty=rng.choice((-2.0, 0.0, 2.0)),
            frequency_penalty=rng.choice((-2.0, 0.0, 2.0)),
            logit_bias={token: rng.choice((-100.0, 100.0)) for token in rng.sample(range(vocab), 5)},
            logprobs=rng.choice((None, 20)),
        )
        history = tuple(rng.choices(range(vocab), k=80))
        one_piece = piece(params, prompt=history[:40], output=history[40:], suppress_eos=True, stop_ids=tuple(range(9)))
        result = Sampler().sample(torch.tensor([row]), [one_piece])
        assert not result.failed and 0 <= result.sampled[0].token_ids[0] < vocab, (params, row)


def test_no_rows() -> None:
    assert Sampler().sample(torch.empty(0, 5), []) == StepResult([])


def test_preemption_and_resume_continue_the_same_draws() -> None:
    params = SamplingParams(temperature=1.5, top_p=0.95, presence_penalty=0.5)
    logits = torch.tensor(random_logits(6, 64, 40, 1.0))

    def run(released_at: int | None) -> list[int]:
        sampler, output = Sampler(), []
        for step in range(40):
            if step == released_at:
                sampler.release(5)
            s = piece(params, seq_id=5, seed=99, output=tuple(output))
            if step not in (0, released_at):
                s.earlier_ids = ()
            output.append(sampler.sample(logits[step : step + 1], [s]).sampled[0].token_ids[0])
        return output

    assert run(None) == run(13) and len(set(run(None))) > 5
