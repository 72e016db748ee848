"""The asyncio face of an engine: text requests in, streams of text out.

It must not know gRPC or HTTP, nor the engine's process. Invariants: an iterator from `submit` ends (with a finish
reason or an exception), or closing it aborts the request. A slow reader costs memory bounded by its own output. Request
ids, `abort_request` and `read_tenant_stats` see one tenant's requests alone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from wicore_trt.checks import check_count
from wicore_trt.core.limits import Hints
from wicore_trt.core.offload import Offload
from wicore_trt.core.port import EnginePort
from wicore_trt.core.prompts import IMAGE_LIMITS, ImageLimits, apply_turn_end, encode_request, is_short, prepare_images
from wicore_trt.core.text_output import SequenceText
from wicore_trt.core.times import Times
from wicore_trt.errors import (
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    UnavailableError,
    WicoreError,
    shown,
)
from wicore_trt.grammar.source import check_constraint
from wicore_trt.images.prepare import start_workers
from wicore_trt.text.images import (
    blank_image,
    fill_spans,
)
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import (
    Constraint,
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    TextOutput,
    TextRequest,
    TokenOutput,
    merge_outputs,
)

log = logging.getLogger(__name__)
TEXT_THREADS = 2
"""Threads that tokenize, beside the engine's: a text may take seconds."""
FETCHES = 8
"""Images that are fetched at a time."""
LATE_S = 2.0
"""An engine ends a request at the first step behind its time. One that takes longer than this seems to hang."""
_HANGS = "The request's time was over, and the engine did not end it."


class TextStream:
    """Async iterator over one request's outputs; unread ones are merged per sequence. `request_key` is its name on the
    engine and never used twice: a client may reuse `request_id` while the engine's last outputs are on their way."""

    def __init__(
        self, engine: TextEngine, request_key: str, request: TextRequest, tokenizer: Tokenizer, since: float = 0.0
    ) -> None:
        self.request_key = request_key
        self.request_id = request.request_id
        self.tenant = request.tenant
        self._engine = engine
        self._texts = [SequenceText(self.request_id, tokenizer, request.params) for _ in range(request.params.n)]
        self._since = since  # when the request came
        self._first = [0.0] * request.params.n  # stamps of each sequence's first tokens, 0 before them
        self._last = [0.0] * request.params.n
        self.unfinished = request.params.n
        """Sequences that have not ended."""
        self.parts: tuple[float, float] | None = None  # seconds of the first sequence: queued, prefill
        self.log_id = request.log_id
        self._pending: dict[int, list[TextOutput]] = {}
        self._error: WicoreError | None = None
        self._changed = asyncio.Event()
        self.prompt_token_ids: tuple[int, ...] = ()
        self.ends = None if request.timeout_s is None else time.monotonic() + request.timeout_s + LATE_S
        """Stamp from which on nobody waits for the engine."""
        self._longest = 0  # output tokens
        self._computes = False
        self.begun = asyncio.Event()  # set when the engine computes, or when the request ended before

    @property
    def finished(self) -> bool:
        return self._error is not None or not self.unfinished

    @property
    def admitted(self) -> bool:
        """Tell whether the engine has begun with the request, which has not failed."""
        return self._computes and self._error is None

    def push_output(self, output: TokenOutput) -> None:
        """Take a token output from the engine; on the event loop's thread."""
        self._computes = self._computes or output.finish_reason is None or bool(output.token_ids)
        self.begun.set()
        if output.finish_reason is FinishReason.ERROR:
            dead = self._engine.engine.part_of(self.request_key).dead
            if dead is None and self._texts[output.index].finished:
                return  # a stop string ended it before the engine knew
            self._engine.find_tally(self.tenant).finished[FinishReason.ERROR.value] += 1
            why, field = output.error or "The step failed.", output.field
            failed = WicoreError(why) if field is None else InvalidRequestError(why, field=field)
            if output.retry_s is not None:
                failed = self._engine.add_retry_hint(QueueFullError(why, retry_after_s=output.retry_s), self.tenant)
            self.fail_stream(EngineDeadError(f"The engine stopped: {dead}.") if dead else failed)
            return
        text = self._texts[output.index].push_output(output)
        if text is None or not (text.token_ids or text.finish_reason or text.prompt_logprobs):
            return
        tally = self._engine.find_tally(self.tenant)
        tally.generated += len(text.token_ids)
        if text.finish_reason is not None:
            self.unfinished -= 1
            tally.finished[text.finish_reason.value] += 1
            tally.cached += text.usage.cached_tokens if text.usage is not None else 0
            if output.finish_reason is None:  # a stop string ended it
                self._engine.engine.abort(self.request_key, output.index)
        self._observe_times(text, output.prefill_s)
        self._pending.setdefault(output.index, []).append(text)
        self._changed.set()

    def _observe_times(self, text: TextOutput, prefill_s: float | None) -> None:
        """Observe an output. Of the time to a sequence's first tokens, what is no prefill counts as waiting."""
        times, index, since_s = self._engine.times, text.index, self._engine.times.now - self._since
        if text.token_ids:
            if prefill_s is not None:
                queued_s = max(0.0, since_s - prefill_s)
                times.queue.observe(queued_s)
                times.prefill.observe(prefill_s)
                self.parts = self.parts or (queued_s, prefill_s)
            if self._last[index]:
                times.gap.observe(times.now - self._last[index])
            else:
                times.first.observe(since_s)
                self._first[index] = times.now
            self._last[index] = times.now
        if text.finish_reason is not None:
            times.whole.observe(since_s)
            if self._first[index]:
                times.decode.observe(self._last[index] - self._first[index])
            if text.usage is not None:
                times.prompt.observe(text.usage.prompt_tokens)
                times.generated.observe(text.usage.completion_tokens)
                self._longest = max(self._longest, text.usage.completion_tokens)
            if not self.unfinished:
                times.longest.observe(self._longest)

    def fail_stream(self, error: WicoreError) -> None:
        """End the stream with `error` and abort the request."""
        self._error = error
        self._engine.engine.abort(self.request_key)
        self._changed.set()
        self.begun.set()

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> TextOutput:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.finished:
                raise StopAsyncIteration
            self._changed.clear()
            try:
                async with asyncio.timeout_at(self.ends):
                    await self._changed.wait()
            except TimeoutError:
                self.fail_stream(DeadlineError(_HANGS))
        return merge_outputs(self._pending.pop(next(iter(self._pending))))

    async def aclose(self) -> None:
        self._engine.forget_stream(self)


@dataclass(slots=True)
class Tally:
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    finished: Counter[str] = field(default_factory=Counter)


class TextEngine:
    """Serves one engine on one event loop, where it is made and all methods run: tokenizes, submits, detokenizes, ends
    sequences at stop strings."""

    def __init__(
        self,
        engine: EnginePort,
        tokenizer: Tokenizer,
        info: ModelInfo,
        check_constraint: Callable[[Constraint], None] = check_constraint,
        images: ImageLimits = IMAGE_LIMITS,
    ) -> None:
        """`check_constraint` raises InvalidRequestError for an unfit constraint; it is called on a thread."""
        self._image_limits, self._fetch = images, Offload(FETCHES).run_function
        self._prepare = Offload(TEXT_THREADS).run_function  # apart: a large picture takes seconds, and no text waits
        self.tokenizer = tokenizer
        self._check_constraint = check_constraint
        self.info = info
        self.draining = False
        self.engine = engine
        self.times = Times()
        self._streams: dict[str, TextStream] = {}  # by key
        self._keys: dict[tuple[str, str], str] = {}  # (tenant, request id) -> key
        self._unread: dict[tuple[str, str], bool] = {}  # of requests whose prompts are being read: whether aborted
        self._tallies: dict[str, Tally] = {}
        self.work = Offload(TEXT_THREADS).run_function
        """Runs a function that takes time in proportion to what a client sent, on a thread; tenants come in turn."""
        self._serial = itertools.count()
        self._hints = Hints()
        self._idle = asyncio.Event()
        self._idle.set()
        self._started = False

    @property
    def ready(self) -> bool:
        return self._started and not self.draining and self.engine.dead is None

    @property
    def dead(self) -> str | None:
        """Return why the engine takes no requests; None unless it broke."""
        return self.engine.dead

    async def start(self) -> None:
        await self.engine.start(self._deliver_outputs)
        if self.info.images is not None:
            start_workers()
        self._started = True

    async def prepare_images(self, request: TextRequest) -> TextRequest:
        """Fetch and decode a request's images on threads, one after another. Raises InvalidRequestError."""
        return await prepare_images(request, self.info, self._image_limits, self._fetch, self._prepare)

    async def _encode_pictured(self, request: TextRequest) -> TextRequest:
        """Encode a prompt while its images are prepared, unless their number, with crops, decides about its text."""
        encode = partial(encode_request, self.tokenizer, info=self.info)
        if self.info.images is None or any(image.crops or image.pixels for image in request.images):
            return await self.work(request.tenant, partial(encode, await self.prepare_images(request)))
        early = replace(request, images=tuple(map(blank_image, request.images)))
        pictures = asyncio.ensure_future(self.prepare_images(request))
        text = asyncio.ensure_future(self.work(request.tenant, partial(encode, early)))
        try:
            seen, encoded = await asyncio.gather(pictures, text)
        finally:
            pictures.cancel()
            text.cancel()
            del pictures, text  # they hold an error that holds this frame: a circle, which would keep the request
        return replace(encoded, content=fill_spans(encoded.content, seen.images))

    async def encode_long_prompt(self, request: TextRequest) -> TextRequest:
        """Check the constraint, prepare images and tokenize a long text, all on threads; `submit` comes next. Raises
        InvalidRequestError, and DeadlineError when the request's time passes meanwhile."""
        started, constraint = time.monotonic(), request.params.constraint
        request = apply_turn_end(self.tokenizer, request)
        short = not request.images and (request.prompt_token_ids is not None or is_short(self.tokenizer, request))
        if short and constraint is None:
            return request
        name = (request.tenant, request.request_id)
        self._unread.setdefault(name, False)
        try:
            async with asyncio.timeout(request.timeout_s):
                if constraint is not None:
                    await self.work(request.tenant, partial(self._check_constraint, constraint))
                if request.images:
                    request = await self._encode_pictured(request)
                elif not short:
                    request = await self.work(
                        request.tenant, partial(encode_request, self.tokenizer, request, self.info)
                    )
        except BaseException as error:
            self._unread.pop(name, None)
            if not isinstance(error, TimeoutError):
                raise
            error.__traceback__ = None  # it leads to this task, which holds the next error: a circle with the request
            raise DeadlineError("The request's time was over before its prompt was read.") from None
        if request.timeout_s is None:
            return request
        left = request.timeout_s - (time.monotonic() - started)
        return replace(request, timeout_s=max(left, 1e-3))  # the engine ends it

    def add_retry_hint(self, error: QueueFullError, tenant: str) -> QueueFullError:
        """Set the refusal's time to retry and return it."""
        error.retry_after_s = self._hints.retry_s(tenant, time.monotonic(), error.retry_after_s, error.pace_s)
        return error

    async def submit(self, request: TextRequest) -> TextStream:
        """Queue a request and return its stream. Tokenizes here, so pass long texts through `encode_long_prompt` first.
        Raises InvalidRequestError, QueueFullError, UnavailableError (starting or draining) or EngineDeadError; the
        stream raises EngineDeadError when the engine breaks later."""
        since, name = time.monotonic(), (request.tenant, request.request_id)
        aborted = self._unread.pop(name, False)
        if self.draining or not self._started:
            raise UnavailableError("The server is draining." if self.draining else "The engine has not started.")
        if name in self._keys:
            raise InvalidRequestError(f"Request id {shown(request.request_id)} is in use.", field="request_id")
        request = encode_request(self.tokenizer, request, self.info)
        assert request.prompt_token_ids is not None
        token_ids = request.prompt_token_ids
        deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        key = f"{self.engine.choose_prefix(request)}{next(self._serial)}"
        stream = TextStream(self, key, request, self.tokenizer, since)
        stream.prompt_token_ids = token_ids
        self._streams[stream.request_key] = stream
        self._keys[name] = stream.request_key
        self._idle.clear()
        made = GenerateRequest(
            request_key=stream.request_key, prompt_token_ids=token_ids, params=request.params, deadline=deadline,
            priority=request.priority, tenant=request.tenant, cache_salt=request.cache_salt,
            cache=request.cache, log_id=request.log_id, content=request.content,
        )  # fmt: skip
        try:
            async with asyncio.timeout_at(stream.ends):
                await self.engine.add(made)
        except TimeoutError:
            self.forget_stream(stream)
            raise DeadlineError(_HANGS) from None
        except BaseException as error:  # refused, or the caller was cancelled
            self.forget_stream(stream, refused=not isinstance(error, asyncio.CancelledError))
            if isinstance(error, QueueFullError):
                self.add_retry_hint(error, request.tenant)
            raise
        self.find_tally(request.tenant).prompt += len(token_ids) * request.params.n
        if aborted:
            self.engine.abort(key)
        return stream

    def find_tally(self, tenant: str) -> Tally:
        return self._tallies.setdefault(tenant, Tally())

    def abort_request(self, request_id: str, tenant: str = "") -> bool:
        """Cancel a tenant's request, one whose prompt is being read once it is read; return False if it is not live."""
        name = (tenant, request_id)
        if (key := self._keys.get(name)) is not None:
            self.engine.abort(key)
        elif name in self._unread:
            self._unread[name] = True
        return key is not None or name in self._unread

    def forget_stream(self, stream: TextStream, *, refused: bool = False) -> None:
        """Drop a stream that its reader closed or that was refused; abort it if it still runs."""
        if stream.request_key in self._streams:
            if not refused:
                self.find_tally(stream.tenant).finished[FinishReason.CANCELLED.value] += stream.unfinished
            self.engine.abort(stream.request_key)
            self._remove_stream(stream)

    @property
    def live(self) -> int:
        return len(self._streams)

    def count_finished(self) -> Counter[str]:
        return sum((tally.finished for tally in self._tallies.values()), Counter())

    async def decode_ids(self, ids: Sequence[int], tenant: str, field: str, *, skip_special: bool) -> str:
        """Decode token ids on a thread. Raises InvalidRequestError (`field`) for too many or unknown ones."""
        check_count(ids, self.info.max_context_tokens, field)
        if (worst := max(ids, default=0)) >= self.info.vocab_size:
            why = f"Token id {worst} is outside the vocabulary of {self.info.vocab_size}."
            raise InvalidRequestError(why, field=field)
        return await self.work(tenant, partial(self.tokenizer.decode, ids, skip_special=skip_special))

    async def read_tenant_stats(self, tenant: str, part: EnginePort | None = None) -> EngineStats:
        """Read the counts of one tenant's requests, and the load of one replica or all; counters of no single tenant
        keep their defaults."""
        found, tally = await (part or self.engine).stats(tenant), self.find_tally(tenant)
        return replace(
            found,
            requests_finished=dict(tally.finished),
            prompt_tokens=tally.prompt,
            cached_prompt_tokens=tally.cached,
            generated_tokens=tally.generated,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for the running ones, cancel the rest; return whether none was cancelled."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            return True
        except TimeoutError:
            for key in list(self._streams):
                self.engine.abort(key)
            await self._idle.wait()
            return False

    async def close(self, timeout_s: float = 5.0) -> None:
        """Cancel everything and end the engine; a step that hangs longer than `timeout_s` seconds is abandoned."""
        self.draining = True
        await self.engine.stop(timeout_s)

    def _deliver_outputs(self, outputs: list[TokenOutput]) -> None:
        self.times.now = time.monotonic()
        for output in outputs:
            stream = self._streams.get(output.request_key)
            if stream is None:
                continue
            try:
                stream.push_output(output)
            except Exception:  # a bug of ours; it must not cost the other streams their outputs
                log.exception("the text of a request failed", extra={"facts": {"id": stream.log_id}})
                stream.fail_stream(WicoreError("The output could not be turned into text; the server's log has it."))
            if stream.finished:
                self._remove_stream(stream)

    def _remove_stream(self, stream: TextStream) -> None:
        del self._streams[stream.request_key], self._keys[stream.tenant, stream.request_id]
        if not self._streams:
            self._idle.set()
