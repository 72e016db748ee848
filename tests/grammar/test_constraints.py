"""Constraints as they come: what is refused, and why."""

from __future__ import annotations

import json
import sys

import pytest

from wicore_trt.errors import InvalidRequestError
from wicore_trt.grammar import source
from wicore_trt.types import MAX_CONSTRAINT, Constraint, ConstraintKind, SamplingParams

K = ConstraintKind


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (K.JSON_SCHEMA, "{", "EOF"),
        (K.JSON_SCHEMA, "[1]", "object schema"),
        (K.JSON_SCHEMA, '{"type": "foo"}', "Invalid type: foo"),
        (K.JSON_SCHEMA, '{"not": {"type": "string"}}', 'Unimplemented keys: \\["not"\\]'),
        (K.JSON_SCHEMA, "false", "Unsatisfiable"),
        (K.JSON_SCHEMA, '{"$ref": "http://127.0.0.1/x"}', "does not fetch"),
        (K.REGEX, "(a", "unclosed group"),
        (K.GRAMMAR, "start: y", "unknown name"),
        (K.GRAMMAR, "start: <end_of_turn>", "unknown special token"),
        (K.GRAMMAR, "start: start", "NoExtension"),
        (K.CHOICE, "yes", "no JSON"),
        (K.CHOICE, "[]", "list of texts"),
        (K.CHOICE, '["a", 1]', "list of texts"),
        (K.CHOICE, json.dumps([str(i) for i in range(5000)]), "at most 4096"),
        (K.REGEX, "(" * 2000 + "a" + ")" * 2000, "exceed the maximum number of nested"),
        (K.JSON_SCHEMA, '{"type":"object","properties":{"a":' * 200 + "{}" + "}}" * 200, "recursion"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_reason(kind: K, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        source.check_constraint(Constraint(kind, text))
    assert caught.value.field == "constraint" and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("kind", "text"), [(K.JSON_OBJECT, "{}"), (K.REGEX, ""), (K.REGEX, "a" * (MAX_CONSTRAINT + 1)), (K.REGEX, "\ud800")]
)
def test_texts_have_bounds(kind: K, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Constraint(kind, text)
    assert caught.value.field == "constraint"


SCORE = {"type": "integer", "multipleOf": 5}
TAGS = {"type": "array", "maxItems": 2, "items": {"type": "string", "minLength": 3, "maxLength": 5}}
CLOSED = {"type": "object", "properties": {"score": SCORE, "tags": TAGS}, "required": ["score", "tags"]}
CLOSED |= {"additionalProperties": False}


SECOND = {"type": "object", "patternProperties": {"^(score|tags)$": {}}, "additionalProperties": False}


def walk(schema: dict, text: str) -> bool:
    """Whether a text is a whole one of the schema."""
    constraint = Constraint(K.JSON_SCHEMA, json.dumps(schema))
    source.check_constraint(constraint)
    matcher = source.load_llguidance().LLMatcher(source._over_bytes(), source.grammar_of(constraint), log_level=0)
    return matcher.try_consume_tokens([*text.encode()]) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("pattern", ["^score$", "^tags$", "^(score|tags)$"])
def test_a_schema_that_leads_nowhere_is_refused_at_once(pattern: str) -> None:
    inside = CLOSED | {"patternProperties": {pattern: {}}}
    listed = {"type": "array", "items": {"anyOf": [{"type": "null"}, inside]}}
    held = {"type": "object", "properties": {"a": listed}, "required": ["a"], "additionalProperties": False}
    merged = {"allOf": [CLOSED | {"additionalProperties": True}, SECOND]}
    for schema in (inside, listed, held, merged):
        with pytest.raises(InvalidRequestError, match="nothing can follow"):
            source.check_constraint(Constraint(K.JSON_SCHEMA, json.dumps(schema)))
    assert walk(CLOSED | {"patternProperties": {"^x": SCORE}}, '{"score": 5, "tags": [], "xy": 10}')


def test_unique_items_are_not_enforced_and_all_else_is() -> None:
    unique = {"uniqueItems": True}
    schema = CLOSED | {"properties": {"score": SCORE, "tags": TAGS | unique, "uniqueItems": {"const": unique}}}
    assert walk(schema, '{"score": 5, "tags": ["abc", "abc"]}')
    assert walk(schema, '{"score": 5, "tags": [], "uniqueItems": {"uniqueItems": true}}')
    assert not walk(schema, '{"score": 5, "tags": [], "uniqueItems": {}}')
    assert not walk(schema, '{"score": 5, "tags": ["abc", "abc", "abc"]}')
    source.check_constraint(Constraint(K.GRAMMAR, f"start: answer\nanswer: %json {json.dumps(schema)}"))


def test_true_allows_everything() -> None:
    source.check_constraint(Constraint(K.JSON_SCHEMA, "true"))


@pytest.mark.parametrize("wrong", ["json_object", {"kind": "regex"}])
def test_types_are_checked(wrong: object) -> None:
    with pytest.raises(InvalidRequestError):
        SamplingParams(constraint=wrong)  # type: ignore[arg-type]


def test_without_llguidance_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    source._find_reason.cache_clear()
    with pytest.raises(InvalidRequestError, match="llguidance, which is not installed") as caught:
        source.check_constraint(Constraint(K.JSON_OBJECT))
    assert "serve" in str(caught.value.fix)
