"""Calls in outputs: what the constraint lets through, and what is found however the text is cut."""

from __future__ import annotations

import json
import random

import pytest
from constrained import CharTokenizer
from fakes import EOS, VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st

from wicore_trt.grammar.matcher import Grammars
from wicore_trt.text.calls import CallFinder, Function, calls_constraint, tells_from_calls

GRAMMARS = Grammars(CharTokenizer(), VOCAB)
REFERRING = {"type": "object", "properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"enum": [1, 2]}}}
FUNCTIONS = [Function("get", "Get it", REFERRING), Function("b.c")]


def ends_with(constraint, text: str) -> bool:
    """Whether this is a whole output under the constraint."""
    matcher = GRAMMARS.matcher(constraint)
    for character in text:
        token = ord(character) - 32
        if not matcher.allowed()[token >> 3] >> (token & 7) & 1:
            return False
        matcher.take(token)
    return bool(matcher.allowed()[EOS >> 3] >> (EOS & 7) & 1)


ONE, OTHER = '{"name": "get", "parameters": {"a": 2}}', '{"name":"b.c","parameters":{"x":[{}]}}'


@pytest.mark.parametrize(
    ("text", "auto", "required", "single"),
    [
        (ONE, True, True, True),
        (OTHER, True, True, True),
        (f"[{ONE}, {OTHER}]", True, True, False),
        ("Hello {there}", True, False, False),
        (" Hello [there]", True, False, False),
        (f" {ONE}", False, False, False),
        ("", True, False, False),
        ('{"name": "get", "parameters": {"a": 3}}', False, False, False),
        ('{"name": "put", "parameters": {}}', False, False, False),
        ('{"name": "get"}', False, False, False),
        ("[]", False, False, False),
    ],
)
def test_what_may_be_said(text: str, auto: bool, required: bool, single: bool) -> None:
    assert ends_with(calls_constraint(FUNCTIONS, must=False, several=True), text) is auto
    assert ends_with(calls_constraint(FUNCTIONS, must=True, several=True), text) is required
    assert ends_with(calls_constraint(FUNCTIONS, must=True, several=False), text) is single


CITY = {"type": "object", "properties": {"name": {"type": "string"}, "in": {"enum": [1]}}, "required": ["name", "in"],
        "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (ONE, True),
        (f"[{ONE}]", True),
        (f" [ {ONE}]", True),
        (' {"name": "get", "in": 1}', True),
        ('{"name": "Rome", "in": 1}', True),
        ('{"name": "get", "in": 1}', True),
        ('{"name": "get", "parameters": {"a": 3}}', False),
        ("Rome", False),
        ("", False),
    ],
)
def test_an_answer_beside_calls_has_its_schema(text: str, fits: bool) -> None:
    assert ends_with(calls_constraint(FUNCTIONS, must=False, several=True, answer=CITY), text) is fits
    if fits:
        assert (found_in([*text])[0] == text) is ('"in"' in text)


@pytest.mark.parametrize(
    ("change", "tells"),
    [
        ({}, True),
        ({"additionalProperties": True}, False),
        ({"properties": {"name": {}, "parameters": {}}}, False),
        ({"properties": {"parameters": {}}}, True),
        ({"type": "array"}, False),
        ({"type": ["object", "array"]}, False),
        ({"anyOf": [{}]}, False),
        ({"patternProperties": {"p": {}}}, False),
    ],
)
def test_what_can_be_told_from_calls(change: dict[str, object], tells: bool) -> None:
    assert tells_from_calls(CITY | change) is tells
    without = {k: v for k, v in CITY.items() if k != "additionalProperties"}
    assert not tells_from_calls(without)


@pytest.mark.parametrize("must", [True, False])
def test_functions_take_the_parameters_that_they_name(must: bool) -> None:
    named = {"type": "object", "properties": {"a": {"enum": [1]}}}
    for parameters, more in (
        (named, False),
        ({"type": "object", "properties": {}}, False),
        (named | {"additionalProperties": True}, True),
        (named | {"anyOf": [{"type": "object"}]}, True),
        ({"type": "object"}, True),
    ):
        constraint = calls_constraint([Function("f", "", parameters)], must=must, several=False)
        assert ends_with(constraint, '{"name": "f", "parameters": {}}')
        assert ends_with(constraint, '{"name": "f", "parameters": {"b": 2}}') is more


@pytest.mark.parametrize("answer", [None, CITY])
@pytest.mark.parametrize("must", [True, False])
def test_blanks_between_the_parts_have_an_end(must: bool, answer: dict[str, object] | None) -> None:
    constraint = calls_constraint(FUNCTIONS, must=must, several=True, answer=answer)
    assert ends_with(constraint, ONE) and not ends_with(constraint, ONE.replace(" ", "  "))
    if answer and not must:
        assert not ends_with(constraint, '{"name":  "Rome", "in": 1}')


def test_strict_functions_keep_all_of_their_schemas() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}
    GRAMMARS.prepare(calls_constraint([Function("f", "", odd)], must=True, several=False))
    with pytest.raises(Exception, match="Unknown format"):
        GRAMMARS.prepare(calls_constraint([Function("f", "", odd, strict=True)], must=True, several=False))


def found_in(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    finder, text, calls = CallFinder(), "", {}
    parts = [part for piece in pieces for part in finder.push_text(piece)] + finder.end_output()
    for part in parts:
        if part.call is None:
            text += part.text
        else:
            name, arguments = calls.get(part.call, ("", ""))
            calls[part.call] = (part.name or name, arguments + part.arguments)
    assert finder.calls == len(calls)
    return text, [calls[i] for i in sorted(calls)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


CUT = given(
    calls=st.lists(
        st.tuples(st.text("abc_.-", min_size=1, max_size=64), st.dictionaries(st.text(max_size=4), VALUES)), min_size=1
    ),
    indent=st.sampled_from([None, 2]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=50, deadline=None)
@CUT
def test_calls_are_found_however_the_text_is_cut(calls, indent, seed: int) -> None:
    found_however_cut(calls, indent, seed)


@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@CUT
def test_many_calls_are_found_however_the_text_is_cut(calls, indent, seed: int) -> None:
    found_however_cut(calls, indent, seed)


def found_however_cut(calls, indent, seed: int) -> None:
    listed = [{"name": name, "parameters": parameters} for name, parameters in calls]
    text = json.dumps(listed if len(listed) > 1 or seed % 2 else listed[0], indent=indent, ensure_ascii=bool(seed % 3))
    text = " " * (seed % 5 // 3) + text
    rng = random.Random(seed)
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    said, found = found_in(pieces)
    assert said == "" and [(name, json.loads(arguments)) for name, arguments in found] == calls


OTHERS = [
    "Hello",
    "",
    "[1] see",
    '{"a": 1}',
    " ",
    '{"name": "a", "b": {}}',
    '{"name": "a"}',
]


@pytest.mark.parametrize("text", [*OTHERS, '{"name": "' + "a" * 65, '{"name": 1, "parameters": {}}'])
def test_other_texts_are_texts(text: str) -> None:
    assert found_in([*text]) == (text, [])


def test_a_call_that_is_cut_off_has_what_came() -> None:
    assert found_in(['{"name": "get", "parameters": {"a": ']) == ("", [("get", '{"a": ')])
    whole = ' [{"name": "get", "parameters": '
    for end in range(1, len(whole) + 1):
        said = " " if end == 1 else ""
        assert found_in([*whole[:end]]) == (said, []), "before its arguments it is neither a call nor a text"
