"""The latency benchmark end to end over the fake engine, and the reports that come out of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version

import pytest
from fakes import tiny_spec
from serve.serving import make_engine

from wicore_trt.bench.bound import (
    MachineRates,
    ModelCost,
    decode_bound_s,
    prefill_bound_s,
)
from wicore_trt.bench.client import LocalTarget
from wicore_trt.bench.measure import LatencyCase
from wicore_trt.bench.report import (
    LATENCY_COLUMNS,
    Roof,
    format_cell,
    latency_result,
    latency_row,
    make_report,
    rate_figure,
    time_figure,
)
from wicore_trt.bench.runs import list_cases, run_latency
from wicore_trt.errors import ConfigError, WicoreError

STEP_S = 0.004
ROOF = Roof(
    ModelCost.from_dtypes(tiny_spec(8), "float32", "float32", "float32"),
    MachineRates("cpu", 2, read_bytes_per_s=1e6, flops=1e12, gemm_dtype="float32"),
)


async def local(**kwargs) -> LocalTarget:
    engine = make_engine(**{"step_s": STEP_S, "max_batch_tokens": 64, **kwargs})
    await engine.start()
    return LocalTarget(engine)


class Spy:
    """Passes requests on and remembers them."""

    def __init__(self, target: LocalTarget) -> None:
        self.info, self.chat, self.target, self.requests = target.info, target.chat, target, []

    async def generate(self, request, started=None):
        self.requests.append(request)
        return await self.target.generate(request, started)


def quiet(phase: str, done: int, total: int) -> None:
    pass


def test_a_sweep_is_every_combination():
    cases = list_cases([1, 2], [10, 20], [3])
    assert [(c.batch, c.input_tokens, c.output_tokens) for c in cases] == [
        (1, 10, 3), (2, 10, 3), (1, 20, 3), (2, 20, 3),
    ]  # fmt: skip


async def test_latency_measures_the_step_of_the_engine():
    spy = Spy(await local())
    cases = [LatencyCase(2, 20, 11), LatencyCase(1, 150, 1)]
    points = await run_latency(spy, cases, repeats=3, warmups=1, seed=0, progress=quiet)
    await spy.target.close()
    batch, single = points
    assert batch.prefill_s >= STEP_S and batch.total_s >= 11 * STEP_S
    assert batch.step_s == pytest.approx((batch.total_s - batch.prefill_s) / 10)
    assert batch.latencies["ttft"].count == 3 * 2 and batch.latencies["itl"].count == 3 * 2 * 10  # warm-up not counted
    assert single.step_s is None and single.latencies["tpot"] is None
    assert single.prefill_s >= 3 * STEP_S  # 150 tokens are three chunks of up to 64
    assert len(spy.requests) == 4 * 2 * 2 + 4
    assert len({r.prompt_token_ids for r in spy.requests}) == len(spy.requests)  # a cache cannot help


async def test_latency_of_failing_requests_is_no_figure():
    target = await local(max_waiting=1, max_sequences=1)
    with pytest.raises(WicoreError, match="RESOURCE_EXHAUSTED"):
        await run_latency(target, [LatencyCase(6, 20, 8)], repeats=1, warmups=0, seed=0, progress=quiet)
    await target.close()


@pytest.mark.parametrize("lengths", [(1000, 25), (20, 5000)])
async def test_lengths_beyond_the_context_are_refused_before_anything_runs(lengths):
    spy = Spy(await local())
    with pytest.raises(ConfigError, match="context of 1024"):
        await run_latency(spy, [LatencyCase(1, 8, 2), LatencyCase(1, *lengths)], repeats=1, warmups=0, seed=0,
                          progress=quiet)  # fmt: skip
    await spy.target.close()
    assert not spy.requests


def test_figures_say_how_near_the_bound_they_are():
    assert time_figure(0.020, 0.015) == {"value": 20.0, "unit": "ms", "bound": 15.0, "percent": 75.0}
    assert rate_figure(60.0, "x/s", 80.0) == {"value": 60.0, "unit": "x/s", "bound": 80.0, "percent": 75.0}
    assert time_figure(None) is None and time_figure(1.0)["percent"] is None
    numbers = {1234567.8: "1,234,568", 123.45: "123.5", 12.345: "12.3", 0.0123: "0.0123"}
    assert {value: format_cell({"v": value}, "v") for value in numbers} == numbers
    assert format_cell(None, "v") == format_cell({"v": None}, "v") == "-"


async def test_report_of_latency():
    target = await local()
    cases = [LatencyCase(2, 20, 4), LatencyCase(1, 20, 1)]
    points = await run_latency(target, cases, repeats=1, warmups=0, seed=0, progress=quiet)
    await target.close()
    two, one = (latency_result(point, ROOF) for point in points)
    assert two["decode_step"]["bound"] == pytest.approx(1e3 * decode_bound_s(ROOF.cost, ROOF.rates, 2, 20, 4))
    assert two["prefill"]["bound"] == pytest.approx(1e3 * prefill_bound_s(ROOF.cost, ROOF.rates, 2, 20))
    step = two["decode_step"]["value"]
    assert two["decode_rate"]["value"] == pytest.approx(2 / step * 1e3)
    assert two["decode_rate"]["percent"] == pytest.approx(two["decode_step"]["percent"])
    assert two["ttft"].keys() == {"unit", "count", "mean", "p50", "p90", "p99"}
    assert two["ttft"]["p50"] == pytest.approx(points[0].latencies["ttft"].p50 * 1e3)
    assert one["decode_step"] is None and one["decode_rate"] is None and one["tpot"] is None
    assert all(len(latency_row(result)) == len(LATENCY_COLUMNS) for result in (one, two))
    assert latency_result(points[0], None)["decode_step"]["bound"] is None
    check_schema(make_report("latency", target="in process", model=asdict(target.info), parameters={"seed": 0},
                             rates=ROOF.rates, results=[two, one]))  # fmt: skip


FIGURES = ("prefill", "decode_step", "decode_rate")
SUMMARIES = ("ttft", "tpot", "itl", "e2e")


def check_schema(report: dict) -> None:
    """Every document has the same shape, and what is not a number is null."""
    document = json.loads(json.dumps(report, allow_nan=False))
    assert list(document) == [
        "kind", "schema", "command", "date", "machine", "versions", "target", "model", "parameters", "rates", "results",
    ]  # fmt: skip
    assert (document["kind"], document["schema"]) == ("wicore-bench", 1)
    assert document["date"].endswith("+00:00")
    assert document["machine"].keys() == {"cpu", "cores", "memory_bytes", "load_1m", "system", "gpus"}
    assert document["machine"]["cores"] >= 1 and document["machine"]["memory_bytes"] > 1 << 28
    assert document["versions"]["wicore-trt"] == version("wicore-trt")
    assert {"python", "torch", "numpy"} <= document["versions"].keys()
    rates = document["rates"]
    assert rates is None or rates.keys() == {"device", "threads", "read_bytes_per_s", "flops", "gemm_dtype"}
    for result in document["results"]:
        for name in set(FIGURES) & result.keys():
            assert result[name] is None or result[name].keys() == {"value", "unit", "bound", "percent"}
        for name in SUMMARIES:
            assert result[name] is None or result[name].keys() == {"unit", "count", "mean", "p50", "p90", "p99"}
