"""OpenAI's API through OpenAI's own client: answers, streams, usage, probabilities, errors."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
from fakes import EOS, greedy
from lazy import LazyModule
from web import GREEDY, MAX_CONTEXT, TOKENIZER, error_of, expected, make_engine, serving

openai = LazyModule("openai")

pytestmark = pytest.mark.asyncio(loop_scope="module")
EXTRA = {"extra_body": {"ignore_eos": True}}
USER = [{"role": "user", "content": "hello"}]


async def test_a_conversation_is_answered(client):
    found = await client.chat.completions.create(model="fake", messages=USER, max_tokens=8, temperature=0, **EXTRA)
    assert found.object == "chat.completion" and found.id.startswith("chatcmpl-") and found.model == "fake"
    [choice] = found.choices
    assert choice.message.role == "assistant" and choice.message.content == expected("hello", 8)
    assert choice.finish_reason == "length" and choice.logprobs is None
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 8, 13)


async def test_the_synchronous_client_is_served_too(running):
    def ask():
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            assert [model.id for model in client.models.list()] == ["fake"]
            found = client.models.retrieve("fake")
            assert found.created > 0 and found.max_model_len == MAX_CONTEXT and found.chat_template is False
            stream = client.chat.completions.create(
                model="fake", messages=USER, max_completion_tokens=8, temperature=0, stream=True, **EXTRA
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == expected("hello", 8)


async def test_a_stream_has_role_texts_reason_and_usage_in_this_order(client):
    stream = await client.chat.completions.create(
        model="fake", messages=USER, max_tokens=20, temperature=0, stream=True,
        stream_options={"include_usage": True}, **EXTRA,
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    assert len({(c.id, c.object, c.created, c.model) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant" and not chunks[0].choices[0].finish_reason
    *deltas, last = chunks
    assert "".join(c.choices[0].delta.content or "" for c in deltas) == expected("hello", 20)
    assert [c.choices[0].finish_reason for c in deltas if c.choices[0].finish_reason] == ["length"]
    assert deltas[-1].choices[0].finish_reason and all(c.usage is None for c in deltas)
    assert last.choices == [] and (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 20)


async def test_usage_tells_of_reused_prompt_tokens_and_in_every_chunk_where_wanted(running, client):
    prompt = "a prompt of several pages that nobody else sends"
    await running.completion(prompt=prompt)
    found = await client.completions.create(model="fake", prompt=prompt, max_tokens=5, temperature=0, **EXTRA)
    assert found.usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 4 * 4
    stream = await client.completions.create(
        model="fake", prompt=prompt, max_tokens=30, temperature=0, stream=True,
        stream_options={"continuous_usage_stats": True}, **EXTRA,
    )  # fmt: skip
    counts = [(c.usage.prompt_tokens, c.usage.completion_tokens) async for c in stream]
    assert {prompt for prompt, _ in counts} == {len(prompt)} and counts[-1][1] == 30
    assert [c for _, c in counts] == sorted(c for _, c in counts)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_and_sequences_are_numbered(client, stream):
    prompts = ["hello", "world", "again"]
    ids = [TOKENIZER.encode(p) for p in prompts]
    for given in (prompts, ids):
        found = await client.completions.create(
            model="fake", prompt=given, n=2, max_tokens=7, temperature=0, stream=stream, **EXTRA
        )
        texts: dict[int, str] = {}
        if stream:
            async for chunk in found:
                for choice in chunk.choices:
                    texts[choice.index] = texts.get(choice.index, "") + choice.text
        else:
            texts = {choice.index: choice.text for choice in found.choices}
            assert found.usage.prompt_tokens == 15 and found.usage.completion_tokens == 42
        assert texts == {i: expected(prompts[i // 2], 7) for i in range(6)}


async def test_a_prompt_of_token_ids_is_continued_and_echoed(client):
    ids = TOKENIZER.encode("hello")
    for prompt in ("hello", ids):
        found = await client.completions.create(
            model="fake", prompt=prompt, echo=True, max_tokens=4, temperature=0, **EXTRA
        )
        assert found.choices[0].text == "hello" + expected("hello", 4)
        stream = await client.completions.create(
            model="fake", prompt=prompt, echo=True, max_tokens=4, temperature=0, stream=True, **EXTRA
        )
        assert "".join([c.choices[0].text async for c in stream]) == "hello" + expected("hello", 4)


async def test_completions_give_sixteen_tokens_unless_they_are_told(client):
    found = await client.completions.create(model="fake", prompt="hello", temperature=0, **EXTRA)
    assert found.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_probabilities_of_a_chat_have_text_and_bytes(client, stream):
    found = await client.chat.completions.create(
        model="fake", messages=USER, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2, stream=stream, **EXTRA
    )
    if stream:
        entries = [e async for c in found if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    else:
        entries = found.choices[0].logprobs.content
    assert "".join(e.token for e in entries) == expected("hello", 6)
    assert all(bytes(e.bytes).decode() == e.token and e.logprob == -0.5 for e in entries)
    assert all([t.logprob for t in e.top_logprobs] == [-0.5, -1.5] for e in entries)


@pytest.mark.parametrize("stream", [False, True])
async def test_probabilities_of_completions_have_offsets(client, stream):
    found = await client.completions.create(
        model="fake", prompt="hello", max_tokens=6, temperature=0, logprobs=3, stream=stream, **EXTRA
    )
    choices = [c.choices[0] async for c in found] if stream else found.choices
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in parts for token in part.tokens]
    assert "".join(tokens) == expected("hello", 6)
    assert [o for part in parts for o in part.text_offset] == list(range(6))
    assert [p for part in parts for p in part.token_logprobs] == [-0.5] * 6
    assert all(len(top) == 3 and top[token] == -0.5 for part in parts for token, top in zip(part.tokens, part.top_logprobs, strict=True))  # fmt: skip # noqa: E501


def ends_by_itself() -> str:
    """A prompt that the fake model ends soon."""
    prompts = (f"try {i}" for i in range(10_000))
    return next(p for p in prompts if 2 < len(greedy(TOKENIZER.encode(p), 12)) < 12)


async def test_the_end_of_a_text_is_told(running, client):
    prompt = ends_by_itself()
    tokens = greedy(TOKENIZER.encode(prompt), 12)
    assert tokens[-1] == EOS
    text = TOKENIZER.decode(tokens)
    answer = (await running.completion(prompt=prompt, max_tokens=50, ignore_eos=False, logprobs=0)).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == (text, "stop", None)
    assert answer["logprobs"]["tokens"] == [*text, "<eos>"], "usage counts the end, which harnesses count back from"
    said = await client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=50, logprobs=True
    )
    assert len(said.choices[0].logprobs.content) == said.usage.completion_tokens == len(tokens)
    whole = expected("hello", 30)
    for stop, reason in (({"stop": whole[5:7]}, whole[5:7]), ({"stop": ["\x7f" * 3, whole[5]]}, whole[5])):
        answer = (await running.completion(max_tokens=30, **stop)).json()["choices"][0]
        assert answer["text"] == whole[: whole.index(reason)]
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", reason)
    kept = (await running.completion(max_tokens=30, stop=whole[5], include_stop_str_in_output=True)).json()
    assert kept["choices"][0]["text"] == whole[: whole.index(whole[5]) + 1]
    token = TOKENIZER.encode(whole[5])[0]
    answer = (await running.completion(max_tokens=30, stop_token_ids=[token])).json()["choices"][0]
    assert (answer["text"], answer["stop_reason"]) == (whole[: whole.index(whole[5])], token)


async def test_roles_and_parts_of_messages(running):
    turns = [
        {"role": "developer", "content": "be "},
        {"role": "user", "content": [{"type": "text", "text": "kind"}], "name": "me"},
        {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "reasoning_content": "hm"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "parsed": {"a": 1}, "tool_calls": [], "function_call": None},
        {"role": "user", "content": "there"},
        {"role": "assistant", "content": "?", "provider_specific_fields": {"a": 1}, "reasoning_details": [{}]},
        {"role": "user", "content": "now"},
        {"role": "user", "content": "then"},
    ]
    found = await running.post("/v1/chat/completions", {"messages": turns, "max_tokens": 3, **GREEDY})
    assert found.status_code == 200, found.text


async def test_errors_reach_the_client_as_its_own(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="fake", messages=USER, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-4", messages=USER)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model="fake", prompt=[5] * (MAX_CONTEXT + 1))
    assert long.value.param == "prompt"


async def test_the_timeout_of_a_request_is_an_error(running):
    found = await running.completion(max_tokens=1000, timeout=1e-9)
    assert found.status_code == 504 and error_of(found)["type"] == "timeout_error"
    streamed = await running.completion(max_tokens=1000, timeout=1e-9, stream=True)
    assert streamed.status_code == 504, "nothing was sent, so that there is a status"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit(running, field):
    found = await running.chat(**{"max_tokens": 9, field: 3})
    assert found.json()["usage"]["completion_tokens"] == 3


async def test_hints_and_knobs_are_taken(running):
    body = {
        "seed": 7, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "min_tokens": 2, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"12": -100}, "priority": -1,
        "cache_salt": "s", "cache": {"session": "c", "priority": "high", "ttl_s": 60}, "temperature": 1,
    }  # fmt: skip
    found = await running.chat(**body)
    assert found.status_code == 200, found.text
    assert found.json()["usage"]["completion_tokens"] == 5


async def test_what_is_not_to_be_stored_is_found_by_nobody(running):
    prompt, found = "a prompt of several pages that is never stored", []
    for store in ("never", "never", "device", "all"):
        answer = await running.completion(prompt=prompt, cache={"store": store})
        found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found[:3] == [0, 0, 0] and found[3] > 0
    for cache in ({"store": "disk"}, {"store": "device", "session": "s"}):
        wrong = await running.completion(prompt="a", cache=cache)
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "cache.store"


async def test_both_names_of_the_penalty(running):
    asked = {"temperature": 1, "seed": 7, "max_tokens": 20}
    answers = [
        (await running.completion(prompt="aaaa", **asked, **more)).json()["choices"][0]["text"]
        for more in (
            {},
            {"repetition_penalty": 50},
            {"repeat_penalty": 50},
            {"repeat_penalty": 50.0, "repetition_penalty": 50},
        )
    ]
    assert answers[1] == answers[2] == answers[3]
    wrong = await running.completion(prompt="a", repeat_penalty=1.5, repetition_penalty=1.1)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "repeat_penalty"


async def test_the_salt_divides_the_cache(running):
    prompt = "a prompt of several pages under a salt"
    cached = [
        (await running.completion(prompt=prompt, cache_salt=salt)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]  # noqa: E501
        for salt in ("one", "two", "one")
    ]  # fmt: skip
    assert cached[0] == cached[1] == 0 < cached[2]


async def test_null_is_not_given(running):
    nulls = dict.fromkeys(("stop", "n", "logprobs", "seed", "tools", "response_format", "stream_options", "cache"))
    assert (await running.chat(**nulls)).status_code == 200


async def test_bytes_on_the_wire(running):
    """What clients without a library rely on: events by blank lines, [DONE] last."""
    found = await running.chat(stream=True)
    assert found.headers["content-type"].startswith("text/event-stream")
    events = found.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(e.startswith("data: {") for e in events[:-2])
    async with httpx.AsyncClient(base_url=running.url) as fresh:
        head = await fresh.head("/health")
        assert head.status_code == 200 and head.content == b""


async def test_a_model_answers_to_each_of_its_names_by_the_name_asked_for():
    engine = make_engine()
    engine.info = replace(engine.info, model_id="a/b", aliases=("gpt-5-codex", "claude-sonnet-4-5"))
    async with serving(engine) as running:
        listed = (await running.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["a/b", "gpt-5-codex", "claude-sonnet-4-5"]
        messages = [{"role": "user", "content": "hi"}]
        asking = {
            "/v1/chat/completions": {"messages": messages, "max_tokens": 2},
            "/v1/completions": {"prompt": "hi", "max_tokens": 2},
            "/v1/responses": {"input": "hi", "max_output_tokens": 2},
            "/v1/messages": {"messages": messages, "max_tokens": 2},
        }
        for name, model in zip(("a/b", "gpt-5-codex", "claude-sonnet-4-5"), listed, strict=True):
            assert (await running.client.get(f"/v1/models/{name}")).json() == model
            for path, body in asking.items():
                answer = await running.post(path, {**body, "model": name, "temperature": 0})
                assert answer.json()["model"] == name, (path, answer.text)
            prompt = {"model": name, "messages": messages}
            assert (await running.post("/v1/messages/count_tokens", prompt)).status_code == 200
        for path, body in asking.items():
            assert (await running.post(path, {**body, "temperature": 0})).json()["model"] == "a/b"
            refused = await running.post(path, {**body, "model": "gpt-5"})
            assert refused.status_code == 404
            assert "'a/b', 'gpt-5-codex', 'claude-sonnet-4-5' is." in error_of(refused)["message"]
