"""Streams that have begun, and requests whose clients leave: what they are told, what they cost, how they count."""

from __future__ import annotations

import asyncio
import gc
import json
import time

import pytest
from fakes import Gate
from web import GREEDY, executor_of, expected, make_engine, serving, until

from wicore_trt.core.limits import Limits
from wicore_trt.types import TextRequest

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stream": True, **GREEDY}


async def test_headers_and_roles_do_not_wait_for_the_first_token():
    engine = make_engine()
    async with serving(engine) as running:
        with Gate(executor_of(engine)) as gate:
            body = {**CHAT, "n": 2}
            async with running.client.stream("POST", "/v1/chat/completions", json=body) as found:
                assert found.status_code == 200
                lines = found.aiter_lines()
                first = [json.loads((await anext(lines)).removeprefix("data: ")), await anext(lines)]
                assert first[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
                assert not executor_of(engine).steps, "the first step has not ended"
                gate.let()
                rest = [json.loads(line[6:]) for line in [x async for x in lines] if line.startswith("data: {")]
                assert rest[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}, "the other one's"
                for index in (0, 1):
                    told = [c["choices"][0]["delta"] for c in rest[1:] if c["choices"][0]["index"] == index]
                    assert "".join(delta.get("content", "") for delta in told) == expected("hello", 5)
                    assert not any("role" in delta for delta in told), "once"


async def test_a_message_tells_its_prompt_when_it_begins():
    engine = make_engine()
    async with serving(engine) as running:
        with Gate(executor_of(engine)):
            body = {"messages": CHAT["messages"], "max_tokens": 5, "stream": True}
            async with running.client.stream("POST", "/v1/messages", json=body) as found:
                async for line in found.aiter_lines():
                    if line.startswith("data: "):
                        assert json.loads(line[6:])["message"]["usage"]["input_tokens"] == 5
                        break


@pytest.mark.parametrize("stream", [False, True])
async def test_what_waits_too_long_is_told_when_to_come_back(stream):
    now = 0.0
    engine = make_engine(max_sequences=1, clock=lambda: now)
    engine.engine.core.limits = Limits(max_queue_s=5.0)
    async with serving(engine) as running:
        for count in (4, 2):
            with Gate(executor_of(engine)) as gate:
                asked = [asyncio.ensure_future(running.completion(max_tokens=50, stream=stream)) for _ in range(count)]
                await until(lambda count=count: engine.live == count)
                gate.let(1)
                await until(lambda count=count: stats_of(engine) == (1, count - 1))
                gate.let(1)
                await until(lambda gate=gate: gate.waits and not gate.left)  # before this step all have arrived
                now += 6.0
            found = await asyncio.gather(*asked)
            assert sorted(one.status_code for one in found) == [200, *[429] * (count - 1)]
            assert all(int(one.headers["retry-after"]) >= 1 for one in found if one.status_code == 429)


def stats_of(engine) -> tuple[int, int]:
    """Requests that run, and that wait."""
    stats = engine.engine._loop.stats()
    return stats.requests_running, stats.requests_waiting


async def test_a_request_that_fails_behind_its_headers_ends_with_an_error():
    ahead_s = 0.0
    engine = make_engine(clock=lambda: time.monotonic() + ahead_s)
    async with serving(engine) as running:
        with Gate(executor_of(engine)) as gate:
            async with running.client.stream("POST", "/v1/chat/completions", json={**CHAT, "timeout": 200}) as found:
                lines = found.aiter_lines()
                assert found.status_code == 200 and "assistant" in await anext(lines)
                ahead_s = 201.0
                gate.let()
                rest = [line async for line in lines if line]
                assert rest[-2] == "event: error" and "timeout_error" in rest[-1] and "data: [DONE]" not in rest


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_has_had_a_prompt(stream, caplog):
    """All of it, in the access line, in the tenant's rate and in the metrics; the text says a quarter of its tokens."""
    caplog.set_level("INFO", "wicore_trt.access")
    async with serving(make_engine(step_s=0.01), tokens_per_minute=5000) as running:
        body = {"prompt": "hello" * 100, "max_tokens": 300, "stream": stream, **GREEDY}
        leaves = asyncio.ensure_future(running.post("/v1/completions", body))
        await until(lambda: len(executor_of(running.engine).steps) > 3)
        leaves.cancel()
        await until(lambda: not running.server.context.open and not running.engine._streams)
        await until(lambda: any(r.name == "wicore_trt.access" for r in caplog.records))
        facts = next(r.facts for r in caplog.records if r.name == "wicore_trt.access")
        assert facts["code"] == "499" and facts["prompt"] == 500
        left = int((await running.completion(max_tokens=1)).headers["x-ratelimit-remaining-tokens"])
        assert 5000 - 500 - 350 < left <= 5000 - 500
        assert (await running.client.get("/v1/stats")).json()["requests_finished"]["cancelled"] == 1
        text = (await running.client.get("/metrics")).text
        assert 'wicore_requests_finished_total{reason="cancelled"} 1.0' in text
        assert 'finished_reason="abort",model_name="fake"} 1.0' in text


async def test_dashboards_of_vllm_find_what_they_ask_for():
    async with serving() as running:
        await running.completion(max_tokens=5, n=2)
        await running.client.get("/nothing")
        text = (await running.client.get("/metrics")).text
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in text
        assert 'http_requests_total{handler="other",method="GET",status="4xx"} 1.0' in text
        assert 'vllm:request_max_num_generation_tokens_sum{model_name="fake"} 5.0' in text
        assert 'vllm:request_max_num_generation_tokens_count{model_name="fake"} 1.0' in text
        steps = (await running.client.get("/v1/stats")).json()["steps"]
        assert f'vllm:iteration_tokens_total_count{{model_name="fake"}} {float(steps)}' in text
        assert 'vllm:iteration_tokens_total_sum{model_name="fake"}' in text


async def test_an_error_at_the_end_keeps_nothing_of_its_call():
    async with serving(make_engine(step_s=0.02)) as running:
        gc.collect()
        before = sum(isinstance(one, TextRequest) for one in gc.get_objects())
        for _ in range(2):
            assert (await running.completion(max_tokens=90, timeout=0.1)).status_code == 504
        gc.collect()
        assert sum(isinstance(one, TextRequest) for one in gc.get_objects()) == before
