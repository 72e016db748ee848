"""Log-probabilities of prompts: whole and once, whatever is cached, batched, preempted or parked."""

from __future__ import annotations

import random

import pytest
from fakes import greedy, make_core, prompt_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st

from wicore_trt.config import KVSettings
from wicore_trt.errors import InvalidRequestError
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams


def run(core, arrivals: dict[int, list[GenerateRequest]]) -> dict[str, list]:
    """Outputs by request, until idle."""
    found: dict[str, list] = {}
    for step in range(5000):
        for request in arrivals.pop(step, ()):
            core.add(request)
        if not core.has_work and not arrivals:
            return found
        for output in core.step():
            found.setdefault(output.request_key, []).append(output)
        core.scheduler.check_integrity()
    raise AssertionError("the engine did not come to rest")


def check(outputs: list, prompt: list[int], params: SamplingParams) -> None:
    reported = [entry for output in outputs for entry in output.prompt_logprobs]
    assert reported == list(prompt_logprobs(prompt, params.prompt_logprobs))
    assert [t for output in outputs for t in output.token_ids] == greedy(prompt, params.max_tokens)
    assert outputs[-1].finish_reason is not None and outputs[-1].usage.cached_tokens == 0
    assert outputs[-1].usage.completion_tokens == len([t for output in outputs for t in output.token_ids])
    first = next((i for i, output in enumerate(outputs) if output.token_ids), len(outputs))
    assert not any(output.prompt_logprobs for output in outputs[first + 1 :])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), tiers=st.booleans())
def test_every_token_of_a_prompt_is_scored_once(seed: int, tiers: bool) -> None:
    """Prompts that share prefixes with cached ones, some of them scored, in pools that hold few of them."""
    rng = random.Random(seed)
    budget, rows = rng.randint(2, 40), rng.randint(1, 20)
    core = make_core(
        pages={GLOBAL: 18 + rng.randint(0, 20), LOCAL: 20 + rng.randint(0, 20)}, max_batch_tokens=budget,
        max_sequences=rng.randint(1, 5), score_rows=rows,
        kv=KVSettings(host_bytes=1 << 14) if tiers else None,
    )  # fmt: skip
    base = [rng.randrange(97) for _ in range(60)]
    arrivals: dict[int, list[GenerateRequest]] = {}
    made = {}
    for i in range(10):
        prompt = (base[: rng.randint(0, 50)] + [rng.randrange(97) for _ in range(rng.randint(1, 10))])[:60]
        scored = rng.random() < 0.6
        params = SamplingParams(
            temperature=0.0, max_tokens=rng.randint(0 if scored else 1, 8),
            prompt_logprobs=rng.randint(0, 3) if scored else None,
        )  # fmt: skip
        request = GenerateRequest(str(i), tuple(prompt), params, tenant=rng.choice(["", "a"]))
        made[str(i)] = request
        arrivals.setdefault(rng.randint(0, 25), []).append(request)
    found = run(core, arrivals)
    for name, request in made.items():
        prompt = list(request.prompt_token_ids)
        if request.params.prompt_logprobs is not None:
            check(found[name], prompt, request.params)
        else:
            assert [t for o in found[name] for t in o.token_ids] == greedy(prompt, request.params.max_tokens)
            assert not any(o.prompt_logprobs for o in found[name])


def test_what_is_cached_is_computed_again_and_stays_shared() -> None:
    core = make_core(max_batch_tokens=64, score_rows=64)
    prompt = list(range(40))
    plain = SamplingParams(temperature=0.0, max_tokens=3)
    scored = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2)
    run(core, {0: [GenerateRequest("a", tuple(prompt), plain)]})
    check(run(core, {0: [GenerateRequest("b", tuple(prompt), scored)]})["b"], prompt, scored)
    again = run(core, {0: [GenerateRequest("c", tuple(prompt), plain)]})["c"]
    assert again[-1].usage.cached_tokens == 36


def test_a_preempted_prompt_goes_on_where_it_was() -> None:
    core = make_core(max_batch_tokens=8, score_rows=8)
    prompt = [5, 6] * 20
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
    core.add(GenerateRequest("a", tuple(prompt), params))
    outputs = core.step() + core.step()
    [sequence] = core.scheduler.running
    schedule = type(core.scheduler.schedule_step())()
    core.scheduler._preempt_sequence(sequence, schedule)
    assert sequence.computed == 0 and sequence.scored == 17
    outputs += run(core, {})["a"]
    check(outputs, prompt, params)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_bad_logits_of_a_prompt_end_its_sequence_alone() -> None:
    core = make_core(max_batch_tokens=64, score_rows=64)
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
    core.add(GenerateRequest("a", (5, 6, 7), params))
    core.add(GenerateRequest("b", (8, 9), params))
    core.executor.poison = {0}
    found = run(core, {})
    assert found["a"][-1].finish_reason is FinishReason.ERROR
    check(found["b"], [8, 9], params)


def test_engines_that_cannot_say_so() -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with pytest.raises(InvalidRequestError, match="no log-probabilities of prompts") as caught:
        make_core().validate_request(GenerateRequest("a", (1,), params))
    assert caught.value.field == "prompt_logprobs"
    make_core(score_rows=1).validate_request(GenerateRequest("a", (1,), params))


def test_no_output_is_asked_of_prompts_alone() -> None:
    with pytest.raises(InvalidRequestError, match=r"\[1, "):
        SamplingParams(max_tokens=0)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
