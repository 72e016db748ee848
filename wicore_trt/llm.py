"""The offline API: `LLM(engine).generate(...)`, `.chat(...)` and `.stream(...)`, without a server.

Steps the engine in the caller's thread; of several threads one at a time steps, for the requests of all. It must not
know gRPC. Invariant: dropping a stream aborts its request, so an LLM object never computes for nobody.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from wicore_trt.config import load_settings
from wicore_trt.core.assemble import LoadedEngine, load_engine
from wicore_trt.core.prompts import IMAGE_LIMITS, ImageLimits, apply_turn_end, encode_request, prepare_images_now
from wicore_trt.core.text_output import SequenceText
from wicore_trt.errors import WicoreError, missing_package
from wicore_trt.images.files import take_images
from wicore_trt.types import (
    CacheHints,
    Completion,
    EngineStats,
    FinishReason,
    GenerateRequest,
    Prompt,
    SamplingParams,
    TextOutput,
    TextRequest,
    TokenOutput,
    pair_prompts,
    prompt_fields,
)


class LLM:
    """Loaded engine directory. Keyword arguments are settings by dotted path with `__` for the dot, e.g. `LLM(path,
    executor__threads=1, kv__device_bytes="2GiB")`. Raises EngineFormatError for an engine that cannot be loaded,
    ConfigError for a setting that is wrong, and EnvironmentUnfitError for an extra that is not installed."""

    def __init__(self, engine: str | Path, **settings: object) -> None:
        overrides = {name.replace("__", "."): value for name, value in settings.items()}
        try:
            given = load_settings(None, {"engine": str(engine), **overrides})
            self._take_engine(load_engine(given), ImageLimits(given.scheduler.max_images, given.server.image_hosts))
        except ModuleNotFoundError as error:
            raise missing_package(error.name) or error from error

    def _take_engine(self, loaded: LoadedEngine, images: ImageLimits | None = None) -> None:
        self._image_limits = images or IMAGE_LIMITS
        self.info = loaded.info
        self.tokenizer = loaded.tokenizer
        self._core = loaded.core
        self._ids = map("llm-{}".format, itertools.count())  # any thread may take the next one
        self._closed = False
        self._lock = threading.RLock()  # re-entrant: a stream collected during a step aborts its request
        self._inboxes: dict[str, deque[TokenOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheHints | None = None,
    ) -> list[list[Completion]]:
        """Complete prompts (text, or token ids) together; result[i][j] is sequence j of prompt i. A prompt {"prompt":
        text, "images": files' bytes or paths} has "<start_of_image>" at the place of each image. `params` are for all
        prompts, or a list with one for each. `cache` says how long each prompt's pages are worth keeping. Raises
        InvalidRequestError before anything runs when a prompt is wrong."""
        requests = [self._make_request(prompt, its, cache) for prompt, its in pair_prompts(prompts, params)]
        return self._complete_requests(requests)

    def stream(
        self,
        prompt: Prompt | Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        cache: CacheHints | None = None,
    ) -> Iterator[TextOutput]:
        """Yield the deltas of one prompt, or of the next turn of a conversation, as they are computed."""
        return self._run_requests([self._make_request(prompt, params, cache)], awaited=True)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        cache: CacheHints | None = None,
    ) -> list[Completion]:
        """Return `params.n` next turns of a conversation of {"role", "content"} turns, by the model's chat template. A
        content is text, or a list of parts {"type": "text", "text": ...} and {"type": "image", "image": bytes or path}
        (`images.files.take_images`)."""
        return self._complete_requests([self._make_request(messages, params, cache)])[0]

    def stats(self) -> EngineStats:
        with self._lock_engine():
            return self._core.stats()

    def close(self) -> None:
        """Free the engine's memory. Open streams fail."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make_request(
        self, prompt: Prompt | Sequence[Mapping[str, str]], params: SamplingParams | None, cache: CacheHints | None
    ) -> GenerateRequest:
        prompt, images = take_images(prompt)
        text = TextRequest(next(self._ids), params or SamplingParams(), cache=cache or CacheHints(), images=images)
        request = apply_turn_end(self.tokenizer, replace(text, **prompt_fields(prompt)))
        request = prepare_images_now(request, self.info, self._image_limits)
        with self._lock_engine():
            request = encode_request(self.tokenizer, request, self.info)
            made = GenerateRequest(
                request.request_id, request.prompt_token_ids or (), request.params, cache=request.cache,
                content=request.content,
            )  # fmt: skip
            self._core.validate_request(made)
            self._core.prepare_request(made)
            return made

    def _complete_requests(self, requests: list[GenerateRequest]) -> list[list[Completion]]:
        parts: dict[tuple[str, int], list[TextOutput]] = {}
        for output in self._run_requests(requests, awaited=False):
            parts.setdefault((output.request_id, output.index), []).append(output)
        return [[Completion.from_outputs(parts[r.request_key, i]) for i in range(r.params.n)] for r in requests]

    @contextmanager
    def _lock_engine(self) -> Iterator[None]:
        """Hold the engine for this thread alone. Raises WicoreError when it was closed."""
        with self._lock:
            if self._closed:
                raise WicoreError("This LLM was closed.", fix="Load the engine again.")
            yield

    def _run_requests(self, requests: list[GenerateRequest], *, awaited: bool) -> Iterator[TextOutput]:
        """Step the engine until `requests` end, at a reader's pace where their tokens are `awaited`. Outputs of other
        open streams wait in their inboxes."""
        texts = {
            (r.request_key, i): SequenceText(r.request_key, self.tokenizer, r.params)
            for r in requests
            for i in range(r.params.n)
        }
        open_texts = len(texts)
        inbox: deque[TokenOutput] = deque()
        try:
            with self._lock_engine():
                self._inboxes.update((r.request_key, inbox) for r in requests)
                for request in requests:
                    self._core.add(request)
            while open_texts:
                if not inbox:
                    with self._lock_engine():
                        if not inbox:  # another thread's step may have filled it meanwhile
                            self._core.set_pace(awaited=awaited)
                            for output in self._core.step():
                                self._inboxes[output.request_key].append(output)
                    continue
                output = inbox.popleft()
                if output.finish_reason is FinishReason.ERROR:
                    raise WicoreError(output.error or "The step failed.")
                key = (output.request_key, output.index)
                text = texts[key].push_output(output)
                if text is None:
                    continue
                if text.finish_reason is not None:
                    open_texts -= 1
                    if output.finish_reason is None:
                        with self._lock_engine():
                            self._core.abort(*key)  # a stop string ended it; the engine does not know
                yield text
        finally:
            with self._lock:
                for request in requests:
                    self._inboxes.pop(request.request_key, None)
                    if not self._closed:
                        self._core.abort(request.request_key)
                if not self._closed:
                    self._core.settle_flight()
