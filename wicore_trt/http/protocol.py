"""Add to uvicorn's protocols the limits that they lack.

Must not know applications. Invariants: a connection ends whose head or WebSocket message is late or too long; bytes
of incomplete messages are counted; a reader that takes nothing for STALL_S is cut off; connections are limited to
MAX_CONNECTIONS, and by address; bytes that are no HTTP get an error of the common shape; a client that still sends
can read why it is refused.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from types import SimpleNamespace
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame

from wicore_trt.access.calls import REQUEST_ID_HEADER, find_network
from wicore_trt.errors import WicoreError
from wicore_trt.http.errors import HttpError, error_bytes
from wicore_trt.http.intake import READ_S, BodyShare

HEAD_S = 20.0
"""A request line and its headers that have not come by then are given up."""
MAX_HEAD = 64 << 10
"""Bytes of a request line and its headers."""
MAX_HEADERS = 256
STALL_S = 120.0
"""Seconds for which a client may take nothing of what waits for it."""
LINGER_S, LINGER_BYTES = 10.0, 32 << 20
"""Seconds and bytes for which the rest of a refused client's message is read and dropped. A socket that is closed with
unread bytes resets the connection, and the refusal is lost."""
MAX_CONNECTIONS = 4096
MAX_OF_ADDRESS = 3072
"""Connections of one address: three quarters, as a proxy in front is one."""
MAX_PIPELINED = 16
"""Requests that a client sends on one connection before it has the answers; no library does that."""
MAX_FRAGMENTS = 1024
"""Frames of one WebSocket message."""
NOT_HTTP = HttpError(400, "The request is not valid HTTP.")
TOO_LONG = HttpError(431, "The request line or the headers are too long.")
MESSAGE_BYTES = 512
"""Cost of a WebSocket message that waits, beside its bytes."""


class Visitors(ServerState):
    """State that all connections of a server share, with the number of connections of each address."""

    def __init__(self) -> None:
        super().__init__()
        self.shaking = 0  # connections that shake hands
        self._open = Counter[str]()

    def admit_connection(self, client: tuple[str, int] | None) -> bool:
        """Count a connection of this client; return True if there is room. `drop_connection` is called in any case."""
        host = self._name_host(client)
        self._open[host] += 1
        return len(self.connections) + self.shaking <= MAX_CONNECTIONS and (
            not host or self._open[host] <= MAX_OF_ADDRESS
        )

    def drop_connection(self, client: tuple[str, int] | None) -> None:
        host = self._name_host(client)
        self._open[host] -= 1
        if not self._open[host]:
            del self._open[host]

    @staticmethod
    def _name_host(client: tuple[str, int] | None) -> str:
        """Name the host or network behind a connection, "" on a Unix socket."""
        return client[0] and (find_network(client[0]) or client[0]) if client else ""


class GuardedHttp(HttpToolsProtocol):
    server_state: Visitors

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._late: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._in_head, self._head, self._size = True, 0, 0
        self._running: RequestResponseCycle | None = None
        self._drops, self._dropped = False, 0  # whether nothing that comes is parsed any more, and bytes of that
        self._stays: bytes | None = None  # the first line of a request that offers a protocol which is not spoken here
        self._refusal = NOT_HTTP
        super().connection_made(transport)
        # The connection as its requests see it: `write` and `close` are the protocol's own.
        self._outlet = SimpleNamespace(write=self._write, is_closing=transport.is_closing, close=self._close_gently)
        if not self.server_state.admit_connection(self.client):
            transport.abort()
            return
        self._late = self.loop.call_later(HEAD_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer("_late")
        self._cancel_timer("_stalled")
        self._tell_gone()
        self.server_state.drop_connection(self.client)
        # what holds no request, nor is held by one in a circle
        self._outlet.write, self._outlet.close = _discard, self.transport.close
        super().connection_lost(exc)

    def cut_off(self) -> None:
        """Abort the connection; bytes on their way to the client are lost."""
        self._tell_gone()
        self.transport.abort()

    def _tell_gone(self) -> None:
        """Tell the request being answered that its client has left. uvicorn tells the newest one on the connection,
        which may wait behind it."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _give_up(self) -> None:
        """End a connection whose next head is late, unless the client waits for an answer."""
        self._late = None
        if self._running is not None and not self._running.response_complete:
            self._late = self.loop.call_later(HEAD_S, self._give_up)
        else:
            self.cut_off()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += len(data)
            if self._late is None:
                self._late = self.loop.call_later(HEAD_S, self._give_up)
        if self._drops:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.cut_off()
            return
        self._unset_keepalive_if_required()
        self._parse_bytes(data)
        if self._in_head and self._head > MAX_HEAD and not self.transport.is_closing():
            self._refusal = TOO_LONG
            self.send_400_response("")

    def _parse_bytes(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            if self._stays is not None:
                # The offer of another protocol (h2c) is ignored, as RFC 9110, 7.8 allows. The parser leaves out bodies
                # of such requests, so another parser gets the head without the offer.
                head = [self._stays, *(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")]
                self._stays, self.parser = None, HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._parse_bytes(b"".join((*head, b"\r\n", data[upgrade.args[0] :])))
            elif self._should_upgrade():
                self.handle_websocket_upgrade()
        except HttpParserError:
            self.send_400_response("")

    def _write(self, data: bytes) -> None:
        """Write what a request says, unless the connection has ended already: by a refusal, or a moment ago."""
        if not (self._drops or self.transport.is_closing()):
            self.transport.write(data)

    def _close_gently(self) -> None:
        """End the connection when its output is written and the client has sent what it began."""
        if self._running is not None and self._running.more_body:
            self._drop_rest()
        else:
            self._cancel_timer("_late")
            self._late = self.loop.call_later(STALL_S, self.cut_off)
            self.transport.close()

    def _drop_rest(self) -> None:
        self._drops = True
        self._cancel_timer("_late")
        self._late = self.loop.call_later(LINGER_S, self.cut_off)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def on_response_complete(self) -> None:
        if not self._drops:
            super().on_response_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value)
        if len(self.url) + self._size > MAX_HEAD or (self._in_head and len(self.headers) >= MAX_HEADERS):
            self._refusal = TOO_LONG
            raise ValueError("too long a head")  # the parser then gives up with an error of its own
        if self._in_head:  # no trailer, which comes behind what its request may do
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._head = False, 0
        if len(self.url) > MAX_HEAD:
            self._refusal = TOO_LONG
            raise ValueError("too long a URL")
        self._cancel_timer("_late")
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT" and not self._should_upgrade():
            self._stays = b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())
            return
        former = self.cycle
        super().on_headers_complete()
        if self.cycle is not former:
            self.cycle.transport = self._outlet  # type: ignore[assignment]
        if len(self.pipeline) > MAX_PIPELINED:
            self.cut_off()
            raise ValueError("too many requests at once")

    def on_message_complete(self) -> None:
        self._in_head, self._size = True, 0
        if self._stays is None:
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(STALL_S, self.cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_timer("_stalled")

    def handle_websocket_upgrade(self) -> None:
        self._cancel_timer("_late")
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        if self.transport.is_closing() or self._drops:
            return
        self._tell_gone()
        self.transport.write(_encode_refusal(self._refusal))
        self._drop_rest()

    def _cancel_timer(self, name: str) -> None:
        timer: asyncio.TimerHandle | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)


def _discard(data: bytes) -> None:
    pass


def _encode_refusal(error: HttpError) -> bytes:
    body = error_bytes(error)
    fields = (
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"%b: %b" % (REQUEST_ID_HEADER.encode(), uuid.uuid4().hex.encode()),
        b"connection: close",
    )
    return STATUS_LINE[error.status] + b"\r\n".join(fields) + b"\r\n\r\n" + body


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """Connection that has become a WebSocket.
    Its application puts the counter of message bytes into scope["state"]["hold"]; nothing is read until it asks for
    the first message."""

    def __init__(self, config: Config, server_state: Visitors, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self._visitors = server_state
        self._late: asyncio.TimerHandle | None = None
        self._queued = 0  # bytes of messages that have come whole, and what they cost

    def connection_lost(self, exc: Exception | None) -> None:
        self._visitors.drop_connection(self.client)
        super().connection_lost(exc)
        self.conn.receive_eof()  # its parser, which waits inside of a frame, would hold all that came of it
        self.conn.parser.close()
        self._drop_message()
        self._on_time()

    def cut_off(self) -> None:
        self.transport.abort()

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._fit_budget(len(data))
        super().data_received(data)
        if self.conn.handshake_exc is not None:  # uvicorn does not look at it, and would never answer
            self.transport.write(
                _encode_refusal(HttpError(400, f"This opens no WebSocket: {self.conn.handshake_exc}."))
            )
            self.transport.close()
        if self.close_sent or self.transport.is_closing():
            self._drop_message()
            return
        self._fit_budget()
        if not self._count_partial() and not self.frames:
            self._on_time()
        elif self._late is None:
            self._late = self.loop.call_later(READ_S, self._give_up)

    async def receive(self) -> Any:
        message = await super().receive()
        if self.queue.empty():
            self._queued = 0
            self._fit_budget()
        return message

    def _count_partial(self) -> int:
        """Count the bytes of a message that has not come whole."""
        return len(self.conn.reader.buffer) + sum(map(len, self.frames))

    def _fit_budget(self, more: int = 0) -> None:
        """Reserve memory for received bytes and `more`, or end the connection."""
        taking = self.handshake_complete and not self.close_sent
        hold: BodyShare | None = self.scope["state"].get("hold") if taking else None
        try:
            if hold is not None:
                hold.fit_to(self._count_partial() + self._queued + more)
        except WicoreError as error:
            self._end_connection(1013, error.message)

    def _give_up(self) -> None:
        """End a connection whose message is late, unless nothing is being read."""
        self._late = None
        if self.read_paused or not self.writable.is_set():
            self._late = self.loop.call_later(READ_S, self._give_up)
        else:
            self._end_connection(1008, f"a message did not come within {READ_S:g} s")

    def _end_connection(self, code: int, why: str) -> None:
        if not self.close_sent:
            self.conn.fail(code, why)
            self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        super().handle_parser_exception()
        self._drop_message()

    def _drop_message(self) -> None:
        """Forget an incomplete message when the connection closes, and cut off a client that reads nothing."""
        self.conn.reader.discard()
        self.frames = []
        self._on_time()
        self._late = self.loop.call_later(LINGER_S, self.cut_off)

    def _on_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    async def send(self, message: Any) -> None:
        """Send a message. Raises ClientDisconnected also where uvicorn has closed the connection."""
        await self.writable.wait()
        if self.close_sent:
            raise ClientDisconnected
        await super().send(message)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()  # a client that reads nothing gets no more answers to its pings either

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()  # closing would wait until the client has read everything

    def send_receive_event_to_app(self) -> None:
        """End the connection for a text that is not UTF-8, without the traceback that uvicorn logs for it."""
        self._on_time()
        self._queued += sum(map(len, self.frames)) + MESSAGE_BYTES
        try:
            if self.curr_msg_data_type == "text":
                b"".join(self.frames).decode()
        except UnicodeDecodeError:
            self._end_connection(1007, "")
            return
        super().send_receive_event_to_app()

    def handle_cont(self, event: Frame) -> Any:
        if len(self.frames) >= MAX_FRAGMENTS:
            self._end_connection(1009, "too many fragments")
        else:
            super().handle_cont(event)
