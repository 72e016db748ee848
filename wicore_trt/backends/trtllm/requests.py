"""Translates our requests into TensorRT-LLM's terms, and its results into ours.

Refuses what would mean something else there: a parameter that is silently ignored is a wrong token. Must not know the
executor. Invariant: requests that `check_request` lets pass are sampled as `SamplingParams` defines. Their outputs end
at the same token as ours, whether the engine reports stop tokens or not.

Names: tensorrt_llm.bindings.executor of 1.2 (nanobind/executor/request.cpp).
"""

from __future__ import annotations

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


def check_request(request: GenerateRequest, stop_ids: tuple[int, ...]) -> None:
    params, other = request.params, "TensorRT-LLM engines do not have it as this API defines it."
    if params.presence_penalty or params.frequency_penalty:  # it counts the prompt's tokens, we do not
        name = "presence_penalty" if params.presence_penalty else "frequency_penalty"
        raise InvalidRequestError(f"{name}: {other}", field=name, fix="Use repetition_penalty.")
    if params.logprobs is not None:  # of the filtered distribution there, and without alternatives
        raise InvalidRequestError(f"logprobs: {other}", field="logprobs", fix="Leave it out.")
    if params.prompt_logprobs is not None:
        raise InvalidRequestError(f"prompt_logprobs: {other}", field="prompt_logprobs", fix="Leave it out.")
    if params.constraint is not None:  # its own grammars are of another engine, and would mean something else
        raise InvalidRequestError(f"constraint: {other}", field="constraint", fix="Leave it out.")
    if params.logit_bias:
        raise InvalidRequestError(f"logit_bias: {other}", field="logit_bias", fix="Leave it out.")
    if params.min_tokens and len(stop_ids) > 1:  # it holds back one stop token only
        raise InvalidRequestError(f"min_tokens with several stop tokens: {other}", field="min_tokens")


def make_request(
    bindings: Any, request: GenerateRequest, seed: int, stop_ids: tuple[int, ...], max_context: int
) -> Any:
    """Make the bindings.Request of one sequence. `bindings` is tensorrt_llm.bindings.executor."""
    params, prompt = request.params, request.prompt_token_ids
    room, salt = max_context - len(prompt), None
    if request.cache_salt:  # TensorRT-LLM's block key of a tenant is below 2**63
        digest = blake2b(request.cache_salt.encode(), digest_size=8, person=b"wicore-trtllm").digest()
        salt = int.from_bytes(digest, "little") >> 1
    return bindings.Request(
        input_token_ids=list(prompt),
        max_tokens=min(room, params.max_tokens or room),
        streaming=True,
        sampling_config=_make_sampling(bindings, params, seed),
        output_config=bindings.OutputConfig(exclude_input_from_output=True),
        end_id=stop_ids[0] if stop_ids else None,
        stop_words=[[token] for token in stop_ids[1:]] or None,
        cache_salt_id=salt,
    )


def _make_sampling(bindings: Any, params: SamplingParams, seed: int) -> Any:
    """Make the SamplingConfig. Unless greedy, top_p is given: without top_k and top_p TensorRT-LLM is greedy."""
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
    """Sequence on its way. `stops` are its stop tokens, `end_id` the one that the engine knows as such."""

    request: GenerateRequest
    index: int
    stops: frozenset[int]
    end_id: int | None
    produced: int = field(default=0)
    finished: bool = field(default=False)

    def take(self, result: Any) -> list[TokenOutput]:
        """Take what a bindings.Result adds. `finished` tells whether this was the last."""
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
            return [self.fail("TensorRT-LLM ended the sequence without a reason.")]
        if reason is FinishReason.STOP and tokens and tokens[-1] not in self.stops:
            # The engine kept the stop token to itself. The last token of an output that says STOP is no text.
            return [self._make_output(tuple(tokens), None, None), self._make_output((), reason, None)]
        if not tokens and reason is None:
            return []
        return [self._make_output(tuple(tokens), reason, tokens[-1] if stopped else None)]

    def fail(self, error: str) -> TokenOutput:
        self.finished = True
        return self._make_output((), FinishReason.ERROR, None, error)

    def _make_output(
        self, tokens: tuple[int, ...], reason: FinishReason | None, stop: int | None, error: str | None = None
    ) -> TokenOutput:
        # cached_tokens stays 0: its count of reused blocks is over all pools, and says nothing about tokens
        usage = Usage(len(self.request.prompt_token_ids), self.produced)
        return TokenOutput(
            self.request.request_key,
            self.index,
            tokens,
            finish_reason=reason,
            stop_reason=stop,
            usage=usage,
            error=error,
        )
