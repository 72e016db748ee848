"""Generate and the small calls, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace

import grpc
import pytest
from fakes import Gate
from serving import (
    MAX_CONTEXT,
    TOKENIZER,
    executor_of,
    expected,
    failure,
    make_engine,
    request,
    serving,
    stats_now,
    steps_of,
    until,
)

from wicore_trt import __version__
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2


async def collect(call) -> tuple[dict[int, str], dict[int, list[int]], dict[int, pb2.Finish]]:
    texts, tokens, finishes = {}, {}, {}
    async for response in call:
        assert response.index not in finishes, "output after the finish event"
        delta = response.delta
        if response.WhichOneof("event") == "finish":
            finishes[response.index] = response.finish
            delta = response.finish.delta
        texts[response.index] = texts.get(response.index, "") + delta.text
        tokens.setdefault(response.index, []).extend(delta.token_ids)
    return texts, tokens, finishes


@pytest.mark.parametrize("seed", range(3))
async def test_streams_at_once_each_get_their_own_tokens_in_at_most_one_message_a_step(seed):
    rng = random.Random(seed)
    prompts = ["".join(chr(rng.randrange(40, 120)) for _ in range(rng.randint(1, 60))) for _ in range(20)]
    async with serving(make_engine(step_s=0.001)) as running:
        calls = [running.stub.Generate(request(p, 25)) for p in prompts]
        for prompt, got in zip(prompts, await asyncio.gather(*map(collect, calls)), strict=True):
            text, ids = expected(prompt, 25)
            texts, tokens, finishes = got
            assert texts == {0: text} and tokens == {0: ids}
            assert finishes[0].reason == pb2.FINISH_REASON_LENGTH
            assert finishes[0].usage.prompt_tokens == len(prompt) and finishes[0].usage.completion_tokens == 25
        messages = [r async for r in running.stub.Generate(request("one message a step", 30))]
        assert len(messages) <= 30 and messages[-1].HasField("finish")


async def test_sequences_of_one_request_have_an_index_and_a_finish_each():
    async with serving() as running:
        texts, tokens, finishes = await collect(running.stub.Generate(request("several", 12, n=4)))
        text, ids = expected("several", 12)
        assert texts == dict.fromkeys(range(4), text) and tokens == dict.fromkeys(range(4), ids)
        assert set(finishes) == set(range(4))


async def test_prompts_as_token_ids_and_chat_are_the_same_prompt():
    async with serving() as running:
        text, _ = expected("same words", 8)
        ids = pb2.TokenIds(ids=TOKENIZER.encode("same words"))
        chat = pb2.Chat(messages=[pb2.ChatMessage(role="user", content="same words")])
        for prompt in ({"token_ids": ids}, {"chat": chat}):
            texts, _, _ = await collect(running.stub.Generate(request(max_tokens=8, **prompt)))
            assert texts == {0: text}


async def test_stop_string_stop_token_cached_tokens_and_timings():
    async with serving(make_engine(step_s=0.002)) as running:
        text, ids = expected("stop here", 40)
        stop = text[9:12]
        texts, _, finishes = await collect(running.stub.Generate(request("stop here", 40, stop=[stop])))
        assert texts == {0: text[: text.index(stop)]}
        assert finishes[0].reason == pb2.FINISH_REASON_STOP and finishes[0].stop_string == stop
        timings = finishes[0].timings
        first, total = timings.time_to_first_token.ToTimedelta(), timings.total.ToTimedelta()
        assert 0.002 <= first.total_seconds() < total.total_seconds()
        _, tokens, finishes = await collect(running.stub.Generate(request("stop here", 40, stop_token_ids=[ids[3]])))
        assert finishes[0].WhichOneof("stop") == "stop_token_id" and finishes[0].stop_token_id == ids[3]
        assert tokens[0] == ids[: ids.index(ids[3]) + 1]
        assert finishes[0].usage.cached_tokens > 0


async def test_unset_sampling_fields_take_the_defaults_of_the_plain_type():
    async with serving() as running:
        call = running.stub.Generate(pb2.GenerateRequest(text="x", sampling=pb2.SamplingParams(ignore_eos=True)))
        _, tokens, finishes = await collect(call)
        assert len(tokens[0]) == MAX_CONTEXT - 1 and finishes[0].reason == pb2.FINISH_REASON_LENGTH


async def test_a_long_prompt_is_tokenized_beside_the_streams_and_judged_alike():
    async with serving() as running:
        code, message, details = await failure(running.stub.Generate(request("y" * 100_000)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "prompt has 100000" in message
        assert details["BadRequest"].field_violations[0].field == "text"


async def test_ids_are_echoed_and_a_running_one_cannot_be_used_twice():
    engine = make_engine()
    async with serving(engine) as running:
        gate = Gate(executor_of(engine))
        gate.let(3)
        call = running.stub.Generate(request(request_id="mine", max_tokens=500), metadata=[("x-request-id", "trace-7")])
        assert dict(await call.initial_metadata())["x-request-id"] == "trace-7"
        assert (await call.read()).request_id == "mine"
        code, _, details = await failure(running.stub.Generate(request(request_id="mine")))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert details["ErrorInfo"].reason == "DUPLICATE_REQUEST" and details["ErrorInfo"].domain == "wicore"
        gate.let()
        again = running.stub.Generate(request(), metadata=[("x-request-id", "trace-7")])
        assert len([r async for r in again]) >= 1  # a trace id may serve several calls
        call.cancel()


async def test_unprintable_call_ids_are_replaced():
    async with serving() as running:
        call = running.stub.GetServerInfo(pb2.GetServerInfoRequest(), metadata=[("x-request-id", "a b")])
        echoed = dict(await call.initial_metadata())["x-request-id"]
        assert len(echoed) == 32 and echoed.isalnum()


async def test_tokenize_and_detokenize_agree_with_generate():
    async with serving() as running:
        ids = (await running.stub.Tokenize(pb2.TokenizeRequest(text="round trip"))).token_ids
        assert list(ids) == TOKENIZER.encode("round trip")
        assert (await running.stub.Detokenize(pb2.DetokenizeRequest(token_ids=ids))).text == "round trip"
        chat = pb2.Chat(messages=[pb2.ChatMessage(role="user", content="hi")])
        assert list((await running.stub.Tokenize(pb2.TokenizeRequest(chat=chat))).token_ids) == TOKENIZER.encode("hi")
        code, _, details = await failure(running.stub.Detokenize(pb2.DetokenizeRequest(token_ids=[5, 97])))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details["BadRequest"].field_violations[0].field == "token_ids"
        for empty in (pb2.TokenizeRequest(), pb2.TokenizeRequest(chat=pb2.Chat())):
            code, _, details = await failure(running.stub.Tokenize(empty))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "BadRequest" in details


async def test_model_server_and_stats():
    async with serving(max_message_mb=3) as running:
        running.engine.info = replace(running.engine.info, aliases=("second", "third/name"))
        model = await running.stub.GetModelInfo(pb2.GetModelInfoRequest())
        assert (model.model_id, model.vocab_size, model.bos_token_id) == ("fake", 97, 2)
        assert list(model.aliases) == ["second", "third/name"]
        second, *_ = await collect(running.stub.Generate(request("count me", 7, model="second")))
        assert list(model.eos_token_ids) == [1] and not model.HasField("quantization")
        server = await running.stub.GetServerInfo(pb2.GetServerInfoRequest())
        assert server.version == __version__ and server.state == pb2.SERVER_STATE_SERVING
        assert server.max_message_bytes == 3 << 20 and server.started_at.seconds > 1_700_000_000
        assert (await collect(running.stub.Generate(request("count me", 7))))[0] == second
        stats = await running.stub.GetStats(pb2.GetStatsRequest())
        assert (stats.generated_tokens, stats.prompt_tokens, stats.streams_open) == (14, 16, 0)
        assert dict(stats.requests_finished) == {"length": 2} and stats.steps == steps_of(running.engine)
        assert {pool.group for pool in stats.pools} == {"global", "local"}


async def test_calls_fail_as_unavailable_until_the_engine_is_attached():
    async with serving(attach=False) as running:
        for call in (running.stub.Generate(request()), running.stub.GetStats(pb2.GetStatsRequest())):
            code, message, details = await failure(call)
            assert code is grpc.StatusCode.UNAVAILABLE and "loading" in message
            assert details["ErrorInfo"].reason == "UNAVAILABLE"
        server = await running.stub.GetServerInfo(pb2.GetServerInfoRequest())
        assert server.state == pb2.SERVER_STATE_STARTING


async def test_a_full_queue_says_when_to_come_back():
    engine = make_engine(max_waiting=2, max_sequences=1)
    async with serving(engine) as running:
        with Gate(executor_of(engine)) as gate:
            first = running.stub.Generate(request("first", 400))
            gate.let(2)
            await first.read()
            calls = [running.stub.Generate(request(str(i), 400)) for i in range(6)]
            failures = [asyncio.ensure_future(failure(call)) for call in calls]
            await until(lambda: sum(task.done() for task in failures) == 4)
            await until(lambda: stats_now(engine).requests_running == 1)
            assert stats_now(engine).requests_waiting == 2
            for code, _, details in (task.result() for task in failures if task.done()):
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert details["RetryInfo"].retry_delay.ToMilliseconds() >= 1000
            for call in (first, *calls):
                call.cancel()
        await asyncio.gather(*failures, return_exceptions=True)


async def test_an_engine_that_breaks_makes_its_streams_unavailable():
    engine = make_engine(step_s=0.001)
    engine.engine._loop._core.executor.fail_at = 5
    async with serving(engine) as running:
        code, message, details = await failure(running.stub.Generate(request(max_tokens=50)))
        assert code is grpc.StatusCode.UNAVAILABLE and "Traceback" not in message
        assert details["ErrorInfo"].reason == "ENGINE_DEAD"


async def test_an_unexpected_exception_is_internal_without_its_text(caplog):
    async with serving() as running:
        running.engine.engine.stats = lambda: 1 // 0
        caplog.set_level(logging.ERROR, logger="wicore_trt")
        code, message, details = await failure(running.stub.GetStats(pb2.GetStatsRequest()))
        assert code is grpc.StatusCode.INTERNAL and "division" not in message
        call_id = details["RequestInfo"].request_id
        assert call_id in message and call_id in caplog.text and "ZeroDivisionError" in caplog.text


async def test_one_access_line_per_request(caplog):
    caplog.set_level(logging.INFO, logger="wicore_trt.access")
    async with serving() as running:
        await collect(running.stub.Generate(request("abc", 5, request_id="r1")))
        await failure(running.stub.Generate(request("", request_id="r2")))
    lines = [r for r in caplog.records if r.name == "wicore_trt.access"]
    good, bad = (r.facts for r in lines)
    told = [good[name] for name in ("request", "code", "prompt", "tokens", "finish")]
    assert told == ["r1", "OK", 3, 5, "length"]
    assert good["total_ms"] >= good["ttft_ms"] > 0
    assert (bad["request"], bad["code"]) == ("r2", "INVALID_ARGUMENT")
    assert (bad["error"], bad["field"]) == ("InvalidRequestError", "text"), "and nothing of what was asked"
