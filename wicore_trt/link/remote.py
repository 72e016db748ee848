"""The front's end of a link: an engine in another process, which may end and come back.

Must not know text, transports or how processes are started. Invariants (I13): every request that `add` took gets its
final output, an error when its engine ends; a waiting `add` ends with its engine; no engine gets what another was sent.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncGenerator, Callable

from wicore_trt.core.port import Change, EnginePort, Position, Sink
from wicore_trt.errors import EngineDeadError, UnavailableError, WicoreError
from wicore_trt.link import messages
from wicore_trt.link.channel import Channel
from wicore_trt.types import EngineStats, FinishReason, GenerateRequest, ModelInfo, TokenOutput

MOST_FILE_BYTES = 256 << 20
"""Bytes of pixels that wait for the engine; requests that were given up leave theirs until it reads again."""
STATS_S = 5.0
"""Seconds that an engine may take to tell its statistics, which it does beside its steps."""
STARTING = "it is being started"
ENDED = "its process ended"


class RemoteEngine(EnginePort):
    """Engine of another process, one at a time. `changed` is called on the event loop when one comes or ends."""

    dead: str | None = STARTING

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.info: ModelInfo | None = None
        self._changed = changed
        self._sink: Sink = lambda outputs: None
        self.channel: Channel | None = None
        """Channel to an engine, which may not have sent anything yet."""
        self._calls = itertools.count()
        self._pending: dict[int, tuple[asyncio.Future[messages.Done], str]] = {}  # with the key of a request to add
        self._followers: dict[int, asyncio.Queue[messages.KVChanges | WicoreError]] = {}
        self._live: dict[str, int] = {}  # sequences that have not ended, by request

    @property
    def sequences(self) -> int:
        """Return how many sequences have not ended."""
        return sum(self._live.values())

    async def start(self, sink: Sink) -> None:
        self._sink = sink

    def connect(self, sock: socket.socket) -> None:
        """Connect to the engine at the other end of this socket, which takes requests once its Welcome has come."""
        if self.channel is not None:
            self.channel.close()
        self.channel = Channel(sock, asyncio.get_running_loop(), self._take_message, self._end_channel)

    async def add(self, request: GenerateRequest) -> None:
        name, channel = request.request_key, self._require_channel()
        if request.content and channel.file_bytes > MOST_FILE_BYTES:
            raise UnavailableError("The engine takes no images now: others wait for it.", fix="Try again soon.")
        self._live[name] = request.params.n
        try:
            await self._ask_engine(lambda call: messages.encode_request(call, request), name)
        except BaseException as error:
            self._live.pop(name, None)
            if isinstance(error, OSError):
                raise UnavailableError(f"Images cannot be passed on now: {error}.", fix="Try again soon.") from None
            raise

    def abort(self, request_key: str, index: int | None = None) -> None:
        if self.channel is not None and request_key.startswith(self.prefix):
            self.channel.post(messages.encode(messages.Abort(request_key, index)))

    async def stats(self, tenant: str | None = None) -> EngineStats:
        try:
            async with asyncio.timeout(STATS_S):
                done = await self._ask_engine(lambda call: (messages.encode(messages.AskStats(call, tenant)), -1))
        except TimeoutError:
            raise UnavailableError("The engine does not tell its statistics.", fix="Try again soon.") from None
        assert done.stats is not None
        return done.stats

    async def kv_events(self, tenant: str | None, after: Position) -> AsyncGenerator[Change, None]:
        channel, call = self._require_channel(), next(self._calls)
        parts = self._followers[call] = asyncio.Queue()
        channel.post(messages.encode(messages.Follow(call, tenant, *after)))
        try:
            while True:
                found: list[messages.KVChanges] = []
                while not found or not found[-1].last:
                    part = await parts.get()
                    if isinstance(part, WicoreError):
                        raise part
                    found.append(part)
                yield messages.join_change(found)
                channel.post(messages.encode(messages.More(call)))
        finally:
            self._followers.pop(call, None)
            channel.post(messages.encode(messages.Unfollow(call)))

    async def stop(self, timeout_s: float) -> None:
        """Leave the engine, which runs on without this front's requests."""
        if self.channel is not None:
            self.channel.close()

    def leave_engine(self, why: str) -> None:
        """Leave an engine that answers no more, before its link breaks."""
        if self.channel is not None:
            self.channel.read_sent()
        if self.channel is not None:
            self.dead = why if self.dead in (None, STARTING) else self.dead  # it may have said more
            self.channel.close()

    def _require_channel(self) -> Channel:
        if self.channel is None or self.dead is not None:
            raise UnavailableError(f"The engine takes no requests now: {self.dead}.", fix="Try again soon.")
        return self.channel

    async def _ask_engine(self, make: Callable[[int], tuple[bytes, int]], request_key: str = "") -> messages.Done:
        channel, call = self._require_channel(), next(self._calls)
        reply: asyncio.Future[messages.Done] = asyncio.get_running_loop().create_future()
        self._pending[call] = reply, request_key
        try:
            channel.post(*make(call))
            return await reply
        finally:
            self._pending.pop(call, None)
            del reply  # breaks a cycle: its error has this frame in the traceback

    def _take_message(self, data: memoryview, file: int) -> None:
        message = messages.decode_from_engine(data)
        match message:
            case messages.Outputs():
                for output in [output for output in message.outputs if output.finish_reason is not None]:
                    left = self._live.get(output.request_key, 0) - 1
                    # an error without usage is the whole request's
                    if left > 0 and (output.usage is not None or output.finish_reason is not FinishReason.ERROR):
                        self._live[output.request_key] = left
                    else:
                        self._live.pop(output.request_key, None)
                self._sink(message.outputs)
            case messages.Done():
                found = self._pending.get(message.call)
                if found is not None and not found[0].done():
                    found[0].set_result(message)
            case messages.Refused():
                self._take_refusal(message.call, message.to_error())
            case messages.KVChanges():
                if message.call in self._followers:
                    self._followers[message.call].put_nowait(message)
            case messages.Down():
                self.dead = message.why
                self._changed()
            case messages.Welcome():
                self.info, self.prefix, self.pid, self.dead = message.info, message.prefix, message.pid, None
                self._changed()

    def _take_refusal(self, call: int, error: WicoreError) -> None:
        found = self._pending.get(call)
        if found is not None and not found[0].done():
            found[0].set_exception(error)
            self._live.pop(found[1], None)  # `add` raises the error, so no output reports it
        elif call in self._followers:
            self._followers[call].put_nowait(error)

    def _end_channel(self) -> None:
        """Fail all that waits for the engine: calls, followers and live requests."""
        self.channel, self.pid, self.dead = None, None, self.dead or ENDED
        error = EngineDeadError(f"The engine stopped: {self.dead}.")
        for call in (*self._pending, *self._followers):
            self._take_refusal(call, error)
        live, self._live = self._live, {}
        self._sink([TokenOutput(name, 0, (), finish_reason=FinishReason.ERROR, error=str(error)) for name in live])
        self._changed()
