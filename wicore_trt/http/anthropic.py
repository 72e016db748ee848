"""The routes of Anthropic's API: messages, and how many tokens one would have.

Translates between bodies and generations and owns nothing else; what a chat is, `openai.converse` knows.
"""

from __future__ import annotations

from wicore_trt.access.calls import Call
from wicore_trt.http.bodies import MessagesBody, PromptBody
from wicore_trt.http.context import Context
from wicore_trt.http.conversation import naming
from wicore_trt.http.messages import CHAT_NAMES, MessagesShape, chat_of
from wicore_trt.http.openai import converse, prompt_of
from wicore_trt.http.replies import Reply, json_reply


async def messages(context: Context, call: Call, body: MessagesBody) -> Reply:
    """Answer a conversation."""
    context.serving()
    model = context.check_model(body.model)
    asked = chat_of(body)
    with naming(CHAT_NAMES):
        return await converse(context, call, asked, lambda calls: MessagesShape(model, calls=calls))


async def count_tokens(context: Context, call: Call, body: PromptBody) -> Reply:
    """Count the tokens of a conversation."""
    context.check_model(body.model)
    with naming(CHAT_NAMES):
        tokens = await prompt_of(context, call, chat_of(body))
    return json_reply({"input_tokens": len(tokens)})
