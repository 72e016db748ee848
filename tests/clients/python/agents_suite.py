"""OpenAI's Agents SDK over chat completions: tools, a typed answer beside tools, streams, turns."""

from __future__ import annotations

import os
from typing import Literal

import openai
import pytest
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field

set_tracing_disabled(True)
CLIENT = openai.AsyncOpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="none", max_retries=0)
MODEL = OpenAIChatCompletionsModel(model=os.environ["MODEL"], openai_client=CLIENT)


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    millions: int = Field(ge=0, le=40)


def agent(**more) -> Agent:
    settings = {"temperature": 0.0, "max_tokens": 200} | more.pop("settings", {})
    return Agent(name="A", instructions="Be short.", model=MODEL, model_settings=ModelSettings(**settings), **more)


async def test_text() -> None:
    found = await Runner.run(agent(), "The capital of France is")
    assert isinstance(found.final_output, str) and found.raw_responses[0].usage.output_tokens > 0


async def test_a_typed_answer() -> None:
    found = await Runner.run(agent(output_type=City), "The capital of France is")
    assert isinstance(found.final_output, City)


async def test_tools_are_run_and_their_results_go_back() -> None:
    colors = []

    @function_tool
    def paint(color: Literal["red", "blue"]) -> str:
        """Paint the wall."""
        colors.append(color)
        return f"It is {color}: ü🎨."

    painter = agent(tools=[paint], settings={"tool_choice": "required"})  # after its first use the choice is auto
    try:
        found = await Runner.run(painter, "Paint the wall.", max_turns=3)
        assert isinstance(found.final_output, str)
    except MaxTurnsExceeded:  # the base model may go on painting
        assert len(colors) >= 3
    assert colors and set(colors) <= {"red", "blue"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_typed_answer_beside_tools(stream: bool) -> None:
    @function_tool
    def wait() -> str:
        """Wait."""
        return "waited"

    given = agent(tools=[wait], output_type=City)
    try:
        if stream:
            found = Runner.run_streamed(given, "The capital of France is", max_turns=3)
            async for _ in found.stream_events():
                pass
        else:
            found = await Runner.run(given, "The capital of France is", max_turns=3)
    except MaxTurnsExceeded:
        return
    assert isinstance(found.final_output, City)


async def test_a_stream_brings_the_text_in_parts() -> None:
    found = Runner.run_streamed(agent(), "The capital of France is")
    raw = [event.data async for event in found.stream_events() if event.type == "raw_response_event"]
    assert "".join(event.delta for event in raw if event.type == "response.output_text.delta") == found.final_output
