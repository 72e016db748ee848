"""Turns the token outputs of one sequence into text outputs.

Detokenizes incrementally and finds stop strings; knows neither engine nor transport. Invariant: the concatenated deltas
are the decoded output up to the stop, and exactly one output carries the finish reason.
"""

from __future__ import annotations

from wicore_trt.text.detokenizer import IncrementalDetokenizer
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import FinishReason, SamplingParams, TextOutput, TokenOutput, Usage


class SequenceText:
    """Text of one sequence. `finished` turns true with the output that carries a finish reason."""

    def __init__(self, request_id: str, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._request_id = request_id
        self._tokens = 0
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, params.stop, params.include_stop, special=not params.skip_special_tokens
        )
        self._params = params
        self.finished = False

    def push_output(self, output: TokenOutput) -> TextOutput | None:
        """Return the text of a token output, None after the end. Where a stop string sets `finished`, the engine still
        runs the sequence, and the caller aborts it."""
        if self.finished:
            return None
        shown = output.token_ids
        ended_by_token = output.finish_reason is FinishReason.STOP
        if ended_by_token and not self._params.include_stop:
            shown = shown[:-1]  # eos and stop tokens are reported as ids, not as text
        token_ids, logprobs, text = output.token_ids, output.logprobs, ""
        for i, token in enumerate(shown):
            self._tokens += 1
            text += self._detokenizer.push_ids((token,), may_stop=self._tokens > self._params.min_tokens)
            if self._detokenizer.matched is not None:
                return self._end_at_stop(output, text, i + 1)
        if output.finish_reason is not None:
            self.finished = True
            text += self._detokenizer.flush_text(may_stop=self._tokens > self._params.min_tokens)
            if self._detokenizer.matched is not None and output.finish_reason in (
                FinishReason.STOP,
                FinishReason.LENGTH,
            ):
                return self._end_at_stop(output, text, len(token_ids))
        return TextOutput(
            request_id=self._request_id, index=output.index, text=text, token_ids=token_ids, logprobs=logprobs,
            finish_reason=output.finish_reason, stop_reason=output.stop_reason,
            usage=output.usage if self.finished else None, prompt_logprobs=output.prompt_logprobs,
        )  # fmt: skip

    def _end_at_stop(self, output: TokenOutput, text: str, count: int) -> TextOutput:
        """Make the last output of a sequence that a stop string ended after `count` of this output's tokens."""
        self.finished = True
        usage = output.usage
        if usage is not None:
            surplus = len(output.token_ids) - count
            usage = Usage(usage.prompt_tokens, usage.completion_tokens - surplus, usage.cached_tokens)
        return TextOutput(
            request_id=self._request_id, index=output.index, text=text, token_ids=output.token_ids[:count],
            logprobs=output.logprobs[:count], finish_reason=FinishReason.STOP,
            stop_reason=self._detokenizer.matched, usage=usage, prompt_logprobs=output.prompt_logprobs,
        )  # fmt: skip
