"""The engine's end of links: an EngineLoop that serves fronts in other processes.

The link thread reads the fronts' messages. The engine's thread sends each front the outputs of a step as one message;
refusals, aborts and beginnings have messages of their own. It must not know text, clients or processes. Invariants: a
front delays steps only by the cost of reading its messages; a front that leaves takes only its own requests with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import threading
from concurrent.futures import Future

from wicore_trt.core.loop import Core, EngineLoop
from wicore_trt.core.port import follow_feed
from wicore_trt.errors import InvalidRequestError, WicoreError
from wicore_trt.link import messages
from wicore_trt.link.channel import Channel
from wicore_trt.types import ModelInfo, TokenOutput

log = logging.getLogger(__name__)

SNAPSHOT_BACKLOG = 4 << 20
"""Bytes of a snapshot that wait for the front before more of it is made."""


class EngineHost:
    """Runs `core` for the attached fronts."""

    def __init__(self, core: Core, info: ModelInfo, *, max_waiting: int) -> None:
        self.core = core
        self.loop = asyncio.new_event_loop()  # the link thread's
        self._info = info
        self.engine = EngineLoop(core, self._send_outputs, max_waiting=max_waiting)
        core.began = self._send_outputs
        self.links: dict[str, _Link] = {}
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._run_loop, name="wicore-link", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.engine.start()

    def attach(self, sock: socket.socket) -> None:
        """Serve the front at the other end of this socket."""
        done: Future[None] = Future()

        def begin() -> None:
            prefix = f"{next(self._numbers)}/"
            link = self.links[prefix] = _Link(self, prefix, sock)
            link.send_message(messages.Welcome(prefix, self._info, os.getpid()))
            done.set_result(None)

        self.loop.call_soon_threadsafe(begin)
        done.result()

    def stop(self, timeout_s: float) -> None:
        """Cancel live requests, tell the fronts, end the engine; wait `timeout_s` seconds for each thread at most."""
        self.engine.stop(timeout_s)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _send_outputs(self, outputs: list[TokenOutput]) -> None:
        """Send each front its outputs as one message; on the engine's thread."""
        if self.engine.dead is not None:
            for link in list(self.links.values()):
                link.send_message(messages.Down(self.engine.dead))
        batches: dict[str, list[TokenOutput]] = {}
        for output in outputs:
            batches.setdefault(output.request_key.partition("/")[0], []).append(output)
        for number, batch in batches.items():
            served = self.links.get(f"{number}/")  # the link thread may remove it at any time
            if served is not None:
                served.send_message(messages.Outputs(batch))


class _Link:
    """Link to one front. Everything runs on the link thread but `channel.post`."""

    def __init__(self, host: EngineHost, prefix: str, sock: socket.socket) -> None:
        self._host, self._prefix = host, prefix
        self.channel = Channel(sock, host.loop, self._take_message, self._close_link)
        self._followers: dict[int, tuple[asyncio.Task[None], asyncio.Event]] = {}

    def send_message(self, message: object) -> None:
        self.channel.post(messages.encode(message))

    def _take_message(self, data: memoryview, file: int) -> None:
        message = messages.decode_to_engine(data)
        match message:
            case messages.Add():
                try:
                    if not message.request.request_key.startswith(self._prefix):
                        raise InvalidRequestError("The request is of another link.", field="request_id")
                    self._host.engine.add(messages.read_request(message, file))
                    answer: messages.Done | messages.Refused = messages.Done(message.call)
                except WicoreError as error:
                    answer = messages.Refused.from_error(message.call, error)
                except Exception:
                    log.exception("a request could not be taken")
                    broken = WicoreError("The engine could not take the request; its log says why.")
                    answer = messages.Refused.from_error(message.call, broken)
                self.send_message(answer)
            case messages.Abort():
                self._host.engine.abort(message.request_key, message.index)
            case messages.AskStats():
                self.send_message(messages.Done(message.call, self._host.engine.stats(message.tenant)))
            case messages.Follow():
                wanted = asyncio.Event()
                task = self._host.loop.create_task(self._follow_events(message, wanted))
                self._followers[message.call] = (task, wanted)
            case messages.More():
                if message.call in self._followers:
                    self._followers[message.call][1].set()
            case messages.Unfollow():
                self._end_following(message.call)

    async def _follow_events(self, ask: messages.Follow, wanted: asyncio.Event) -> None:
        try:
            feed = self._host.core.find_feed(ask.tenant)
            async for epoch, found in follow_feed(feed, (ask.epoch, ask.position)):
                for part in messages.split_change(ask.call, epoch, found):
                    self.send_message(part)
                    while self.channel.backlog > SNAPSHOT_BACKLOG:
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0)  # lets other messages in between the parts of a snapshot
                await wanted.wait()
                wanted.clear()
        except WicoreError as error:
            self.send_message(messages.Refused.from_error(ask.call, error))

    def _end_following(self, call: int) -> None:
        found = self._followers.pop(call, None)
        if found is not None:
            found[0].cancel()

    def _close_link(self) -> None:
        for call in list(self._followers):
            self._end_following(call)
        self._host.links.pop(self._prefix, None)
        for request_key in self._host.engine.live_ids():
            if request_key.startswith(self._prefix):
                self._host.engine.abort(request_key)
