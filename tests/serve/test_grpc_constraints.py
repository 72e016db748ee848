"""Constraints over gRPC: the client's way there and back, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from constrained import CharTokenizer, constrained_core
from fakes import FAKE_INFO, VOCAB
from serving import serving

from wicore_trt.client import Client, constraint_message
from wicore_trt.core.port import LocalEngine
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.errors import InvalidRequestError
from wicore_trt.grammar.matcher import Grammars
from wicore_trt.serve import convert
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.types import Constraint, ConstraintKind, FinishReason, SamplingParams

K = ConstraintKind
CONSTRAINTS = {
    "yes|no, e": Constraint(K.CHOICE, '["yes", "no, e"]'),
    "[0-9]{3}": Constraint(K.REGEX, "[0-9]{3}"),
    "<(a|b)>": Constraint(K.GRAMMAR, 'start: "<" ("a" | "b") ">"'),
    "7|true": Constraint(K.JSON_SCHEMA, '{"enum": [7, true]}'),
    r"\{.*\}": Constraint(K.JSON_OBJECT),
}


def make_engine() -> TextEngine:
    core = constrained_core(grammars=Grammars(CharTokenizer(), VOCAB))
    return TextEngine(LocalEngine(core, max_waiting=100), CharTokenizer(), FAKE_INFO)


async def test_every_kind_is_kept() -> None:
    async with serving(make_engine()) as running:
        with Client(running.address) as client:
            for pattern, constraint in CONSTRAINTS.items():
                params = SamplingParams(temperature=0.5, n=3, constraint=constraint)
                [completions] = await asyncio.to_thread(client.generate, ["hello"], params)
                ended = [found.text for found in completions if found.finish_reason is FinishReason.STOP]
                assert all(re.fullmatch(pattern, text, re.DOTALL) for text in ended), ended
                assert ended or constraint.kind is K.JSON_OBJECT


async def test_the_field_and_the_reason_come_back() -> None:
    async with serving(make_engine()) as running:
        with Client(running.address) as client:
            for constraint in (Constraint(K.REGEX, "(a"), Constraint(K.JSON_SCHEMA, '{"type": "foo"}')):
                with pytest.raises(InvalidRequestError, match="unclosed group|Invalid type") as caught:
                    await asyncio.to_thread(client.generate, ["hello"], SamplingParams(constraint=constraint))
                assert caught.value.field == "sampling.constraint"


@pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=lambda c: c.kind.value)
def test_messages_say_what_they_were_made_of(constraint: Constraint) -> None:
    found = convert.read_constraint(constraint_message(constraint))
    assert found.kind is constraint.kind
    if constraint.kind is K.CHOICE:
        assert json.loads(found.text) == json.loads(constraint.text)
    else:
        assert found.text == constraint.text


@pytest.mark.parametrize("message", [pb2.Constraint(), pb2.Constraint(json_object=False), pb2.Constraint(regex="")])
def test_empty_ones_are_refused(message: pb2.Constraint) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        convert.read_constraint(message)
    assert caught.value.field == "constraint"


def test_choices_of_another_shape_are_refused_by_the_client() -> None:
    with pytest.raises(InvalidRequestError):
        constraint_message(Constraint(K.CHOICE, "yes"))
