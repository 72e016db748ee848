"""Latency definitions and statistics against independent arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from wicore_trt.bench.measure import LATENCIES, RequestRecord, Summary, Throughput, summarize_latencies


def random_record(rng: np.random.Generator) -> tuple[RequestRecord, np.ndarray]:
    """A request with random messages, and the arrival time of each of its tokens."""
    started = rng.uniform(0, 10)
    messages = int(rng.integers(1, 12))
    moments = started + np.cumsum(rng.exponential(0.1, messages))
    tokens = rng.integers(1, 4, messages)
    arrivals = tuple(zip(moments.tolist(), tokens.tolist(), strict=True))
    times = np.repeat(moments, tokens)
    return RequestRecord(started, moments[-1], arrivals, int(rng.integers(1, 99)), len(times), 3), times


@pytest.mark.parametrize("seed", range(5))
def test_one_request_by_definition(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        record, times = random_record(rng)
        assert record.ttft_s == pytest.approx(times[0] - record.started)
        assert record.e2e_s == pytest.approx(times[-1] - record.started)
        np.testing.assert_allclose(record.gaps_s(), np.diff(times), atol=1e-12)
        if len(times) == 1:
            assert record.tpot_s is None
        else:
            assert record.tpot_s == pytest.approx((times[-1] - times[0]) / (len(times) - 1))
            assert record.tpot_s == pytest.approx(np.mean(record.gaps_s()))


def test_messages_are_not_tokens():
    """Ten tokens in one late message after the first: a counter of messages would report 9 s per token."""
    record = RequestRecord(0.0, 10.0, ((1.0, 1), (10.0, 9)), 5, 10)
    assert record.tpot_s == pytest.approx(1.0)
    assert record.gaps_s() == [9.0, *[0.0] * 8]


@pytest.mark.parametrize("seed", range(5))
def test_summary_against_sorted_interpolation(seed):
    values = np.random.default_rng(seed).lognormal(size=1 + seed * 37)
    summary, ordered = Summary.from_values(iter(values)), sorted(values)

    def percentile(p: float) -> float:
        place = p / 100 * (len(ordered) - 1)
        low = int(place)
        return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)

    assert summary.count == len(values) and summary.mean == pytest.approx(sum(ordered) / len(ordered))
    assert (summary.p50, summary.p90, summary.p99) == pytest.approx([percentile(p) for p in (50, 90, 99)])


def test_summary_of_nothing_is_none():
    assert Summary.from_values([]) is None
    assert summarize_latencies([RequestRecord(0, 1, error="x")]) == dict.fromkeys(LATENCIES)


@pytest.mark.parametrize("seed", range(5))
def test_throughput_against_numpy(seed):
    rng = np.random.default_rng(seed)
    pairs = [random_record(rng) for _ in range(40)]
    failed = [RequestRecord(2.0, 50.0 + seed, error="RESOURCE_EXHAUSTED: full"), RequestRecord(0, 1, error="x")]
    records = [record for record, _ in pairs] + failed
    result = Throughput.from_records(records)
    duration = 50.0 + seed - 0.0
    tokens = sum(len(times) for _, times in pairs)
    assert result.duration_s == pytest.approx(duration) and result.completed == 40
    assert result.requests_per_s == pytest.approx(40 / duration)
    assert result.output_tokens_per_s == pytest.approx(tokens / duration)
    prompts = sum(record.prompt_tokens for record, _ in pairs)
    assert result.total_tokens_per_s == pytest.approx((tokens + prompts) / duration)
    assert (result.output_tokens, result.prompt_tokens, result.cached_tokens) == (tokens, prompts, 120)
    gaps = np.concatenate([np.diff(times) for _, times in pairs])
    assert result.latencies["itl"].count == len(gaps)
    assert result.latencies["itl"].p99 == pytest.approx(np.percentile(gaps, 99))
    ttft = np.array([times[0] - record.started for record, times in pairs])
    assert result.latencies["ttft"].p90 == pytest.approx(np.percentile(ttft, 90))
