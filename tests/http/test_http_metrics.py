"""GET /metrics of a real server over the fake engine, read by Prometheus's own parser."""

from __future__ import annotations

import asyncio

import pytest
from fakes import Gate
from prometheus_client.parser import text_string_to_metric_families
from web import executor_of, make_engine, serving, until

from wicore_trt.errors import EngineDeadError


async def scraped(running, **headers) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and labels."""
    answer = await running.client.get("/metrics", headers=headers)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, "a sample twice"
            found[key] = sample.value
    return found


def value(samples, name: str, **labels) -> float:
    return samples[name, tuple(sorted(labels.items()))]


async def test_a_scrape_tells_what_happened():
    async with serving() as running:
        for _ in range(3):
            assert (await running.completion(prompt="abcdefgh", max_tokens=5)).status_code == 200
        assert (await running.client.get("/nothing/here")).status_code == 404
        got = await scraped(running)
        assert value(got, "wicore_engine_up") == 1
        assert value(got, "wicore_state", state="serving") == 1
        assert value(got, "wicore_requests_finished_total", reason="length") == 3
        assert value(got, "wicore_requests_running") == value(got, "wicore_requests_open") == 0
        assert value(got, "wicore_generated_tokens_total") == 15
        assert value(got, "wicore_prompt_tokens_total") == 24
        assert value(got, "wicore_http_requests_total", method="POST", path="/v1/completions", status="200") == 3
        assert value(got, "wicore_http_requests_total", method="GET", path="other", status="404") == 1
        assert value(got, "wicore_time_to_first_token_seconds_count") == 3
        assert value(got, "wicore_inter_token_latency_seconds_count") == 12
        parts = {}
        for part in ("request_queue", "request_prefill", "request_decode", "request", "time_to_first_token"):
            assert value(got, f"wicore_{part}_seconds_count") == 3
            parts[part] = value(got, f"wicore_{part}_seconds_sum")
        first = parts["request_queue"] + parts["request_prefill"]
        assert first == pytest.approx(parts["time_to_first_token"])
        assert first + parts["request_decode"] == pytest.approx(parts["request"]), "the last output ends it"
        assert value(got, "wicore_request_seconds_count") == 3
        assert value(got, "wicore_request_prompt_tokens_bucket", le="10.0") == 3
        assert value(got, "wicore_request_prompt_tokens_bucket", le="5.0") == 0
        assert value(got, "wicore_request_generation_tokens_sum") == 15
        assert value(got, "wicore_kv_capacity_bytes", tier="device") > 0
        assert value(got, "wicore_process_resident_bytes", process="front") > 1 << 20


async def test_routers_find_the_names_of_vllm():
    async with serving() as running:
        await running.completion(max_tokens=5)
        got = await scraped(running)
        name = {"model_name": running.engine.info.model_id}
        assert value(got, "vllm:num_requests_running", **name) == value(got, "vllm:num_requests_waiting", **name) == 0
        assert value(got, "vllm:generation_tokens_total", **name) == 5
        assert value(got, "vllm:request_success_total", finished_reason="length", **name) == 1
        assert value(got, "vllm:time_to_first_token_seconds_count", **name) == 1
        assert 0 <= value(got, "vllm:kv_cache_usage_perc", **name) <= 1


async def test_what_waits_for_a_place_is_queued_and_not_prefilled():
    engine = make_engine(max_sequences=1, step_s=0.02)
    async with serving(engine) as running:
        with Gate(executor_of(engine)):
            asked = [asyncio.ensure_future(running.completion(max_tokens=10)) for _ in range(2)]
            await until(lambda: engine.live == 2)
        assert {found.status_code for found in await asyncio.gather(*asked)} == {200}
        got = await scraped(running)
        assert value(got, "wicore_request_queue_seconds_sum") > 10 * 0.02, "the second one waits for all of the first"
        assert value(got, "wicore_request_prefill_seconds_sum") >= 2 * 0.02
        assert value(got, "wicore_request_decode_seconds_sum") >= 2 * 9 * 0.02
        name = {"model_name": running.engine.info.model_id}
        assert value(got, "vllm:request_queue_time_seconds_count", **name) == 2


async def test_openmetrics_for_who_accepts_it():
    async with serving() as running:
        accept = "application/openmetrics-text; version=1.0.0"
        answer = await running.client.get("/metrics", headers={"accept": accept})
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert answer.text.endswith("# EOF\n")


async def test_operators_alone_read_metrics(tmp_path):
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text("alice:" + "a" * 16 + "\nops:" + "o" * 16 + ":operator\n")
    async with serving(keys_file=str(file)) as running:
        status = {}
        for key in ("a" * 16, "o" * 16, "x" * 16):
            answer = await running.client.get("/metrics", headers={"authorization": f"Bearer {key}"})
            status[key[0]] = answer.status_code
        assert status == {"a": 403, "o": 200, "x": 401}
        got = await scraped(running, authorization="Bearer " + "o" * 16)
        assert value(got, "wicore_keys_refused_total", transport="http") == 1


async def test_strangers_add_no_names():
    async with serving() as running:
        for i in range(20):
            await running.client.get(f"/x{i}")
            await running.client.request("PROPFIND", "/v1/models")
            await running.client.get(f"/v1/models/m{i}")
        calls = [dict(labels) for name, labels in await scraped(running) if name == "wicore_http_requests_total"]
        assert {c["path"] for c in calls} == {"other", "/v1/models", "/v1/models/{name}"}
        assert {c["method"] for c in calls} == {"GET", "other"}


@pytest.mark.parametrize("how", ["dead", "silent"])
async def test_an_engine_that_does_not_answer_is_left_out(how, monkeypatch):
    async with serving() as running:
        await running.completion()
        monkeypatch.setattr("wicore_trt.http.metrics.ANSWER_S", 0.01)

        async def stats(tenant=None):
            if how == "dead":
                raise EngineDeadError("gone")
            await asyncio.Event().wait()

        monkeypatch.setattr(running.engine.engine, "stats", stats)
        got = await scraped(running)
        assert value(got, "wicore_engine_up") == 0
        assert not [name for name, _ in got if name.startswith(("vllm:", "wicore_requests_running", "wicore_kv"))]
        assert value(got, "wicore_requests_finished_total", reason="length") == 1


async def test_a_long_step_hides_nothing():
    """While a step runs, the time goes on and who comes is counted."""
    engine = make_engine()
    gate = Gate(executor_of(engine))
    async with serving(engine) as running:
        tasks = [asyncio.ensure_future(running.completion())]
        await until(lambda: gate.waits)
        first = (await running.client.get("/v1/stats")).json()
        tasks += [asyncio.ensure_future(running.completion()) for _ in range(3)]
        await until(lambda: engine.live == 4)
        second = (await running.client.get("/v1/stats")).json()
        metrics = await scraped(running)
        gate.let()
        assert {task.status_code for task in await asyncio.gather(*tasks)} == {200}
    assert second["uptime_s"] > first["uptime_s"]
    assert first["requests_running"] + first["requests_waiting"] == 1
    assert second["requests_running"] + second["requests_waiting"] == 4
    assert second["steps"] == first["steps"]
    assert value(metrics, "wicore_requests_running") + value(metrics, "wicore_requests_waiting") == 4
