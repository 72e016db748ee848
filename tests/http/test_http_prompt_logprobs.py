"""Probabilities of prompts over /v1/completions, as evaluation harnesses ask for them."""

from __future__ import annotations

from functools import partial

import pytest
from fakes import EOS, greedy, prompt_logprobs
from web import TOKENIZER, error_of, expected, make_engine, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
make_one = partial(make_engine, logprobs=True, score_rows=7)
EXTRA = {"extra_body": {"ignore_eos": True}}


def check_echo(parts: list, prompt: str, top: int, answer: str) -> None:
    """`parts` are the logprobs objects of one sequence, in order."""
    ids = TOKENIZER.encode(prompt)
    entries = prompt_logprobs(ids, top)
    tokens = [token for part in parts for token in part["tokens"]]
    assert "".join(tokens) == prompt + answer
    values = [value for part in parts for value in part["token_logprobs"]]
    assert values == [None, *(e.logprob for e in entries[1:]), *[-0.5] * len(answer)]
    tops = [found for part in parts for found in part["top_logprobs"]]
    assert tops[0] is None
    for entry, found in zip(entries[1:], tops[1:], strict=False):
        assert found == {TOKENIZER.token_bytes(t).decode(): value for t, value in entry.top}
    assert [o for part in parts for o in part["text_offset"]] == list(range(len(prompt + answer)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
async def test_echo_brings_the_prompts_probabilities(client, stream, count):
    prompts = ["a prompt of some length", "b", "a prompt of some other length"]
    for given in (prompts, [TOKENIZER.encode(p) for p in prompts]):
        found = await client.completions.create(
            model="fake", prompt=given, echo=True, logprobs=2, max_tokens=count, temperature=0, stream=stream, **EXTRA
        )
        choices = [choice async for chunk in found for choice in chunk.choices] if stream else found.choices
        for i, prompt in enumerate(prompts):
            own = [choice for choice in choices if choice.index == i]
            answer = expected(prompt, count)
            assert "".join(choice.text for choice in own) == prompt + answer
            assert own[-1].finish_reason == "length"
            check_echo([c.logprobs.model_dump() for c in own if c.logprobs], prompt, 2, answer)
        if not stream:
            assert found.usage.prompt_tokens == sum(map(len, prompts)) and found.usage.completion_tokens == count * 3
            assert found.usage.prompt_tokens_details.cached_tokens == 0


async def test_what_lm_eval_reads(running):
    """Its is_greedy compares the token's value with the best of the alternatives, so they are the same number."""
    whole = next(
        ids for i in range(9999) if greedy(ids := TOKENIZER.encode(f"the context and the rest {i}"), 1) == [EOS]
    )
    context = TOKENIZER.encode("the context ")
    for prompt in (TOKENIZER.encode("the context and the rest"), whole):  # goes on, ends
        body = {"prompt": [prompt], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
        found = (await running.post("/v1/completions", body)).json()
        probabilities = found["choices"][0]["logprobs"]
        values, tops = (probabilities[name][len(context) : -1] for name in ("token_logprobs", "top_logprobs"))
        assert len(values) == len(prompt) - len(context) and found["usage"]["completion_tokens"] == 1
        assert all(v == max(t.values()) for v, t in zip(values, tops, strict=True))


async def test_prompt_logprobs_as_vllm_has_them(running):
    prompt = "some prompt"
    ids = TOKENIZER.encode(prompt)
    found = await running.completion(prompt=prompt, prompt_logprobs=1, max_tokens=0)
    [choice] = found.json()["choices"]
    assert choice["text"] == "" and choice["logprobs"] is None
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for token, entry, reported in zip(ids[1:], prompt_logprobs(ids, 1)[1:], rest, strict=True):
        said = {"logprob": entry.logprob, "rank": 1, "decoded_token": TOKENIZER.token_bytes(token).decode()}
        assert reported == {str(token): said}
    both = await running.completion(prompt=prompt, prompt_logprobs=0, echo=True, logprobs=3, max_tokens=1)
    [choice] = both.json()["choices"]
    check_echo([choice["logprobs"]], prompt, 3, expected(prompt, 1))
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1] * (len(ids) - 1)
    assert "prompt_logprobs" not in (await running.completion()).json()["choices"][0]
    streamed = await running.completion(prompt_logprobs=1, stream=True)
    assert streamed.status_code == 400 and error_of(streamed)["param"] == "prompt_logprobs"


async def test_tokens_that_the_text_lacks_have_no_length_there():
    class WithBos(type(TOKENIZER)):
        def encode(self, text, *, add_bos=True, max_tokens=None):
            return [1, *super().encode(text)] if add_bos else super().encode(text)

    engine = make_engine(score_rows=7, logprobs=True)
    engine.tokenizer = WithBos()
    async with serving(engine) as running:
        body = {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 0}
        [choice] = (await running.post("/v1/completions", body)).json()["choices"]
    assert choice["text"] == "hello" and choice["logprobs"]["tokens"] == ["<eos>", *"hello"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 4]
