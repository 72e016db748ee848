"""EngineCore over checked memory: right tokens, whatever is batched, shared, preempted or cancelled."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fakes import EOS, greedy, make_core
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wicore_trt.core.limits import Limits
from wicore_trt.errors import InvalidRequestError
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def request(name: str, prompt: list[int], params: SamplingParams = GREEDY, **kwargs) -> GenerateRequest:
    return GenerateRequest(name, tuple(prompt), params, **kwargs)


def run(core, *, limit: int = 5000, on_step=None) -> dict[tuple[str, int], list[int]]:
    """Step until idle; returns the tokens of each sequence and checks that each ends exactly once."""
    tokens: dict[tuple[str, int], list[int]] = {}
    ended: dict[tuple[str, int], FinishReason] = {}
    for step in range(limit):
        if not core.has_work:
            return tokens
        if on_step is not None:
            on_step(step)
        for output in core.step():
            key = (output.request_key, output.index)
            assert key not in ended, "output after the end"
            tokens.setdefault(key, []).extend(output.token_ids)
            assert output.usage.completion_tokens == len(tokens[key])
            if output.finish_reason is not None:
                ended[key] = output.finish_reason
        core.scheduler.check_integrity()
    raise AssertionError("the engine did not come to rest")


def random_prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Prompts that share prefixes: each extends a random earlier one by random tokens."""
    prompts: list[list[int]] = [[rng.randrange(97) for _ in range(rng.randint(1, longest))]]
    while len(prompts) < count:
        base = rng.choice(prompts)
        head = base[: rng.randint(0, len(base))]
        prompts.append((head + [rng.randrange(97) for _ in range(rng.randint(1, 20))])[:longest])
    return prompts


def test_one_request():
    core = make_core()
    core.add(request("a", [5, 6, 7]))
    assert run(core)["a", 0] == greedy([5, 6, 7], 12)
    assert core.scheduler.manager.pools[GLOBAL].used_slots == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_tokens=st.sampled_from([1, 2, 4, 8]),
    window=st.integers(2, 24),
    budget=st.integers(1, 40),
    slack=st.integers(0, 40),
    groups=st.sampled_from([(GLOBAL, LOCAL), (GLOBAL,), (LOCAL,)]),
    prefix_cache=st.booleans(),
    ahead=st.booleans(),
)
# The window kept for later requests is a page more than the next token needs: the smallest pool must give it up.
@example(seed=0, page_tokens=8, window=2, budget=3, slack=0, groups=(GLOBAL, LOCAL), prefix_cache=False, ahead=False)
def test_tokens_depend_on_the_request_alone(seed, page_tokens, window, budget, slack, groups, prefix_cache, ahead):
    """Random shared prompts, arrivals, cancellations and pools down to the smallest that can hold one request."""
    rng = random.Random(seed)
    longest, new = 60, 10
    need = {
        GLOBAL: -(-(longest + new) // page_tokens),
        LOCAL: -(-min(longest + new, window + budget) // page_tokens) + 1,
    }
    core = make_core(
        pages={g: need[g] + slack for g in groups}, page_tokens=page_tokens, window=window, max_batch_tokens=budget,
        max_sequences=rng.randint(1, 6), prefix_cache=prefix_cache, checkpoint_tokens=rng.choice([4, 16, 64]),
        ahead=seed if ahead else None,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=new)
    prompts = dict(enumerate(random_prompts(rng, 12, longest)))
    arrivals = {i: rng.randint(0, 30) for i in prompts}
    cancelled = {i: rng.randint(0, 60) for i in rng.sample(sorted(prompts), 3)}
    ended_early: set[int] = set()

    def on_step(step):
        for i, at in arrivals.items():
            if at == step or (step == 0 and at == 0):
                core.add(request(str(i), prompts[i], params, priority=rng.randint(0, 2)))
        for i, at in cancelled.items():
            if at == step and core.abort(str(i)):
                ended_early.add(i)

    core.add(request("keep-alive", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)))
    outputs = run(core, on_step=on_step)
    for i, prompt in prompts.items():
        if (str(i), 0) not in outputs and (arrivals[i] > 30 or i in ended_early):
            continue
        want, got = greedy(prompt, new), outputs.get((str(i), 0), [])
        assert got == (want[: len(got)] if i in ended_early else want), f"request {i}"
    assert all(pool.used_slots == 0 for pool in core.scheduler.manager.pools.values())


def test_a_shared_prefix_is_computed_once():
    core = make_core(max_batch_tokens=64)
    prompt = list(range(40))
    core.add(request("a", prompt))
    run(core)
    core.add(request("b", [*prompt, 50, 51]))
    outputs = [o for _ in range(100) if core.has_work for o in core.step()]
    assert outputs[-1].usage.cached_tokens == 40
    assert [t for o in outputs for t in o.token_ids] == greedy([*prompt, 50, 51], 12)


def test_requests_that_arrive_together_wait_for_the_prefix_one_of_them_computes():
    core = make_core(max_batch_tokens=16)
    prompt = list(range(60))
    for name in "abc":
        core.add(request(name, prompt))
    outputs = run(core)
    computed = sum(count for step in core.executor.steps for _, count in step)
    assert all(outputs[name, 0] == greedy(prompt, 12) for name in "abc")
    assert computed < 60 + 3 * (12 + 4), f"{computed} tokens computed: the prefix was not shared"


def test_a_salt_separates_tenants():
    core = make_core()
    prompt = list(range(40))
    for name, salt in (("a", "red"), ("b", "blue"), ("c", "red")):
        core.add(request(name, prompt, cache_salt=salt))
        outputs = [o for _ in range(100) if core.has_work for o in core.step()]
        assert outputs[-1].usage.cached_tokens == (36 if name == "c" else 0)


def test_local_pages_are_freed_behind_the_window_and_a_continued_conversation_still_hits():
    core = make_core(pages={GLOBAL: 64, LOCAL: 12}, window=8, max_batch_tokens=16, max_context=256)
    prompt = list(range(90))
    core.add(request("a", prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)))
    run(core)
    turn = prompt + greedy(prompt, 20, ignore_eos=True) + [7, 8, 9]
    core.add(request("b", turn))
    outputs = [o for _ in range(100) if core.has_work for o in core.step()]
    assert outputs[-1].usage.cached_tokens >= 104


def test_preemption_under_pressure_gives_the_same_tokens():
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    core = make_core(pages={GLOBAL: 20, LOCAL: 20}, page_tokens=4, max_batch_tokens=32)
    prompts = {name: [ord(name)] * 10 for name in "defg"}
    for name, prompt in prompts.items():
        core.add(request(name, prompt, params))
    outputs = run(core)
    assert core.scheduler.preemptions > 0
    assert set(core.executor.released) == {0, 1, 2, 3}
    for name, prompt in prompts.items():
        assert outputs[name, 0] == greedy(prompt, 40, ignore_eos=True)


def test_n_sequences_share_the_prompt_and_differ_in_seed():
    core = make_core(max_batch_tokens=64)
    core.add(request("a", list(range(33)), SamplingParams(temperature=0.0, max_tokens=5, n=4, seed=3)))
    outputs = run(core)
    assert sorted(outputs) == [("a", i) for i in range(4)]
    computed = sum(count for step in core.executor.steps for _, count in step)
    assert computed <= 33 + 4 * (5 + 4)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], GREEDY, "prompt"),
        ([1] * 128, GREEDY, "prompt"),
        ([1, 97], GREEDY, "prompt_token_ids"),
        ([1, -1], GREEDY, "prompt_token_ids"),
        ([1], SamplingParams(stop_token_ids=(97,)), "stop_token_ids"),
        ([1], SamplingParams(logit_bias={200: 1.0}), "logit_bias"),
    ],
)
def test_requests_that_can_never_run_are_refused(prompt, params, field):
    with pytest.raises(InvalidRequestError) as error:
        make_core().validate_request(request("a", prompt, params))
    assert error.value.field == field


def test_max_tokens_context_limit_stop_ids_and_min_tokens_end_a_sequence():
    prompt = [3, 4, 5]
    want = greedy(prompt, 60, ignore_eos=True)
    cases = {
        "limit": (SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), want[:3], FinishReason.LENGTH),
        "context": (SamplingParams(temperature=0.0, ignore_eos=True), want[:29], FinishReason.LENGTH),
        "stop": (
            SamplingParams(temperature=0.0, stop_token_ids=(want[4],), ignore_eos=True),
            want[: want.index(want[4]) + 1],
            FinishReason.STOP,
        ),
    }
    for name, (params, tokens, reason) in cases.items():
        core = make_core(max_context=32)
        core.add(request(name, prompt, params))
        outputs = [o for _ in range(100) if core.has_work for o in core.step()]
        assert [t for o in outputs for t in o.token_ids] == tokens, name
        assert outputs[-1].finish_reason is reason


def test_deadline_cancel_and_bad_logits_end_with_their_reasons():
    now = [0.0]
    core = make_core(clock=lambda: now[0])
    forever = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for name in ("late", "gone", "bad"):
        core.add(request(name, [2, 3, 4, ord(name[0])], forever, deadline=5.0 if name == "late" else None))
    core.step()
    core.executor.poison = {2}
    reasons = {o.request_key: o.finish_reason for o in core.step() if o.finish_reason}
    reasons |= {o.request_key: o.finish_reason for o in core.abort("gone")}
    now[0] = 6.0
    reasons |= {o.request_key: o.finish_reason for o in core.step() if o.finish_reason}
    assert reasons == {"bad": FinishReason.ERROR, "gone": FinishReason.CANCELLED, "late": FinishReason.DEADLINE}
    assert not core.has_work and core.abort("gone") == []


def test_the_first_tokens_tell_how_long_they_were_computed_for():
    """From the first chunk of a prompt, and not while another request has the only place."""
    now = [0.0]
    core = make_core(max_sequences=1, max_batch_tokens=4, clock=lambda: now[0])
    execute = core.executor.execute

    def a_second(batch):
        now[0] += 1.0
        return execute(batch)

    core.executor.execute = a_second
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    core.add(request("chunks", list(range(2, 14)), params))
    core.add(request("waits", [20, 21], params))
    outputs = [o for _ in range(100) if core.has_work for o in core.step()]
    told = {(o.request_key, o.prefill_s) for o in outputs if o.prefill_s is not None}
    assert told == {("chunks", 3.0), ("waits", 1.0)} and len(outputs) == 10
    assert all((o.prefill_s is not None) == (o.usage.completion_tokens == 1) for o in outputs)


def test_eos_ends_a_sequence():
    rng = random.Random(0)
    prompt = next(
        p for p in ([rng.randrange(2, 97) for _ in range(5)] for _ in range(10000)) if EOS in greedy(p, 8)[1:]
    )
    core = make_core()
    core.add(request("a", prompt))
    outputs = [o for _ in range(100) if core.has_work for o in core.step()]
    assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_reason is None


@pytest.mark.parametrize("ahead", [None, 1])
def test_a_request_that_has_begun_is_refused_no_more(ahead):
    """Also when the sequence that had begun has ended, and the other one waits for longer than the request might."""
    now = [0.0]
    core = make_core(max_sequences=1, clock=lambda: now[0], ahead=ahead)
    core.limits = Limits(max_queue_s=1.0)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    core.add(request("two", [5, 6, 7], replace(params, n=2)))
    core.add(request("other", [8, 9], replace(params, max_tokens=20), tenant="other"))
    ended = []
    for _ in range(50):
        now[0] += 0.1
        ended += [output for output in core.step() if output.finish_reason is not None]
    assert [(o.request_key, o.index) for o in ended] == [("two", 0), ("other", 0), ("two", 1)]
    assert {o.finish_reason for o in ended} == {FinishReason.LENGTH} and not core.has_work
