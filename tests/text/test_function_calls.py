"""A template that writes functions and calls in a form of its own, as FunctionGemma's does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from synthetic_tokenizer import backend, write

from wicore_trt.core.prompts import apply_turn_end
from wicore_trt.text.calls import CallFinder, Function, calls_constraint, gather_parts
from wicore_trt.text.detokenizer import IncrementalDetokenizer
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import SamplingParams, TextRequest

TEMPLATE = """{{ bos_token }}{% if tools %}<start_of_turn>developer
{% for t in tools %}{% set f = t['function'] %}declaration:{{ f['name'] }}{description:<escape>{{ f['description'] -}}
<escape>,{{ f['parameters'] | tojson }}}{% endfor %}<end_of_turn>
{% endif %}{% for m in messages %}{% if m['role'] == 'tool' -%}
<start_function_response>response:{{ m['name'] }}{value:<escape>{{ m['content'] }}<escape>}<end_function_response>
{%- else %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}
{{ m['content'] | trim }}{% for c in m['tool_calls'] or [] -%}
<start_function_call>call:{{ c['function']['name'] }}{
{%- for k, v in c['function']['arguments'] | dictsort %}{{ k }}:<escape>{{ v }}<escape>{% endfor -%}
}<end_function_call>{% endfor %}<end_of_turn>
{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
SAID = ({"role": "user", "content": "x"},)
WEATHER = {"name": "weather", "description": "Now.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("function")
    write(path, tokenizer_config={"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE})
    made = backend()
    names = ("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>")
    made.add_tokens([tokenizers.AddedToken(name, normalized=False, special=True) for name in names])
    made.save(str(path / "tokenizer.json"))
    return Tokenizer.from_dir(path)


def test_functions_calls_and_results_reach_the_template(tokenizer: Tokenizer) -> None:
    assert tokenizer.takes_tools
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "warm<escape>"},
    ]
    ids = tokenizer.apply_chat(messages, functions=[WEATHER])
    text = tokenizer.decode(ids, skip_special=False)
    assert "developer\ndeclaration:weather{description:<escape>Now.<escape>" in text and "You can call" not in text
    assert "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>" in text
    assert "response:weather{value:<escape>warm<escape><escape>}" in text
    assert ids.count(tokenizer.encode("<escape>", add_bos=False)[0]) == 6, "the result's own is text"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_read_from_the_tokens_of_an_answer(tokenizer: Tokenizer, size: int) -> None:
    answer = (
        "<start_function_call>call:weather{city:<escape>Paris, {x}<escape>,days:[1,2.5],deep:{<escape>a<escape>:true},"
        "no:null}<end_function_call><start_function_call>call:now{}<end_function_call>"
    )
    finder, found, detokenizer = CallFinder(), [], IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode(answer, add_bos=False)
    for at in range(0, len(ids), size):
        found += finder.push_text(detokenizer.push_ids(ids[at : at + size]))
    found += finder.push_text(detokenizer.flush_text()) + finder.end_output()
    text, calls = gather_parts(found)
    assert (text, finder.is_whole, [call.name for call in calls]) == ("", True, ["weather", "now"])
    want = {"city": "Paris, {x}", "days": [1, 2.5], "deep": {"a": True}, "no": None}
    assert [json.loads(call.arguments) for call in calls] == [want, {}]


def test_only_an_answer_that_must_be_a_call_is_held_to_json(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for must, tuned in ((False, tokenizer), (True, tokenizer), (False, Tokenizer.from_dir(write(tmp_path)))):
        constraint = calls_constraint([Function("weather")], must=must, several=True)
        request = TextRequest(
            "a",
            SamplingParams(constraint=constraint),
            messages=({"role": "user", "content": "x"},),
            functions=(WEATHER,),
        )
        kept = apply_turn_end(tuned, request).params.constraint
        assert (kept is None) == (not must and tuned is tokenizer)
