"""Bodies to plain requests.

Pure functions; must not know engines or calls. Invariants: a field that was not given takes the default of the plain
type, or of the API where that has another; errors name the field as the client wrote it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.http.bodies import Cache, ChatBody, CompletionBody, Generation, InferenceBody, Sampling
from wicore_trt.http.structured import constraint_of
from wicore_trt.request_fields import SAMPLING
from wicore_trt.text.tools import Tools
from wicore_trt.types import CacheHints, CachePriority, Constraint, SamplingParams, TextRequest, prompt_list

COMPLETION_TOKENS = 16
"""What /v1/completions gives unless max_tokens says otherwise, as in OpenAI's API."""
MAX_PROMPTS = 1024
IMAGES = ("image_url", "image", "input_image")
TEXTS = ("text", "input_text", "output_text")
_OWN_WAY = frozenset(("max_tokens", "logprobs", "prompt_logprobs", "top_k", "stop", "logit_bias"))
"""Fields of the plain type that a body has in another form."""


def sampling(
    body: Sampling,
    logprobs: int | None,
    max_tokens: int | None,
    constraint: Constraint | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """A `constraint` comes in place of the body's. Raises InvalidRequestError for values out of range."""
    plain = [row for row in SAMPLING if row.name not in _OWN_WAY]
    given = {row.name: value for row in plain if (value := getattr(body, row.http, None)) is not None}
    if (penalty := body.repeat_penalty) is not None and given.setdefault("repetition_penalty", penalty) != penalty:
        raise InvalidRequestError("It is another repetition_penalty.", field="repeat_penalty", fix="Leave one out.")
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias:
        given["logit_bias"] = {_token(key): bias for key, bias in body.logit_bias.items()}
    found = constraint_of(body) if constraint is None else None
    given["constraint"] = constraint if found is None else found[1]
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise InvalidRequestError(f"logit_bias has {shown(key)}, which is no token id.", field="logit_bias")
    return int(key)


def cache_hints(cache: Cache | None) -> CacheHints:
    """Raises InvalidRequestError."""
    if cache is None:
        return CacheHints()
    try:
        priority = CachePriority(cache.priority or "normal")
    except ValueError:
        raise InvalidRequestError("cache.priority is low, normal or high.", field="cache.priority") from None
    return CacheHints(cache.session or "", priority, cache.ttl_s)


def _common(body: Sampling, tenant: str) -> dict[str, Any]:
    return {
        "request_id": uuid.uuid4().hex,
        "tenant": tenant,
        "timeout_s": body.timeout,
        "priority": body.priority or 0,
        "cache_salt": body.cache_salt or "",
        "cache": cache_hints(body.cache),
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
    }


def chat_request(body: ChatBody, tenant: str, tools: Tools | None = None) -> TextRequest:
    """Raises InvalidRequestError."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true.", field="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    told = tools.functions if tools is not None else ()
    try:
        constraint = tools.constraint if tools is not None else None
        params = sampling(body, logprobs, max_tokens, constraint, _prompt_logprobs(body))
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, field="tools") if error.field == "constraint" else error from None
    return TextRequest(
        params=params,
        messages=messages(body.messages),
        functions=tuple(function.declared() for function in told),
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
        **_common(body, tenant),
    )


def completion_requests(body: CompletionBody, tenant: str) -> list[TextRequest]:
    """One for each prompt. Raises InvalidRequestError."""
    prompts = _prompts(body.prompt)
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.max_tokens is None and body.min_tokens is not None:
        max_tokens = max(max_tokens, body.min_tokens)
    if body.echo and body.truncate_prompt_tokens is not None:
        raise InvalidRequestError("echo shows whole prompts.", field="truncate_prompt_tokens", fix="Leave one out.")
    wanted = [count for count in (_prompt_logprobs(body), body.logprobs if body.echo else None) if count is not None]
    params = sampling(body, body.logprobs, max_tokens, prompt_logprobs=max(wanted, default=None))
    add_bos = body.add_special_tokens is not False
    return [
        TextRequest(
            params=params,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else tuple(prompt),
            add_bos=add_bos,
            **_common(body, tenant),
        )
        for prompt in prompts
    ]


def _prompt_logprobs(body: Generation) -> int | None:
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError(
            "prompt_logprobs are not streamed.", field="prompt_logprobs", fix="Use /v1/completions, echo and logprobs."
        )
    return body.prompt_logprobs


def inference_request(body: InferenceBody, tenant: str) -> TextRequest:
    """Raises InvalidRequestError."""
    params = sampling(body, None, body.max_tokens)
    return TextRequest(params=params, prompt=body.prompt, **_common(body, tenant))


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[Any]:
    """The prompts of a completion request. Raises InvalidRequestError for none or too many."""
    found = prompt_list(prompt)
    if not found:
        raise InvalidRequestError("The prompt is empty.", field="prompt")
    if len(found) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt has {len(found)} items; at most {MAX_PROMPTS} are taken.", field="prompt")
    return found


def messages(given: Sequence[Mapping[str, Any]]) -> tuple[dict[str, object], ...]:
    """The turns as the chat template takes them, which checks the rest. Raises InvalidRequestError for images."""
    told = []
    for i, message in enumerate(given):
        turn, content = dict(message), message.get("content")
        if isinstance(content, list):
            turn["content"] = [_part(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content)]
            if not content and message.get("role") == "tool":  # a function that returned nothing
                turn["content"] = ""
        told.append(turn)
    return tuple(told)


def _part(part: Any, where: str) -> Any:
    """A part as templates know it."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in IMAGES:
        raise InvalidRequestError(f"{where}: images are not supported yet.", field=where)
    if kind in TEXTS:
        return {**part, "type": "text"}
    return {"type": "text", "text": part.get("refusal")} if kind == "refusal" else part
