"""Conversations with functions, calls and results as text in Gemma's turns."""

from __future__ import annotations

import json

import pytest
from synthetic_tokenizer import END_OF_TURN

from wicore_trt.core.prompts import apply_turn_end
from wicore_trt.errors import InvalidRequestError
from wicore_trt.text.turns import has_calls, render_turns
from wicore_trt.types import SamplingParams, TextRequest

WEATHER = {"name": "weather", "description": "Now.", "parameters": {"type": "object"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}


def rendered(*messages, functions=(), opening=True) -> str:
    return render_turns(messages, functions, add_generation_prompt=opening)


def turn(role: str, content, **more) -> dict:
    return {"role": role, "content": content, **more}


def test_a_plain_conversation_is_as_gemma_writes_it() -> None:
    found = rendered(turn("developer", "Be brief."), turn("user", " Hi "), turn("assistant", "Yes?"), turn("user", "x"))
    assert found == (
        "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYes?<end_of_turn>\n"
        "<start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n"
    )


def test_functions_calls_and_results() -> None:
    found = rendered(
        turn("system", "S"),
        turn("user", "Weather?"),
        turn("assistant", None, tool_calls=[CALL]),
        turn("tool", "warm", tool_call_id="call_1"),
        functions=[WEATHER],
    )
    head, call, result, opening = found.split("<end_of_turn>\n")
    assert head.startswith("<start_of_turn>user\nS\n\n") and head.endswith(json.dumps(WEATHER) + "\n\nWeather?")
    assert call == '<start_of_turn>model\n{"name": "weather", "parameters": {"city": "Köln"}}'
    assert result == ('<start_of_turn>user\n<tool_response>\n{"name": "weather", "content": "warm"}\n</tool_response>')
    assert opening == "<start_of_turn>model\n"


def test_neighbours_of_one_role_are_one_turn() -> None:
    two = [CALL, {**CALL, "id": "call_2"}]
    found = rendered(
        turn("user", "a"),
        turn("user", [{"type": "text", "text": "b"}]),
        turn("assistant", "Looking.", tool_calls=two),
        turn("tool", "1", tool_call_id="call_1"),
        turn("tool", "2", tool_call_id="call_2"),
        turn("user", "And?"),
    )
    assert found.startswith("<start_of_turn>user\na\n\nb<end_of_turn>\n<start_of_turn>model\nLooking.\n[{")
    assert found.count("<start_of_turn>") == 4 and found.endswith("And?<end_of_turn>\n<start_of_turn>model\n")


def test_a_conversation_that_the_model_begins_keeps_its_system_message() -> None:
    found = rendered(turn("system", "S"), turn("assistant", "Hello!"), turn("user", "Hi"))
    assert found.startswith("<start_of_turn>user\nS\n\n<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "non-empty"),
        ([turn("system", "S")], "no user turn"),
        ([turn("user", "a"), turn("tool", "x", tool_call_id="call_1")], "of a call before it"),
        ([turn("user", "a"), turn("assistant", None, tool_calls=[CALL]), turn("tool", "x")], "of a call before it"),
        ([turn("wizard", "a")], "role must be one of"),
        ([turn("user", "a", tool_calls=[CALL])], "tool_calls"),
        ([turn("user", None)], "content"),
        ([turn("assistant", 5)], "content"),
        ([turn("assistant", None, tool_calls="x")], "must be a list"),
        ([turn("assistant", None, tool_calls=[{"id": "a"}])], "function call"),
        ([turn("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{"}}])], "must be JSON"),
        (["x"], "must be an object"),
        ([turn("user", [{"type": "image_url"}])], "must be .*image"),
    ],
)
def test_what_is_no_conversation(messages, said) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        render_turns(messages, (), add_generation_prompt=True)
    assert caught.value.field == "messages"


def test_who_has_calls() -> None:
    assert has_calls([turn("user", "a"), turn("tool", "b")]) and has_calls([turn("assistant", None, tool_calls=[CALL])])
    assert not has_calls([turn("assistant", "a", tool_calls=[])]) and not has_calls(None)


def test_the_end_of_a_turn_ends_an_answer_where_the_model_does_not_name_it() -> None:
    class Base:
        turn_end, eos_ids = END_OF_TURN, (1,)

    class Tuned:
        turn_end, eos_ids = None, (1, END_OF_TURN)

    asked = TextRequest("a", SamplingParams(stop_token_ids=(9,)), messages=(turn("user", "x"),))
    assert apply_turn_end(Base(), asked).params.stop_token_ids == (9, END_OF_TURN)
    assert apply_turn_end(Tuned(), asked) is asked
    plain = TextRequest("a", SamplingParams(), prompt="x")
    assert apply_turn_end(Base(), plain) is plain
