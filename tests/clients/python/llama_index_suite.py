"""LlamaIndex's OpenAILike: chat, completion, streams, tools, structured answers."""

import os
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

LLM = OpenAILike(
    model=os.environ["MODEL"],
    api_base=os.environ["BASE_URL"] + "/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=4096,
    max_tokens=100,
    temperature=0,
    max_retries=0,
)
PROMPT = "The capital of France is"


class City(BaseModel):
    name: Literal["Paris", "Rome"]


def test_chat_and_its_stream() -> None:
    turns = [ChatMessage(role="system", content="Be short."), ChatMessage(role="user", content=PROMPT)]
    whole = LLM.chat(turns)
    *_, last = LLM.stream_chat(turns)
    assert last.message.content == whole.message.content


async def test_the_asynchronous_calls() -> None:
    assert (await LLM.acomplete(PROMPT)).text == LLM.complete(PROMPT).text


def test_completions_by_their_own_route() -> None:
    plain = LLM.model_copy(update={"is_chat_model": False})
    *_, last = plain.stream_complete(PROMPT)
    assert last.text == plain.complete(PROMPT).text


def test_tools() -> None:
    def paint(color: Literal["red", "blue"]) -> str:
        """Paint the wall."""
        return color

    found = LLM.chat_with_tools([FunctionTool.from_defaults(paint)], user_msg="Paint it.", tool_required=True)
    for call in LLM.get_tool_calls_from_response(found):
        assert call.tool_name == "paint" and call.tool_kwargs["color"] in ("red", "blue")


def test_a_structured_answer() -> None:
    found = LLM.as_structured_llm(City).complete(PROMPT).raw
    assert isinstance(found, City)
