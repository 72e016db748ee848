"""The offline API: `LLM(engine).generate(...)` and `.stream(...)`, without a server.

Steps the engine in the caller's thread. It must not know gRPC. Invariant: a stream that is dropped half-way aborts its
request, so an LLM object never computes for nobody. Not thread-safe; use one LLM per thread, or the server.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from types import TracebackType

from wicore_trt.config import load_settings
from wicore_trt.core.assemble import load_engine
from wicore_trt.core.text_engine import encode_request
from wicore_trt.core.text_output import SequenceText
from wicore_trt.errors import WicoreError
from wicore_trt.types import (
    CacheHints,
    EngineStats,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TextOutput,
    TextRequest,
    TokenLogprob,
    TokenOutput,
    Usage,
)

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sequence."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()


class LLM:
    """An engine directory, loaded. Keyword arguments are settings by dotted path with `__` for the dot, e.g.
    `LLM(path, executor__threads=1, kv__device_bytes="2GiB")`.

    Raises EngineFormatError for an engine that cannot be loaded and ConfigError for a setting that is wrong.
    """

    def __init__(self, engine: str | Path, **settings: object) -> None:
        overrides = {name.replace("__", "."): value for name, value in settings.items()}
        loaded = load_engine(load_settings(None, {"engine": str(engine), **overrides}))
        self.info = loaded.info
        self.tokenizer = loaded.tokenizer
        self._core = loaded.core
        self._ids = (f"llm-{i}" for i in itertools.count())
        self._inboxes: dict[str, deque[TokenOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        cache: CacheHints | None = None,
    ) -> list[list[Completion]]:
        """Complete prompts (text, or token ids) together; result[i][j] is sequence j of prompt i.

        `cache` says, of each prompt, how long its pages are worth keeping.
        Raises InvalidRequestError before anything runs when a prompt is wrong.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        many: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[assignment, list-item]
        requests = [self._request(prompt, params, cache) for prompt in many]
        parts: dict[tuple[str, int], list[TextOutput]] = {}
        for output in self._run(requests):
            parts.setdefault((output.request_id, output.index), []).append(output)
        return [[_completion(parts[r.request_id, i]) for i in range(r.params.n)] for r in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache: CacheHints | None = None
    ) -> Iterator[TextOutput]:
        """Yield the deltas of one prompt as they are computed."""
        return self._run([self._request(prompt, params, cache)])

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        params: SamplingParams | None = None,
        *,
        cache: CacheHints | None = None,
    ) -> Iterator[TextOutput]:
        """Yield the deltas of the model's next turn, by the model's own chat template."""
        text = self._text(params, cache)
        return self._run([self._tokenize(replace(text, messages=tuple(messages)))])

    def stats(self) -> EngineStats:
        """Counters since the engine was loaded."""
        return self._core.stats()

    def close(self) -> None:
        """Free the engine's memory."""
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _text(self, params: SamplingParams | None, cache: CacheHints | None) -> TextRequest:
        return TextRequest(next(self._ids), params or SamplingParams(), cache=cache or CacheHints())

    def _request(self, prompt: Prompt, params: SamplingParams | None, cache: CacheHints | None) -> GenerateRequest:
        text = self._text(params, cache)
        if isinstance(prompt, str):
            return self._tokenize(replace(text, prompt=prompt))
        return self._tokenize(replace(text, prompt_token_ids=tuple(prompt)))

    def _tokenize(self, request: TextRequest) -> GenerateRequest:
        token_ids = encode_request(self.tokenizer, request, self.info.max_context_tokens)
        made = GenerateRequest(request.request_id, token_ids, request.params, cache=request.cache)
        self._core.validate(made)
        return made

    def _run(self, requests: list[GenerateRequest]) -> Iterator[TextOutput]:
        """Step the engine until `requests` end; what other open streams gain meanwhile waits in their inboxes."""
        texts = {
            (r.request_id, i): SequenceText(r.request_id, self.tokenizer, r.params)
            for r in requests
            for i in range(r.params.n)
        }
        open_texts = len(texts)
        inbox: deque[TokenOutput] = deque()
        self._inboxes.update((r.request_id, inbox) for r in requests)
        try:
            for request in requests:
                self._core.add(request)
            while open_texts:
                if not inbox:
                    self._distribute(self._core.step())
                    continue
                output = inbox.popleft()
                if output.finish_reason is FinishReason.ERROR:
                    raise WicoreError(output.error or "The step failed.")
                key = (output.request_id, output.index)
                text = texts[key].push(output)
                if text is None:
                    continue
                if text.finish_reason is not None:
                    open_texts -= 1
                    if output.finish_reason is None:
                        self._core.abort(*key)  # a stop string ended it; the engine does not know
                yield text
        finally:
            for request in requests:
                self._core.abort(request.request_id)
                del self._inboxes[request.request_id]
            self._core.settle()

    def _distribute(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            self._inboxes[output.request_id].append(output)


def _completion(parts: list[TextOutput]) -> Completion:
    last = parts[-1]
    assert last.finish_reason is not None and last.usage is not None
    return Completion(
        text="".join(part.text for part in parts),
        token_ids=tuple(t for part in parts for t in part.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        logprobs=tuple(lp for part in parts for lp in part.logprobs),
    )
