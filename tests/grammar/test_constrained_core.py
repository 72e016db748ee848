"""EngineCore with constraints: what finishes satisfies them, and nobody else notices."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest
from constrained import CharTokenizer, constrained_core, logits_of, random_schema, schema
from fakes import EOS, VOCAB, make_core
from hypothesis import given, settings
from hypothesis import strategies as st

from wicore_trt.errors import InvalidRequestError
from wicore_trt.grammar.matcher import Grammars, MatcherError
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import Constraint, ConstraintKind, FinishReason, GenerateRequest, SamplingParams, TokenOutput

GRAMMARS = Grammars(CharTokenizer(), VOCAB)
TOKENIZER = CharTokenizer()
TIGHT = {"pages": {GLOBAL: 24, LOCAL: 24}, "max_batch_tokens": 8, "max_context": 90}
"""So few pages that sequences are preempted."""


def core_of(**kwargs):
    return constrained_core(grammars=GRAMMARS, **kwargs)


def finish(core, requests: list[GenerateRequest]) -> dict[tuple[str, int], tuple[list[int], TokenOutput]]:
    """Tokens and last output of each sequence."""
    for request in requests:
        core.validate_request(request)
        core.prepare_request(request)
        core.add(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    last = {}
    while core.has_work:
        for output in core.step():
            key = (output.request_key, output.index)
            tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert key not in last
                last[key] = output
        core.scheduler.check_integrity()
    assert not core._matchers
    return {key: (tokens[key], last[key]) for key in last}


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens)


def one(params: SamplingParams, prompt: tuple[int, ...] = (40, 41), **kwargs) -> tuple[list[int], TokenOutput]:
    return finish(core_of(**kwargs), [GenerateRequest("a", prompt, params)])["a", 0]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), ahead=st.booleans(), tight=st.booleans())
def test_what_finishes_satisfies_its_schema(seed: int, ahead: bool, tight: bool) -> None:
    rng = random.Random(seed)
    requests, schemas = [], {}
    for i in range(rng.randint(1, 4)):
        wanted = schemas[str(i)] = random_schema(rng)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 3.0]), top_k=rng.choice([0, 5]), top_p=rng.choice([1.0, 0.7]),
            seed=rng.randrange(1000), n=rng.choice([1, 1, 3]), max_tokens=rng.choice([4, 70]),
            min_tokens=rng.choice([0, 3]), ignore_eos=rng.random() < 0.2, presence_penalty=rng.choice([0.0, 1.5]),
            logit_bias={40: 5.0} if rng.random() < 0.3 else {}, logprobs=rng.choice([None, 2]),
            constraint=schema(wanted) if rng.random() < 0.9 else None,
        )  # fmt: skip
        requests.append(GenerateRequest(str(i), tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))), params))
    core = core_of(ahead=rng.randrange(1000) if ahead else None, **(TIGHT if tight else {"max_context": 90}))
    for (name, _), (tokens, output) in finish(core, requests).items():
        params = requests[int(name)].params
        if params.constraint is None:
            continue
        assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), output.error
        if output.finish_reason is FinishReason.STOP:
            assert tokens[-1] == EOS
            jsonschema.validate(json.loads(text_of(tokens)), schemas[name])
        else:
            assert len(tokens) == params.max_tokens
            follows(GRAMMARS, params.constraint, tokens)


def follows(grammars: Grammars, constraint: Constraint, tokens: list[int]) -> None:
    """Fail unless the tokens are the beginning of what the constraint allows."""
    matcher = grammars.matcher(constraint)
    for token in tokens:
        assert matcher.allowed()[token >> 3] >> (token & 7) & 1, f"{text_of(tokens)!r}: {token}"
        if token != EOS:
            matcher.take(token)


@pytest.mark.parametrize(
    ("constraint", "whole"),
    [
        (Constraint(ConstraintKind.REGEX, "[0-9]{3}-(ab|cd)+"), r"[0-9]{3}-(ab|cd)+"),
        (Constraint(ConstraintKind.CHOICE, '["yes", "no", "yes, but"]'), "yes|no|yes, but"),
        (Constraint(ConstraintKind.CHOICE, '["a\\"b\\\\"]'), r'a"b\\'),
        (Constraint(ConstraintKind.GRAMMAR, 'start: "<" word ">"\nword: /[a-z]{1,4}/'), "<[a-z]{1,4}>"),
    ],
)
def test_other_kinds(constraint: Constraint, whole: str) -> None:
    for seed in range(10):
        tokens, output = one(SamplingParams(seed=seed, max_tokens=60, constraint=constraint))
        if output.finish_reason is FinishReason.STOP:
            assert re.fullmatch(whole, text_of(tokens)), text_of(tokens)
        else:
            follows(GRAMMARS, constraint, tokens)


def test_any_object() -> None:
    params = SamplingParams(temperature=0.0, constraint=Constraint(ConstraintKind.JSON_OBJECT))
    endings = 0
    for prompt in range(20, 40):
        tokens, output = one(params, (prompt,))
        if output.finish_reason is FinishReason.STOP:
            assert isinstance(json.loads(text_of(tokens)), dict)
            endings += 1
    assert endings > 5


def test_a_whole_text_ends_whatever_min_tokens_and_ignore_eos_say() -> None:
    constraint = Constraint(ConstraintKind.CHOICE, '["abc"]')
    tokens, output = one(SamplingParams(min_tokens=20, max_tokens=30, ignore_eos=True, constraint=constraint))
    assert text_of(tokens) == "abc" and tokens[3:] == [EOS] and output.finish_reason is FinishReason.STOP


def test_min_tokens_and_ignore_eos_hold_where_the_text_may_go_on() -> None:
    constraint = Constraint(ConstraintKind.REGEX, "a{1,40}")
    tokens, _ = one(SamplingParams(min_tokens=20, max_tokens=60, constraint=constraint, logit_bias={EOS: 100.0}))
    assert len(tokens) == 21
    tokens, _ = one(SamplingParams(ignore_eos=True, max_tokens=60, constraint=constraint, logit_bias={EOS: 100.0}))
    assert text_of(tokens) == "a" * 40


def test_stop_tokens_end_it_early() -> None:
    comma = ord(",") - 32
    constraint = Constraint(ConstraintKind.REGEX, "a{5},b{5}")
    tokens, output = one(SamplingParams(stop_token_ids=(comma,), constraint=constraint))
    assert text_of(tokens) == "aaaaa," and output.stop_reason == comma


def test_logprobs_are_those_of_the_unmasked_distribution() -> None:
    params = SamplingParams(
        temperature=0.0, logprobs=3, max_tokens=4, constraint=Constraint(ConstraintKind.REGEX, "zq.*")
    )
    core, prompt = core_of(), (40, 41)
    core.add(GenerateRequest("a", prompt, params))
    history, entries = list(prompt), []
    while core.has_work:
        for output in core.step():
            entries += zip(output.token_ids, output.logprobs, strict=True)
    for token, entry in entries:
        truth = logits_of(history).double().log_softmax(-1)
        assert entry.token_id == token and entry.logprob == pytest.approx(float(truth[token]), abs=1e-6)
        assert [i for i, _ in entry.top] == truth.topk(3).indices.tolist()
        history.append(token)


def test_others_in_the_batch_get_the_same_tokens() -> None:
    plain = [GenerateRequest(f"p{i}", (30 + i, 31), SamplingParams(seed=i, max_tokens=20)) for i in range(3)]
    alone = {key: found[0] for key, found in finish(core_of(), plain).items()}
    mixed = GenerateRequest("c", (50,), SamplingParams(seed=1, constraint=schema(random_schema(random.Random(3)))))
    together = finish(core_of(), [plain[0], mixed, *plain[1:]])
    assert {key: together[key][0] for key in alone} == alone
    assert together["c", 0] == finish(core_of(), [mixed])["c", 0]


@pytest.mark.parametrize("where", ["allowed", "take"])
def test_a_broken_matcher_ends_its_sequence_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of()
    constraint = Constraint(ConstraintKind.REGEX, "[ab]{30}")
    good = GenerateRequest("good", (40, 41, 42, 43, 44), SamplingParams(max_tokens=9, constraint=constraint))
    bad = GenerateRequest("bad", (40, 41, 42, 43, 44), SamplingParams(max_tokens=9, constraint=constraint))
    condemned = []
    monkeypatch.setattr(core.scheduler.manager, "condemn_pages", condemned.append)
    for request in (good, bad):
        core.add(request)
    matcher = core._matchers[core.sequences["bad"][0].seq_id]

    def fail(_=()) -> bytes:
        matcher.broken = "too many states"
        raise MatcherError(matcher.broken)

    outputs = core.step()
    monkeypatch.setattr(matcher, where, fail)
    while core.has_work:
        outputs += core.step()
    last = {output.request_key: output for output in outputs}
    tokens = {name: sum(len(o.token_ids) for o in outputs if o.request_key == name) for name in last}
    assert {name: output.usage.completion_tokens for name, output in last.items()} == tokens
    assert last["bad"].finish_reason is FinishReason.ERROR and last["bad"].error == "too many states"
    assert last["good"].finish_reason is FinishReason.LENGTH and not condemned


def test_a_grammar_too_costly_to_follow_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wicore_trt.grammar.source.LIMITS", {"max_lexer_states": 60, "verbose_errors": False})
    constraint = Constraint(ConstraintKind.REGEX, "(a|b)*a(a|b){22}c")
    tokens, output = one(SamplingParams(seed=3, max_tokens=80, constraint=constraint))
    assert output.finish_reason is FinishReason.ERROR and "cannot be kept any further" in output.error
    assert output.field == "constraint"


def test_as_many_choices_as_are_taken_can_be_made() -> None:
    choices = [f"{i * 7919:024x}" for i in range(4000)]
    tokens, output = one(SamplingParams(seed=3, constraint=Constraint(ConstraintKind.CHOICE, json.dumps(choices))))
    assert output.finish_reason is FinishReason.STOP and CharTokenizer().decode(tokens) in choices


def test_an_engine_without_grammars_refuses() -> None:
    request = GenerateRequest("a", (1,), SamplingParams(constraint=Constraint(ConstraintKind.JSON_OBJECT)))
    with pytest.raises(InvalidRequestError, match="takes no constraint") as caught:
        make_core().validate_request(request)
    assert caught.value.field == "constraint"


def test_grammars_that_are_not_used_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wicore_trt.grammar.matcher.KEPT", 2)
    grammars = Grammars(CharTokenizer(), VOCAB)
    for text in ("a", "b", "a", "c"):
        grammars.matcher(Constraint(ConstraintKind.REGEX, text))
    assert [kept.text for kept in grammars._kept] == ["b", "c"] or [kept.text for kept in grammars._kept] == ["a", "c"]
