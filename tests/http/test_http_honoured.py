"""Fields that other servers have, honoured: constraints by other names, tokens, stops of special tokens, counts."""

from __future__ import annotations

import json
import re
import threading

import pytest
from constrained_web import PAINT, make_constrained_engine
from fakes import EOS
from lazy import LazyModule
from web import TOKENIZER, error_of, make_engine, serving

openai = LazyModule("openai")
anthropic = LazyModule("anthropic")

pytestmark = pytest.mark.asyncio(loop_scope="module")
make_one = make_constrained_engine
USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paint.", "parameters": PAINT}}
EBNF = 'root ::= "<" letter+ ">"\nletter ::= [a-c]'
SCHEMA = {"const": {"a": 1}}


def ids(text: str) -> list[int]:
    return [ord(c) - 32 for c in text]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"ebnf": EBNF}, "<[abc]+>"),
        ({"grammar": EBNF}, "<[abc]+>"),
        ({"guided_grammar": EBNF}, "<[abc]+>"),
        ({"structured_outputs": {"grammar": EBNF}}, "<[abc]+>"),
        ({"json_schema": SCHEMA}, r'\{\s*"a"\s*:\s*1\s*\}'),
        ({"json_schema": json.dumps(SCHEMA)}, r'\{\s*"a"\s*:\s*1\s*\}'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, r'\{\s*"a"\s*:\s*1\s*\}'),
    ],
)
async def test_constraints_by_the_names_of_other_servers(running, fields, pattern):
    for seed in range(3):
        answer = await running.chat(max_tokens=60, temperature=1, seed=seed, ignore_eos=False, **fields)
        [choice] = answer.json()["choices"]
        assert choice["finish_reason"] == "length" or re.fullmatch(pattern, choice["message"]["content"]), choice


async def test_an_older_name_of_a_format_holds_messages(running):
    form = {"type": "json_schema", "schema": SCHEMA}
    body = {"messages": USER, "max_tokens": 60, "seed": 3}
    found = (await running.post("/v1/messages", {**body, "output_format": form})).json()
    assert json.loads(found["content"][0]["text"]) == {"a": 1}
    both = await running.post("/v1/messages", {**body, "output_format": form, "output_config": {"format": form}})
    assert both.status_code == 400 and error_of(both)["param"] == "output_format"


async def test_only_allowed_tokens_come(running):
    """An end is one of them, or does not come."""
    for seed in range(4):
        body = {"allowed_token_ids": ids("xyz"), "max_tokens": 30, "temperature": 1, "seed": seed, "ignore_eos": False}
        [choice] = (await running.completion(**body)).json()["choices"]
        assert set(choice["text"]) <= set("xyz") and len(choice["text"]) == 30
        body |= {"allowed_token_ids": [*ids("x"), EOS], "max_tokens": 200}
        [choice] = (await running.completion(**body)).json()["choices"]
        assert set(choice["text"]) <= {"x"} and choice["finish_reason"] == "stop"
    for wrong in ([], [97], [-1]):
        refused = await running.completion(allowed_token_ids=wrong)
        assert refused.status_code == 400 and error_of(refused)["param"].startswith("allowed_token_ids"), refused.text
    refused = await running.completion(allowed_token_ids=[5], guided_regex="a")
    assert refused.status_code == 400 and "exclude" in error_of(refused)["message"]


async def test_bad_words_do_not_come(running):
    texts = ""
    for seed in range(6):
        body = {"bad_words": ["ab", "c", '"/.'], "logit_bias": {str(i): 30 for i in ids("abc")}, "max_tokens": 40}
        texts += (await running.completion(**body, temperature=1, seed=seed)).json()["choices"][0]["text"] + "\n"
    assert "a" in texts and "b" in texts and "c" not in texts and "ab" not in texts and '"/.' not in texts


async def test_stop_strings_name_special_tokens(running):
    """The end goes on here, and is no text; who stops at its name stops, whatever stands beside it."""
    biased = {"max_tokens": 40, "temperature": 0, "logit_bias": {str(EOS): 100}}
    for more in ({}, {"stream": True}):
        told = await running.completion(stop=["<eos>"], **biased, **more)
        chunks = [told.json()] if not more else [json.loads(x[6:]) for x in told.text.split("\n\n") if "{" in x]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert choices[-1]["finish_reason"] == "stop" and choices[-1]["stop_reason"] == "<eos>"
        assert "".join(choice["text"] for choice in choices) == ""
    kept = (await running.completion(stop="<eos>", include_stop_str_in_output=True, **biased)).json()["choices"][0]
    assert kept["text"] == "<eos>"
    twice = (await running.completion(stop="<eos><eos>", **biased)).json()
    assert twice["choices"][0]["stop_reason"] == "<eos><eos>" and twice["usage"]["completion_tokens"] == 2
    found = (await running.completion(stop="<eos>x", **biased)).json()
    assert found["choices"][0]["finish_reason"] == "length" and found["choices"][0]["text"] == ""
    shown = (await running.completion(skip_special_tokens=False, **(biased | {"max_tokens": 3}))).json()["choices"][0]
    assert shown["text"] == "<eos>" * 3


async def test_prompts_are_cut_from_the_left(running):
    whole, end = (await running.completion(prompt="a long prompt", truncate_prompt_tokens=6)).json(), " prompt"[1:]
    assert whole["usage"]["prompt_tokens"] == 6
    assert whole["choices"][0]["text"] == (await running.completion(prompt=end)).json()["choices"][0]["text"]
    fits = (await running.completion(prompt="x" * 5000, truncate_prompt_tokens=-1)).json()
    assert fits["usage"]["prompt_tokens"] == 1023
    assert (await running.chat("x" * 5000, truncate_prompt_tokens=9)).json()["usage"]["prompt_tokens"] == 9
    for more in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 4, "echo": True}):
        refused = await running.completion(**more)
        assert refused.status_code == 400 and error_of(refused)["param"] == "truncate_prompt_tokens"


async def test_token_ids_are_told(running):
    found = (await running.completion(prompt=["ab", "c"], return_token_ids=True, n=2)).json()
    for index, choice in enumerate(found["choices"]):
        assert choice["prompt_token_ids"] == ids(["ab", "c"][index // 2])
        assert TOKENIZER.decode(choice["token_ids"]) == choice["text"] and len(choice["token_ids"]) == 5
    said = (await running.chat("hello", return_token_ids=True)).json()
    assert said["prompt_token_ids"] == ids("hello")
    assert TOKENIZER.decode(said["choices"][0]["token_ids"]) == said["choices"][0]["message"]["content"]
    for ask in (running.chat, running.completion):
        streamed = (await ask(return_token_ids=True, stream=True)).text
        chunks = [json.loads(x[6:]) for x in streamed.split("\n\n") if "{" in x]
        first = chunks[0].get("prompt_token_ids") or chunks[0]["choices"][0].get("prompt_token_ids")
        assert first == ids("hello")
        assert len([i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", ())]) == 5


async def test_texts_of_tokens_are_made_beside_the_event_loop():
    """Decoding 128K tokens takes some 50 ms, for which every stream would stand still."""
    threads: set[int] = set()

    class Spelt(bytes):
        def decode(self, *args: str, **options: str) -> str:
            threads.add(threading.get_ident())
            return super().decode(*args, **options)

    class Spelling(type(TOKENIZER)):
        def token_bytes(self, token: int) -> bytes:
            return Spelt(b"h\xff" if token == ids("h")[0] else super().token_bytes(token))

    engine = make_engine()
    engine.tokenizer = Spelling()
    async with serving(engine) as running:
        found = (await running.post("/tokenize", {"prompt": "hello", "return_token_strs": True})).json()
    assert found["tokens"] == ids("hello") and found["token_strs"] == ["h\ufffd", *"ello"]
    assert threads and threading.get_ident() not in threads


async def test_chat_has_the_prompts_probabilities_and_zero_logprobs():
    async with serving(make_engine(logprobs=True, score_rows=7)) as running:
        found = (await running.chat("hello", prompt_logprobs=1, max_tokens=1)).json()
        assert len(found["prompt_logprobs"]) == 5 and found["prompt_logprobs"][0] is None
        assert (await running.chat(logprobs=0)).json()["choices"][0]["logprobs"] is None
        assert (await running.completion(logprobs=False)).json()["choices"][0]["logprobs"] is None
        refused = await running.chat(prompt_logprobs=1, stream=True)
        assert refused.status_code == 400 and error_of(refused)["param"] == "prompt_logprobs"


async def test_counts_are_those_of_the_generations(running):
    """Functions and all: what is counted beforehand is what usage tells."""
    chat = {"messages": USER, "tools": [TOOL]}
    used = (await running.post("/v1/chat/completions", {**chat, "max_tokens": 1})).json()["usage"]["prompt_tokens"]
    assert (await running.post("/tokenize", chat)).json()["count"] == used > 100
    assert (await running.post("/tokenize", {**chat, "tool_choice": "none"})).json()["count"] == len("hello")
    asked = {"input": "hello", "instructions": "be", "tools": [{"type": "function", **TOOL["function"]}]}
    counted = (await running.post("/v1/responses/input_tokens", asked)).json()
    used = (await running.post("/v1/responses", {**asked, "max_output_tokens": 1})).json()["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": used}


async def test_the_official_clients_list_models_count_and_stream(running, client):
    [model] = [found async for found in client.models.list()]
    assert (await client.models.retrieve(model.id)).id == model.id
    counted = await client.responses.input_tokens.count(model=model.id, input="hello")
    stream = await client.responses.create(model=model.id, input="hello", max_output_tokens=4, stream=True)
    events = [event async for event in stream]
    assert events[-1].response.usage.input_tokens == counted.input_tokens
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another")
    plain = anthropic.DefaultAsyncHttpxClient(verify=False)
    claude = anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0, http_client=plain)
    [listed] = [found async for found in claude.models.list()]
    assert listed.id == (await claude.models.retrieve(listed.id)).id == model.id and listed.created_at.year > 2000
    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.models.retrieve("another")
    assert caught.value.body == {"type": "error", **caught.value.body}, caught.value.body
    counted = await claude.messages.count_tokens(model=listed.id, messages=USER)
    async with claude.messages.stream(model=listed.id, messages=USER, max_tokens=4) as stream:
        final = await stream.get_final_message()
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == counted.input_tokens


async def test_routes_that_balancers_and_harnesses_ask(running):
    assert (await running.client.get("/ping")).status_code == 200
    assert (await running.client.get("/load")).json() == {"server_load": 0}
    assert (await running.client.get("/tokenizer_info")).json()["eos_token"] == "<eos>"
