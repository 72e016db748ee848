"""Our requests in TensorRT-LLM's terms, and its results in ours.

Refuses what would mean something else there, because a parameter that is silently ignored is a wrong token. It must not
know the executor. Invariant: a request that `check_request` lets pass is sampled by the definitions of
`SamplingParams`, and its outputs end at the same token as ours would, whether the engine reports stop tokens or not.

Names: tensorrt_llm.bindings.executor of 1.2 (nanobind/executor/request.cpp).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from wicore_trt.errors import InvalidRequestError
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams, TokenOutput, Usage

_FINISH = {
    "END_ID": FinishReason.STOP,
    "STOP_WORDS": FinishReason.STOP,
    "LENGTH": FinishReason.LENGTH,
    "TIMED_OUT": FinishReason.DEADLINE,
    "CANCELLED": FinishReason.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine was built for. `eos_ids` are the model's stop tokens."""

    vocab_size: int
    max_seq_len: int
    eos_ids: tuple[int, ...]


def check_request(request: GenerateRequest, limits: EngineLimits) -> None:
    """Raise InvalidRequestError for what the engine cannot do, or would do otherwise than SamplingParams says."""
    prompt, params = request.prompt_token_ids, request.params
    if not prompt or len(prompt) >= limits.max_seq_len:
        raise InvalidRequestError(
            f"The prompt has {len(prompt)} tokens; this engine takes 1 to {limits.max_seq_len - 1}.", field="prompt"
        )
    for name, ids in (("prompt_token_ids", prompt), ("stop_token_ids", params.stop_token_ids)):
        bad = next((token for token in ids if not 0 <= token < limits.vocab_size), None)
        if bad is not None:
            raise InvalidRequestError(f"Token id {bad} is outside the vocabulary of {limits.vocab_size}.", field=name)
    other = "TensorRT-LLM engines do not have it as this API defines it."
    if params.presence_penalty or params.frequency_penalty:  # it counts the prompt's tokens, we do not
        name = "presence_penalty" if params.presence_penalty else "frequency_penalty"
        raise InvalidRequestError(f"{name}: {other}", field=name, fix="Use repetition_penalty.")
    if params.logprobs is not None:  # of the filtered distribution there, and without alternatives
        raise InvalidRequestError(f"logprobs: {other}", field="logprobs", fix="Leave it out.")
    if params.logit_bias:
        raise InvalidRequestError(f"logit_bias: {other}", field="logit_bias", fix="Leave it out.")
    if params.min_tokens and len(stop_ids(params, limits)) > 1:  # it holds back one stop token only
        raise InvalidRequestError(f"min_tokens with several stop tokens: {other}", field="min_tokens")


def stop_ids(params: SamplingParams, limits: EngineLimits) -> tuple[int, ...]:
    """Tokens that end a sequence."""
    return tuple(dict.fromkeys((*(() if params.ignore_eos else limits.eos_ids), *params.stop_token_ids)))


def make_request(bindings: Any, request: GenerateRequest, index: int, seed: int, limits: EngineLimits) -> Any:
    """bindings.Request of the `index`-th of n sequences. `bindings` is tensorrt_llm.bindings.executor."""
    params, prompt = request.params, request.prompt_token_ids
    room = limits.max_seq_len - len(prompt)
    stops = stop_ids(params, limits)
    return bindings.Request(
        input_token_ids=list(prompt),
        max_tokens=min(room, params.max_tokens or room),
        streaming=True,
        sampling_config=_sampling(bindings, params, sequence_seed(seed, index)),
        output_config=bindings.OutputConfig(exclude_input_from_output=True),
        end_id=stops[0] if stops else None,
        stop_words=[[token] for token in stops[1:]] or None,
        cache_salt_id=salt_id(request.cache_salt),
    )


def new_seed(params: SamplingParams) -> int:
    """The request's seed, or a random one."""
    return params.seed if params.seed is not None else secrets.randbits(64)


def sequence_seed(seed: int, index: int) -> int:
    """Seed of one of n sequences, so that they differ; below 2**64."""
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


def salt_id(salt: str) -> int | None:
    """A tenant's number in TensorRT-LLM's block keys, below 2**63; None for no salt."""
    if not salt:
        return None
    return int.from_bytes(blake2b(salt.encode(), digest_size=8, person=b"wicore-trtllm").digest(), "little") >> 1


def _sampling(bindings: Any, params: SamplingParams, seed: int) -> Any:
    """top_p is always given: without top_k and top_p TensorRT-LLM is greedy, whatever the temperature."""
    optional: dict[str, Any] = {"min_tokens": params.min_tokens} if params.min_tokens else {}
    if params.repetition_penalty != 1.0:
        optional["repetition_penalty"] = params.repetition_penalty
    if params.greedy:
        return bindings.SamplingConfig(top_k=1, **optional)
    if params.min_p:
        optional["min_p"] = params.min_p
    if params.top_k:
        optional["top_k"] = params.top_k
    return bindings.SamplingConfig(top_p=params.top_p, temperature=params.temperature, seed=seed, **optional)


@dataclass(slots=True)
class SequenceOutput:
    """One sequence on its way. `stops` are its stop tokens, `end_id` the one that the engine knows as such."""

    request: GenerateRequest
    index: int
    stops: frozenset[int]
    end_id: int | None
    produced: int = field(default=0)
    finished: bool = field(default=False)

    def take(self, result: Any) -> TokenOutput:
        """What a bindings.Result adds. `finished` tells whether this was the last."""
        tokens = list(result.output_token_ids[0])
        name = result.finish_reasons[0].name if result.is_final and result.finish_reasons else ""
        reason = _FINISH.get(name)
        if name == "END_ID" and self.end_id is not None and not self.stops.intersection(tokens):
            tokens.append(self.end_id)  # whether the engine reports it depends on its version
        for place, token in enumerate(tokens):
            if token in self.stops:
                tokens, reason = tokens[: place + 1], FinishReason.STOP
                break
        stopped = reason is FinishReason.STOP and tokens and tokens[-1] in self.request.params.stop_token_ids
        self.finished = reason is not None or result.is_final
        self.produced += len(tokens)
        if self.finished and reason is None:
            return self.end(FinishReason.ERROR, error="TensorRT-LLM ended the sequence without a reason.")
        return self._output(tuple(tokens), reason, tokens[-1] if stopped else None)

    def end(self, reason: FinishReason, *, error: str | None = None) -> TokenOutput:
        """End the sequence here, without another token."""
        self.finished = True
        return self._output((), reason, None, error)

    def _output(
        self, tokens: tuple[int, ...], reason: FinishReason | None, stop: int | None, error: str | None = None
    ) -> TokenOutput:
        # cached_tokens stays 0: its count of reused blocks is over all pools, and says nothing about tokens
        usage = Usage(len(self.request.prompt_token_ids), self.produced)
        return TokenOutput(
            self.request.request_id,
            self.index,
            tokens,
            finish_reason=reason,
            stop_reason=stop,
            usage=usage,
            error=error,
        )
