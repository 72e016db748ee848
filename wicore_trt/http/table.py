"""The one table of routes: path, method, body, handler, and what the OpenAPI document says of them.

Must not know how requests come in. Invariants: every route needs a key, but those that are named OPEN; what a route
answers is JSON or an event stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pydantic import BaseModel

from wicore_trt.access.admission import OTHER
from wicore_trt.http import anthropic, bodies, native, openai
from wicore_trt.http.fields import Place
from wicore_trt.http.replies import Reply

OPEN = frozenset(("/health", "/ready", "/ping"))
"""Paths that need no key."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. `handle` is called with the context, the call, and the body or the path's parameters."""

    path: str
    handle: Callable[..., Awaitable[Reply]]
    body: type[BaseModel] | None = None
    generates: bool = False
    anthropic: bool = False
    """Its errors are of Anthropic's shape."""
    fields: Place | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.body is not None:
            object.__setattr__(self, "fields", bodies.fields_of(self.body))

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    @property
    def streams(self) -> bool:
        """Whether it can answer with events."""
        return self.body is not None and "stream" in self.body.model_fields

    @property
    def statuses(self) -> tuple[int, ...]:
        """How it can fail, beside the want of a key."""
        if self.generates:
            return (400, 404, 408, 413, 415, 429, 500, 503, 504)
        if self.body is not None:
            return (400, 404, 408, 413, 415, 429, 503)
        return (404, 503) if "{" in self.path else (503,)


OPERATIONS = (
    Operation("/v1/models", openai.models),
    Operation("/v1/models/{name:path}", openai.model),
    Operation("/v1/chat/completions", openai.chat, bodies.ChatBody, generates=True),
    Operation("/v1/responses", openai.responses, bodies.ResponsesBody, generates=True),
    Operation("/v1/responses/input_tokens", openai.input_tokens, bodies.ResponsesBody),
    Operation("/v1/completions", openai.completions, bodies.CompletionBody, generates=True),
    Operation("/v1/messages", anthropic.messages, bodies.MessagesBody, generates=True, anthropic=True),
    Operation("/v1/messages/count_tokens", anthropic.count_tokens, bodies.PromptBody, anthropic=True),
    Operation("/v1/inference", native.inference, bodies.InferenceBody, generates=True),
    Operation("/v1/stats", native.stats),
    Operation("/tokenize", native.tokenize, bodies.TokenizeBody),
    Operation("/detokenize", native.detokenize, bodies.DetokenizeBody),
    Operation("/tokenizer_info", native.tokenizer_info),
    Operation("/load", native.load),
    Operation("/ping", native.ping),
    Operation("/status", native.status),
    Operation("/version", native.version),
    Operation("/health", native.health),
    Operation("/ready", native.ready),
)

_PATHS = frozenset((*(o.path for o in OPERATIONS), "/openapi.json", "/metrics", "/v1/stream"))
_MODEL = "/v1/models/"


def served_path(path: str) -> str:
    """The path as a bounded name: one of the table, else OTHER."""
    if path.startswith(_MODEL):
        return f"{_MODEL}{{name}}"
    return path if path in _PATHS else OTHER
