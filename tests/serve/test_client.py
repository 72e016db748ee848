"""The client class against a real server: the answers of the engine, and the engine's errors as exceptions."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from fakes import Gate
from serving import executor_of, expected, make_engine, serving, stats_now, until

from wicore_trt.client import Client, _make_sampling, _output_of
from wicore_trt.errors import (
    AuthenticationError,
    DeadlineError,
    InvalidRequestError,
    QueueFullError,
    UnavailableError,
    WicoreError,
)
from wicore_trt.serve import convert
from wicore_trt.types import CacheHints, CachePriority, FinishReason, SamplingParams, TextOutput, TokenLogprob, Usage

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)


async def test_prompts_chats_and_streams_are_answered():
    async with serving() as running:
        with Client(running.address) as client:
            await asyncio.to_thread(client.wait_ready)
            results = await asyncio.to_thread(client.generate, ["one", "two and more"], GREEDY)
            for prompt, (completion,) in zip(("one", "two and more"), results, strict=True):
                text, tokens = expected(prompt, 8)
                assert (completion.text, list(completion.token_ids)) == (text, tokens)
                assert completion.finish_reason is FinishReason.LENGTH and completion.usage.completion_tokens == 8
            parts = await asyncio.to_thread(lambda: list(client.stream("one", GREEDY)))
            assert "".join(part.text for part in parts) == expected("one", 8)[0]
            turns = [{"role": "user", "content": "hello"}]
            several = SamplingParams(max_tokens=4, temperature=0, n=2, ignore_eos=True)
            hints = CacheHints("s", CachePriority.HIGH, 5.0)
            first, second = await asyncio.to_thread(lambda: client.chat(turns, several, cache=hints))
            assert first.token_ids == second.token_ids and len(first.token_ids) == 4


async def test_prompts_are_dicts_too_and_each_has_its_parameters():
    async with serving() as running:
        with Client(running.address) as client:
            prompts, params = [{"prompt": "one"}, {"prompt_token_ids": [5, 6]}], [GREEDY, replace(GREEDY, max_tokens=3)]
            [[first], [second]] = await asyncio.to_thread(client.generate, prompts, params)
            assert list(first.token_ids) == expected("one", 8)[1] and len(second.token_ids) == 3
            for prompt, given, field in (
                ("a", [GREEDY] * 2, "params"),
                ("a", 3, "params"),
                ({"text": "a"}, None, "prompt"),
                ({"prompt": 5}, None, "prompt"),
                ({"prompt_token_ids": "ab"}, None, "prompt_token_ids"),
                ({"prompt_token_ids": 5}, None, "prompt_token_ids"),
                ([["a"]], None, "prompt_token_ids"),
            ):
                with pytest.raises(InvalidRequestError) as caught:
                    await asyncio.to_thread(client.generate, prompt, given)
                assert caught.value.field == field, prompt


async def test_the_model_and_its_counters_are_told_as_the_engine_tells_them():
    async with serving() as running:
        with Client(running.address) as client:
            await asyncio.to_thread(client.generate, "one", GREEDY)
            assert await asyncio.to_thread(client.info) == replace(running.engine.info, build="")
            told, now = await asyncio.to_thread(client.stats), stats_now(running.engine)
    assert told.generated_tokens == 8 and told.uptime_s > 0 and told.kv.tiers and told.pools
    assert told.step_seconds == pytest.approx(now.step_seconds, abs=1e-9)  # whole nanoseconds
    assert replace(told, uptime_s=0, step_seconds=0) == replace(now, uptime_s=0, step_seconds=0, step_tokens=())


async def test_a_client_that_is_closed_says_so():
    async with serving() as running:
        client = Client(running.address)
        client.close()
        for call in (
            client.info, client.stats, client.wait_ready, client.has_chat_template,
            lambda: client.generate("a"), lambda: client.chat([{"role": "user", "content": "a"}]),
            lambda: next(client.stream("a")),
        ):  # fmt: skip
            with pytest.raises(WicoreError, match="This client was closed"):
                await asyncio.to_thread(call)


async def test_errors_are_those_of_the_engine():
    async with serving(make_engine(step_s=0.05)) as running:
        with Client(running.address) as client:

            def fails(error, *args, **kwargs):
                with pytest.raises(error) as caught:
                    client.generate(*args, **kwargs)
                return caught.value

            wrong = await asyncio.to_thread(fails, InvalidRequestError, [[1 << 30]])
            assert wrong.field == "token_ids"
            await asyncio.to_thread(fails, DeadlineError, "hello", LONG, timeout_s=0.3)
    with socket.socket() as nobody, Client("{}:{}".format(*bound(nobody))) as client:
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(client.generate, "hello", GREEDY)
        with pytest.raises(UnavailableError, match="took no requests"):
            await asyncio.to_thread(client.wait_ready, 0.3)


def bound(nobody: socket.socket) -> tuple[str, int]:
    """An address at which nothing listens, and nothing will."""
    nobody.bind(("127.0.0.1", 0))
    return nobody.getsockname()


async def test_a_full_queue_says_when_to_come_back_and_a_wrong_key_is_told(tmp_path):
    engine = make_engine(max_waiting=2)
    async with serving(engine, api_key="k" * 32) as running:
        with Client(running.address, api_key="wrong") as client, pytest.raises(AuthenticationError):
            await asyncio.to_thread(client.generate, "hello", GREEDY)
        with Client(running.address, api_key="k" * 32) as client:
            codes = running.server.service.admission.counts.grpc
            with Gate(executor_of(engine)):
                asked = asyncio.to_thread(client.generate, ["a", "b"] * 40, replace(LONG, max_tokens=30))
                answers = asyncio.ensure_future(asked)  # they are read in order
                await until(lambda: codes["Generate", "RESOURCE_EXHAUSTED"])
            with pytest.raises(QueueFullError) as caught:
                await answers
            assert caught.value.retry_after_s > 0


async def test_a_stream_that_is_dropped_ends_its_request():
    async with serving(make_engine(step_s=0.01)) as running:
        with Client(running.address) as client:

            def taste():
                for _ in client.stream("hello", LONG):
                    return

            await asyncio.to_thread(taste)
            await until(lambda: stats_now(running.engine).requests_running == 0)


def test_outputs_and_parameters_come_back_as_they_were():
    usage = Usage(7, 2, 3)
    logprobs = (TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))), TokenLogprob(6, -0.25))
    for output in (
        TextOutput("r", 1, "ab", (5, 6), logprobs),
        TextOutput("r", 0, "c", (5, 6), logprobs, FinishReason.STOP, "stop", usage),
        TextOutput("r", 0, "", (), prompt_logprobs=logprobs),
        TextOutput("r", 0, "", (), (), FinishReason.STOP, 106, usage),
        TextOutput("r", 0, "", (), (), FinishReason.DEADLINE, None, usage),
    ):
        (message,) = convert.make_responses(output, first_token_s=None, total_s=1.0)
        assert _output_of(message) == output
    given = SamplingParams(max_tokens=3, top_k=2, seed=0, n=2, logprobs=0, logit_bias={5: -1.0}, stop=("x",))
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert convert.read_sampling_params(_make_sampling(scored)) == scored
    assert convert.read_sampling_params(_make_sampling(given)) == given
    assert convert.read_sampling_params(_make_sampling(SamplingParams())) == SamplingParams()


def test_what_is_not_installed_is_named():
    code = (
        "import sys\nsys.modules['grpc'] = None\nsys.modules['torch'] = None\nimport wicore_trt\n"
        "try:\n    wicore_trt.Client\nexcept wicore_trt.EnvironmentUnfitError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "[serve]" in done.stdout, done.stderr
