"""LiteLLM's provider for servers of OpenAI's API."""

from __future__ import annotations

import json
import os

import litellm
import pytest

ASKED = {
    "model": f"openai/{os.environ['MODEL']}",
    "api_base": os.environ["BASE_URL"] + "/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "The capital of France is"}],
    "max_tokens": 24,
    "temperature": 0,
    "num_retries": 0,
}
PAINT = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]},
    },
}


def test_a_stream_is_the_text_of_the_answer() -> None:
    whole = litellm.completion(**ASKED)
    chunks = list(litellm.completion(**ASKED, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and whole.usage.completion_tokens > 0
    again = litellm.stream_chunk_builder(chunks)
    assert again.usage.completion_tokens == whole.usage.completion_tokens


async def test_the_asynchronous_calls() -> None:
    whole = await litellm.acompletion(**ASKED)
    text = ""
    async for chunk in await litellm.acompletion(**ASKED, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_tools(stream: bool) -> None:
    asked = ASKED | {"max_tokens": 100, "tools": [PAINT], "tool_choice": "required", "parallel_tool_calls": False}
    found = litellm.completion(**asked, stream=stream)
    if stream:
        found = litellm.stream_chunk_builder(list(found))
    [call] = found.choices[0].message.tool_calls
    assert call.function.name == "paint" and json.loads(call.function.arguments)["color"] in ("red", "blue")


def test_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    found = litellm.completion(**ASKED, response_format=form)
    assert json.loads(found.choices[0].message.content)["a"] in (1, 2)


def test_a_text_completion() -> None:
    asked = {k: v for k, v in ASKED.items() if k != "messages"}
    asked["model"] = f"text-completion-{asked['model']}"
    assert litellm.text_completion(**asked, prompt="The capital of France is").choices[0].text


LONG = "word " * 40_000


def test_a_prompt_that_is_too_long_has_its_class() -> None:
    """The class by which agents know to shorten the conversation and ask again."""
    said = [{"role": "user", "content": LONG}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**ASKED | {"messages": said})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**ASKED | {"messages": said}, stream=True)
    text = {k: v for k, v in ASKED.items() if k != "messages"} | {"model": f"text-completion-{ASKED['model']}"}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.text_completion(**text, prompt=LONG)
    messages = ASKED | {"model": f"anthropic/{os.environ['MODEL']}", "api_base": os.environ["BASE_URL"]}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**messages | {"messages": said})


async def test_a_prompt_that_is_too_long_for_responses_has_its_class() -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.aresponses(
            model=ASKED["model"],
            api_base=ASKED["api_base"],
            api_key="none",
            input=LONG,
            max_output_tokens=8,
            num_retries=0,
        )


def test_errors_have_their_class() -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**ASKED | {"temperature": -1})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**ASKED | {"model": "openai/none"})
