"""Replays over several workers: what routing can gain, and that it counts what one worker would."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from wicore_trt.cli.kv import app
from wicore_trt.errors import ConfigError
from wicore_trt.kv.study.simulate import ROUTINGS, Fleet, SimulationReport, simulate
from wicore_trt.kv.study.trace import TraceRequest, count_unique_blocks, generate_trace

TRACE = generate_trace(400)
PAGES = {"device": count_unique_blocks(TRACE) // 10}


def fleet(routing: str, workers: int, rate: float = 20_000, trace: list[TraceRequest] = TRACE) -> SimulationReport:
    return simulate(trace, "lru", PAGES, fleet=Fleet(workers, routing, rate))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_fleet_of_one_is_that_worker(routing: str) -> None:
    alone, found = simulate(TRACE, "lru", PAGES), fleet(routing, 1)
    assert (found.hit_tokens, found.tokens) == (alone.hit_tokens, alone.tokens) and found.busy_share == 1


def test_affinity_finds_what_chance_does_not() -> None:
    rates = {routing: fleet(routing, 8).hit_rate for routing in ROUTINGS}
    assert min(rates["affinity"], rates["affinity-load"]) > 1.3 * max(rates["random"], rates["round-robin"]), rates


def test_one_beginning_of_all_prompts_fills_one_worker_unless_load_counts() -> None:
    trace = [TraceRequest((0, 2 * i + 1, 2 * i + 2), 1500, at_s=i / 10) for i in range(400)]
    assert fleet("affinity", 4, 2000, trace).busy_share > 3.9
    shared = fleet("affinity-load", 4, 2000, trace)
    assert shared.busy_share < 1.1 and shared.wait_s[1] < fleet("affinity", 4, 2000, trace).wait_s[0]
    assert shared.hit_rate > 0.3, "each worker soon has the beginning"


def test_the_command_prints_all_routings(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--generate", "50", "--workers", "3", "--capacity", "20%"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert [entry["routing"] for entry in json.loads(result.stdout)["results"]] == [*ROUTINGS]
    table = CliRunner().invoke(app, [*arguments, "--routing", "affinity-load"]).stdout
    assert "affinity-load" in table and "round-robin" not in table


def test_an_unknown_routing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="by-luck"):
        fleet("by-luck", 2)
