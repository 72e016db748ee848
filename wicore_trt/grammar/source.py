"""Convert constraints to grammars of llguidance, and check that those can be kept.

The package llguidance is imported when a constraint comes. Must not know the model's tokenizer: checks are over
bytes, so that any process does them in milliseconds. Invariant: a constraint that `check_constraint` accepts was
built whole under LIMITS and one text of it followed; others are an InvalidRequestError.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from wicore_trt.errors import EnvironmentUnfitError, InvalidRequestError, missing_package, shortened
from wicore_trt.text.calls import WHITESPACE
from wicore_trt.types import Constraint, ConstraintKind

FIELD = "constraint"
LIMITS = {"max_grammar_size": 200_000, "max_lexer_states": 30_000, "step_max_items": 15_000, "verbose_errors": False}
"""Beside llguidance's own limits of the work for one grammar and one token: symbols, states of 1 to 2 kB, and items
for one mask, which take up to 6 us each."""
MAX_CHOICES = 4096
TRIED_BYTES, TRIED_S = 512, 0.1
"""Bytes of a text that are followed, and seconds at most: a grammar whose tokens take long is none that fails."""
_OPENERS = b'{["],:}'
"""Bytes of JSON that are tried first, in this order: into what is nested, and from there through all properties."""
UNENFORCED = re.compile(r'"uniqueItems"\s*:\s*true')
"""Keyword of schemas that no grammar can keep; models of clients that have a set ask for it."""
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_JSON = re.compile(r"(?m)%json (\{.*\})$")
_REASON = 300
"""Characters of llguidance's reason."""


def load_llguidance() -> Any:
    """Import llguidance. Raises EnvironmentUnfitError where it is not installed."""
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise missing_package(error.name) or error from error
    return llguidance


def make_limits() -> Any:
    return load_llguidance().LLParserLimits(**LIMITS)


def grammar_of(constraint: Constraint) -> str:
    """Make the grammar as llguidance takes it. Raises InvalidRequestError for a text that cannot be one."""
    matcher = load_llguidance().LLMatcher
    text = constraint.text
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _compile_schema(matcher, '{"type": "object"}')
        case ConstraintKind.JSON_SCHEMA:
            return _compile_schema(matcher, text)
        case ConstraintKind.REGEX:
            found = matcher.grammar_from_regex(text)
        case ConstraintKind.GRAMMAR:
            text = _JSON.sub(lambda found: f"%json {_strip_unenforced(found[1])}", text)
            found = matcher.grammar_from_lark(_convert_ebnf(text) if "::=" in text else text)
        case ConstraintKind.TOKENS:
            raise make_refusal("token ids are no text")
        case ConstraintKind.CHOICE:
            found = matcher.grammar_from_lark(_compile_choice(text))
    return str(found)


def _compile_schema(matcher: Any, schema: str) -> str:
    if schema.strip() in ("true", "false"):  # schemas too, but what is applied to them has to be an object
        schema = f'{{"allOf": [{schema}]}}'
    try:
        return str(
            matcher.grammar_from_json_schema(_strip_unenforced(schema), defaults={"whitespace_pattern": WHITESPACE})
        )
    except ValueError as error:
        raise make_refusal(str(error)) from None


def _strip_unenforced(schema: str) -> str:
    def strip(inside: Any) -> Any:
        if isinstance(inside, list):
            return [strip(item) for item in inside]
        if not isinstance(inside, dict):
            return inside
        return {
            key: {name: strip(item) for name, item in value.items()}
            if key in _NAMED and isinstance(value, dict)
            else value if key in ("const", "enum") else strip(value)
            for key, value in inside.items()
            if key != "uniqueItems" or not isinstance(value, bool)
        }  # fmt: skip

    try:
        return json.dumps(strip(json.loads(schema))) if UNENFORCED.search(schema) else schema
    except (ValueError, RecursionError):  # llguidance says what is wrong
        return schema


def _convert_ebnf(text: str) -> str:
    """Convert the EBNF of xgrammar and llama.cpp (GBNF) to llguidance's own dialect."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, KeyError, RecursionError) as error:
        raise make_refusal(f"the EBNF cannot be read: {error}") from None


def without_words(words: Sequence[str]) -> str:
    """Make a grammar of all texts in which none of `words` stands."""
    alternatives = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
    return f"start: TEXT\nTEXT: /(?s:.*)/ & ~(/(?s:.*)/ ({alternatives}) /(?s:.*)/)"


def token_ids(constraint: Constraint) -> list[int]:
    """Read the ids of a constraint of kind TOKENS. Raises InvalidRequestError."""
    try:
        found = msgspec.json.decode(constraint.text, type=list[int])
    except msgspec.MsgspecError as error:
        raise make_refusal(f"token ids are a list of integers: {error}") from None
    if not found or min(found) < 0:
        raise make_refusal("there must be a token, and no id below 0")
    return found


def _compile_choice(text: str) -> str:
    try:
        choices = json.loads(text)
    except ValueError as error:
        raise make_refusal(f"the choices are no JSON: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise make_refusal("the choices must be a list of texts that are not empty")
    if len(choices) > MAX_CHOICES:
        raise make_refusal(f"there are {len(choices)} choices; at most {MAX_CHOICES} are taken")
    # A terminal, as the name in capitals says: as rules of the grammar they would all be followed side by side, and
    # those that begin alike are more than llguidance takes.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def make_refusal(reason: str) -> InvalidRequestError:
    line = " ".join(reason.split())
    if len(line) > _REASON:
        said = [part for part in map(str.strip, reason.splitlines()) if part.startswith("error:")]
        line = shortened(line, 80) + " " + shortened(" ".join(said), _REASON)  # the text may have come before the fault
    return InvalidRequestError(f"The constraint cannot be kept: {line}", field=FIELD)


class _Bytes:
    """Tokenizer of the 256 bytes and an end."""

    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([i]) for i in range(256)), b"\xff<end>"]
    special_token_ids = [256]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(maxsize=1)
def _over_bytes() -> Any:
    found = load_llguidance()
    return found.LLTokenizer(found.TokenizerWrapper(_Bytes()), n_vocab=257, slices=[])


def check_constraint(constraint: Constraint) -> None:
    """Raise InvalidRequestError (field "constraint", with llguidance's reason) when the constraint cannot be kept.
    Raised, too, without llguidance. Takes milliseconds, at worst some hundred; recent results are cached."""
    try:
        reason = _find_reason(constraint)
    except EnvironmentUnfitError as error:
        problem = f"Constraints are not supported here: {error.message}"
        raise InvalidRequestError(problem, field=FIELD, fix=error.fix) from error
    if reason:
        raise make_refusal(reason)


@lru_cache(maxsize=16)
def _find_reason(constraint: Constraint) -> str:
    """Return why a constraint cannot be kept, "" for no reason."""
    if constraint.kind is ConstraintKind.TOKENS:
        return "" if token_ids(constraint) else "nothing satisfies it"
    grammar = grammar_of(constraint)
    found: str = load_llguidance().LLMatcher.validate_grammar(grammar, limits=make_limits())
    if not found or found.startswith("WARNING"):
        matcher = load_llguidance().LLMatcher(_over_bytes(), grammar, log_level=0, limits=make_limits())
        found = _find_dead_end(matcher)
    return found


def _find_dead_end(matcher: Any) -> str:
    """Return why a text of the grammar has no continuation, "" where it has one."""
    text, until = bytearray(), time.monotonic() + TRIED_S
    while len(text) < TRIED_BYTES:
        mask = 0 if matcher.is_error() else int.from_bytes(matcher.compute_bitmask()[:33], "little")
        if matcher.is_error() or not mask:
            # A schema may be built whose last property is followed by none that its patternProperties allow.
            reason = str(matcher.get_error()) if matcher.is_error() else "nothing satisfies it"
            return f"nothing can follow {bytes(text)!r}: {reason}" if text else reason
        if mask >> _Bytes.eos_token_id or time.monotonic() > until:
            break
        order = b'"' if text.count(b'"') % 2 else _OPENERS  # where a text of JSON may end, it does
        digits = bytes((i + 7 * len(text)) % 10 + 48 for i in range(10))  # in turn: some multiple will be met
        text.append(next((byte for byte in order + digits if mask >> byte & 1), mask.bit_length() - 1))
        matcher.consume_token(text[-1])
    return ""
