"""Way into a server, gRPC or HTTP: its engine, and the generations of its calls, to the last output.

Must not know shapes of answers, bodies or messages. Invariants: `idle` is set exactly while no generation is open;
`aclose` closes everything opened on the engine, however the call ends; the engine never waits for a reader; the call's
facts count what has been sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from wicore_trt.access.admission import Admission, Grant
from wicore_trt.access.calls import Call
from wicore_trt.errors import DeadlineError, RequestCancelledError, UnavailableError
from wicore_trt.grammar.source import UNENFORCED
from wicore_trt.types import Completion, FinishReason, TextOutput, TextRequest

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine, TextStream

_CUT = {
    FinishReason.DEADLINE: (DeadlineError, "The request's time was over before it finished."),
    FinishReason.CANCELLED: (RequestCancelledError, "The request was cancelled."),
}


def _make_set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(eq=False)
class EntryState:
    """State of one way into the server, gRPC or HTTP. The engine is attached when it is ready; while `draining`, new
    generations are refused. `open` counts generations by tenant, and `idle` is set while there is none."""

    loading_fix: ClassVar[str]
    """Advice to a client that comes before the engine."""
    admission: Admission
    engine: TextEngine | None = field(default=None, init=False)
    draining: bool = field(default=False, init=False)
    open: Counter[str] = field(default_factory=Counter, init=False)
    idle: asyncio.Event = field(default_factory=_make_set_event, init=False)

    def require_engine(self) -> TextEngine:
        """Return the engine. Raises UnavailableError while it is loading."""
        if self.engine is None:
            raise UnavailableError("The engine is still loading.", fix=self.loading_fix)
        return self.engine

    def require_serving(self) -> TextEngine:
        """Return the engine for a new generation. Raises UnavailableError when the server starts or ends."""
        if self.draining:
            raise UnavailableError("The server is shutting down.", fix="Send the request to another server.")
        return self.require_engine()

    @contextmanager
    def count_generation(self, tenant: str) -> Iterator[TextEngine]:
        """Yield the engine to a generation. Raises UnavailableError as `require_serving` does."""
        engine = self.require_serving()
        self.open[tenant] += 1
        self.idle.clear()
        try:
            yield engine
        finally:
            self.open[tenant] -= 1
            if not self.open[tenant]:
                del self.open[tenant]
            if not self.open:
                self.idle.set()


@dataclass(slots=True)
class Totals:
    """Token counts of a call: each prompt once, the outputs of all sequences. `cached` is of the prompts."""

    prompt: int = 0
    output: int = 0
    cached: int = 0
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    """The token ids of each sequence's prompt, where they are counted first."""


@dataclass(slots=True)
class GenerationCall:
    """Requests of a call on the engine, and their outputs. Sequence `i` of request `r` has index r * n + i.
    `aclose` aborts running requests and settles the account."""

    call: Call
    streams: Sequence[TextStream]
    n: int
    grant: Grant
    totals: Totals
    aclose: Callable[[], Awaitable[None]]
    reasons: set[FinishReason] = field(default_factory=set)
    """Reasons for which sequences have ended."""

    @classmethod
    async def submit_requests(cls, entry: EntryState, call: Call, requests: Sequence[TextRequest]) -> GenerationCall:
        """Submit the requests, all or none; `totals` has the prompts' tokens afterwards. Raises the errors of
        `TextEngine.submit`, and RateLimitError."""
        n, totals = requests[0].params.n, Totals()
        streams: list[TextStream] = []
        async with AsyncExitStack() as resources:
            engine = resources.enter_context(entry.count_generation(call.who.tenant))
            grant = resources.enter_context(entry.admission.reserve_tokens(call.who, requests, engine.info.images))
            for request in requests:
                request = call.note_request(engine.info.model_id, request)
                if (asked := request.params.constraint) is not None and UNENFORCED.search(asked.text):
                    call.facts["schema_left_out"] = "uniqueItems"
                request = await engine.encode_long_prompt(request)
                stream = await engine.submit(request)
                resources.push_async_callback(stream.aclose)
                streams.append(stream)
                totals.prompt += len(stream.prompt_token_ids)
                totals.prompts += [stream.prompt_token_ids] * n
            grant.used += totals.prompt
            call.facts |= {"prompt": totals.prompt, "cached": 0, "tokens": 0}
            return cls(call, streams, n, grant, totals, resources.pop_all().aclose)
        raise AssertionError("unreachable")

    async def wait_admitted(self) -> bool:
        """Wait until the engine has begun with one of the requests; return False where one has failed before."""
        if len(self.streams) == 1:
            await self.streams[0].begun.wait()
            return self.streams[0].admitted
        waits = [asyncio.ensure_future(stream.begun.wait()) for stream in self.streams]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return all(stream.admitted for stream in self.streams if stream.begun.is_set())

    async def stream_outputs(self, *, allow_cut: bool = False) -> AsyncIterator[tuple[int, TextOutput]]:
        """Yield (index, output) as they come, and count them. Raises the error that broke the requests, and unless
        `allow_cut` one for a sequence that was cut off: deadline, cancelled."""
        call, totals = self.call, self.totals
        async for number, output in self._merge_streams():
            if output.token_ids and not totals.output:
                call.note_first_token(self.streams[number].parts)
            totals.output += len(output.token_ids)
            self.grant.used += len(output.token_ids)
            call.facts["tokens"] = totals.output
            if output.finish_reason is not None:
                self.reasons.add(output.finish_reason)
                call.facts["finish"] = ",".join(sorted(reason.value for reason in self.reasons))
                if output.usage is not None and output.index == 0:
                    totals.cached += output.usage.cached_tokens
                    call.facts["cached"] = totals.cached
                if output.finish_reason in _CUT and not allow_cut:
                    kind, message = _CUT[output.finish_reason]
                    raise kind(message)  # a new one: an error keeps the frames that it passed, with their requests
            yield number * self.n + output.index, output

    async def collect_completions(self) -> list[Completion]:
        """Collect all sequences when they have ended, by index. Raises as `stream_outputs`."""
        parts: dict[int, list[TextOutput]] = {}
        async for index, output in self.stream_outputs():
            parts.setdefault(index, []).append(output)
        return [Completion.from_outputs(parts[index]) for index in sorted(parts)]

    async def _merge_streams(self) -> AsyncIterator[tuple[int, TextOutput]]:
        """Yield (number of the request, output); of several streams each has at most one output waiting."""
        if len(self.streams) == 1:
            async for output in self.streams[0]:
                yield 0, output
            return
        waiting: dict[asyncio.Task[TextOutput], int] = {}
        done: asyncio.Queue[asyncio.Task[TextOutput]] = asyncio.Queue()  # asyncio.wait looks at all of them each time

        def ask(number: int) -> None:
            task = asyncio.ensure_future(anext(self.streams[number]))
            waiting[task] = number
            task.add_done_callback(done.put_nowait)

        try:
            for number in range(len(self.streams)):
                ask(number)
            while waiting:
                task = await done.get()
                number = waiting.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                ask(number)
                yield number, output
        finally:
            for task in waiting:
                task.cancel()
