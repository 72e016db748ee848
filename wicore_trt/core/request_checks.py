"""Checks of a request against an engine, and the seeds and stop ids of its sequences.

Plain functions; they must not know engines. Invariant (I15): a request that passes fits the context and the vocabulary.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

from wicore_trt.errors import ContextLengthError, InvalidRequestError
from wicore_trt.runtime.executor import ImageEncoder
from wicore_trt.types import GenerateRequest, SamplingParams


def derive_seed(seed: int | None, index: int) -> int:
    """Derive the 64-bit seed of the index-th sequence of a request; random when the request names none."""
    if seed is None:
        return secrets.randbits(64)
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


def check_tokens(request: GenerateRequest, max_context: int, vocab: int) -> None:
    """Raise InvalidRequestError for a prompt that does not fit `max_context`, and for ids outside the vocabulary."""
    prompt, params = request.prompt_token_ids, request.params
    if not prompt:
        raise InvalidRequestError("The prompt is empty.", field="prompt")
    if len(prompt) >= max_context:
        raise ContextLengthError.from_counts(len(prompt), max_context, "prompt")
    for name, ids in (
        ("prompt_token_ids", prompt),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(params.logit_bias)),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            bad = next(token for token in ids if not 0 <= token < vocab)
            raise InvalidRequestError(f"Token id {bad} is outside the vocabulary of {vocab}.", field=name)


def check_images(request: GenerateRequest, encoder: ImageEncoder | None) -> None:
    """Raise InvalidRequestError for images that `encoder` cannot read."""
    images = [span for span in request.content if span.pixels]
    if not images:
        return
    if encoder is None:
        fix = "Build the engine with its vision tower, for a backend that reads images."
        raise InvalidRequestError("This engine reads no images.", field="images", fix=fix)
    if request.params.prompt_logprobs is not None:
        raise InvalidRequestError("Prompts with images have no log-probabilities.", field="prompt_logprobs")
    for span in images:
        if (span.end - span.begin, len(span.pixels)) != (encoder.tokens, encoder.pixel_bytes):
            raise InvalidRequestError(
                f"An image is {encoder.tokens} tokens of {encoder.pixel_bytes:,} bytes of pixels here, not"
                f" {span.end - span.begin} of {len(span.pixels):,}.",
                field="images",
            )


def list_stop_ids(params: SamplingParams, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that end a sequence. Under a constraint eos counts even with `ignore_eos`."""
    goes_on = params.ignore_eos and params.constraint is None
    return tuple(dict.fromkeys((*(() if goes_on else eos_ids), *params.stop_token_ids)))
