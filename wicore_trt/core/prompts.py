"""Make token ids of the prompts of text requests, and prepare their images.

It must not know engines or threads: callers say where slow work runs. Invariant: a prompt that is returned fits the
context of its engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from wicore_trt.errors import ContextLengthError, InvalidRequestError
from wicore_trt.images.fetch import fetch_image
from wicore_trt.images.prepare import prepare_image
from wicore_trt.text.calls import lets_text_be
from wicore_trt.text.images import IMAGE_MARK, check_images, expand_marks, insert_soft_tokens, make_spans
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import ImageFile, ImageInfo, ModelInfo, TextRequest

Run = Callable[[str, Callable[[], ImageFile]], Awaitable[ImageFile]]
"""Runs a tenant's function."""
INLINE_CHARS = 2048
"""Texts of no more characters are tokenized on the event loop, in about a millisecond."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Most images of a request, and the hosts that they may be fetched from."""

    most: int = 16
    hosts: tuple[str, ...] = ()


IMAGE_LIMITS = ImageLimits()


def encode_request(tokenizer: Tokenizer, request: TextRequest, info: ModelInfo) -> TextRequest:
    """Return the request with its prompt as token ids, and with `content` for its images, which are prepared. Raises
    InvalidRequestError unless one kind of prompt is given, ContextLengthError for one beyond the context of `info`."""
    limit, built = info.max_context_tokens, info.engine_context_tokens
    field = "prompt" if request.messages is None else "messages"
    keep = request.truncate_prompt_tokens
    try:
        token_ids = tokenize_prompt(tokenizer, request, limit if keep is None else None, info.images)
    except ContextLengthError as error:
        raise ContextLengthError.from_counts(error.tokens, limit, field, built=built, least=True) from None
    if keep is not None:
        token_ids = token_ids[-(limit - 1 if keep == -1 else keep) :]
    if len(token_ids) >= limit:
        raise ContextLengthError.from_counts(len(token_ids), limit, field, built=built)
    if token_ids is request.prompt_token_ids:
        return request
    content = make_spans(token_ids, info.images, request.images) if info.images and request.images else ()
    return replace(
        request, prompt=None, messages=None, images=(), truncate_prompt_tokens=None,
        prompt_token_ids=token_ids, content=content,
    )  # fmt: skip


def tokenize_prompt(
    tokenizer: Tokenizer, request: TextRequest, max_tokens: int | None = None, images: ImageInfo | None = None
) -> tuple[int, ...]:
    """Return the prompt token ids; with those of the request's images, which are prepared, for an engine that reads
    `images`. Raises ContextLengthError for a text of certainly more than `max_tokens`."""
    given = [request.prompt is not None, request.prompt_token_ids is not None, request.messages is not None]
    if sum(given) != 1:
        raise InvalidRequestError("Give exactly one of prompt, prompt_token_ids and messages.", field="prompt")
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids
    if request.messages is not None:
        ids = tokenizer.apply_chat(
            request.messages,
            functions=request.functions,
            chat_template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            max_tokens=max_tokens,
            **({"images": request.images} if request.images else {}),
        )
    elif prompt := request.prompt:
        if request.images:
            marks = "" if IMAGE_MARK in prompt else IMAGE_MARK * len(request.images)  # then they come first
            [prompt] = expand_marks([marks + prompt], request.images, "prompt")
        ids = tokenizer.encode(prompt, add_bos=request.add_bos, max_tokens=max_tokens)
    else:
        raise InvalidRequestError("The prompt is empty.", field="prompt")
    if request.images and images is not None:
        ids = insert_soft_tokens(ids, images, request.images)
    return tuple(ids)


async def _run_now(tenant: str, function: Callable[[], ImageFile]) -> ImageFile:
    return function()


async def prepare_images(
    request: TextRequest, info: ModelInfo, limits: ImageLimits, fetch: Run = _run_now, prepare: Run = _run_now
) -> TextRequest:
    """Fetch and decode a request's images one after another, by `fetch` and `prepare`. Raises InvalidRequestError."""
    check_images(request, info.images, limits.most)
    if info.images is None or not request.images:
        return request
    found = list[ImageFile]()
    for image in request.images:
        if image.remote:
            image = await fetch(request.tenant, partial(fetch_image, image, limits.hosts))
        found.append(await prepare(request.tenant, partial(prepare_image, image, info.images)))
    request = replace(request, images=tuple(found))
    check_images(request, info.images, limits.most)
    return request


def prepare_images_now(request: TextRequest, info: ModelInfo, limits: ImageLimits) -> TextRequest:
    """Fetch and decode a request's images here, without an event loop."""
    try:
        prepare_images(request, info, limits).send(None)
    except StopIteration as end:  # it waits for nothing
        return cast("TextRequest", end.value)
    raise AssertionError


def is_short(tokenizer: Tokenizer, request: TextRequest) -> bool:
    """Return True for a text that is tokenized sooner than a thread begins; a model's chat template takes longer."""
    if request.prompt is not None:
        return len(request.prompt) <= INLINE_CHARS
    if request.functions or request.chat_template_kwargs or tokenizer.has_chat or not request.messages:
        return False
    size = 0
    for message in request.messages:
        for pair in message.items() if isinstance(message, Mapping) else [(None, message)]:
            for text in pair:
                size += len(text) if isinstance(text, str) else INLINE_CHARS + 1
            if size > INLINE_CHARS:
                return False
    return True


def apply_turn_end(tokenizer: Tokenizer, request: TextRequest) -> TextRequest:
    """Add the end of a turn to a conversation's stop tokens, for models that do not name it as eos. Drop the constraint
    of optional tool calls where the model's template writes calls itself."""
    if request.functions and tokenizer.takes_tools and lets_text_be(request.params.constraint):
        request = replace(request, params=replace(request.params, constraint=None))
    end, params = tokenizer.turn_end, request.params
    if request.messages is None or end is None or params.ignore_eos or end in tokenizer.eos_ids:
        return request
    return replace(request, params=replace(params, stop_token_ids=(*params.stop_token_ids, end)))
