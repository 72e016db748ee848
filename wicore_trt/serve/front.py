"""The process that clients talk to: tokenizes, serves, and hands requests to the engine's process.

It must not know the engine's devices, and loads no array library. Invariant: it serves again when a new engine comes,
without a new start of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wicore_trt.access import log as log_lines
from wicore_trt.config import Settings, settings_from_json
from wicore_trt.errors import WicoreError
from wicore_trt.link.remote import RemoteEngine
from wicore_trt.process.child import Control
from wicore_trt.process.engine import named

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine
    from wicore_trt.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def load_tokenizer(settings: Settings) -> Tokenizer:
    """The tokenizer of the engine that the settings name. Raises EngineFormatError."""
    from wicore_trt.engine.directory import open_engine
    from wicore_trt.text.tokenizer import FILES, Tokenizer

    assert settings.engine is not None
    engine = open_engine(Path(settings.engine), verify=False)
    return Tokenizer.from_files(engine.read_present(FILES), engine.path)


def main(fd: int) -> int:
    """The life of the process; `fd` is its control socket. Returns the exit code."""
    control = Control.of_child(fd)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor decides
    first = control.receive()
    if first is None:
        return 0
    start = first[0]
    settings = settings_from_json(start["settings"])
    log_lines.configure(json_lines=settings.log.json, level=settings.log.level.upper())  # before gRPC is imported
    from wicore_trt.serve.lifecycle import run_server

    front = Front(control, settings, start)
    try:
        code = run_server(settings.server, front.engine, front.announce, start["max_context"], front.bound, front.watch)
    except WicoreError as error:
        control.send_error(error)
        code = error.exit_code
    logging.shutdown()
    os._exit(code)  # nothing that hangs holds up the end


class Front:
    """What the lifecycle of a server needs where the engine is another process's."""

    def __init__(self, control: Control, settings: Settings, start: dict[str, Any]) -> None:
        self._control, self._settings, self._start = control, settings, start
        self._remote: RemoteEngine | None = None
        self._came = asyncio.Event()
        self._stop: asyncio.Event | None = None

    async def engine(self) -> TextEngine:
        """The engine, when there is one."""
        from wicore_trt.core.offload import on_daemon_thread
        from wicore_trt.core.text_engine import TextEngine

        loading = on_daemon_thread(lambda: named(self._start["loader"])(self._settings))
        await self._came.wait()  # where both fail, the engine's error says more
        tokenizer = await loading
        assert self._remote is not None and self._remote.info is not None
        return TextEngine(self._remote, tokenizer, self._remote.info)

    def watch(self, stop: asyncio.Event) -> None:
        """Listen to the supervisor; `stop` is set when it says so."""
        self._stop = stop
        self._remote = RemoteEngine(self._changed)
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._on_message)

    def bound(self, address: str, url: str | None) -> None:
        named = {"port": address, "http_port": url or "unix:"}
        ports = {k: int(at.rpartition(":")[2]) for k, at in named.items() if not at.startswith("unix:")}
        self._control.send("bound", address=address, url=url, ports=ports)

    def announce(self, address: str, url: str | None) -> None:
        self._control.send("serving", address=address, url=url)

    def _changed(self) -> None:
        assert self._remote is not None
        if self._remote.dead is None:
            self._came.set()

    def _on_message(self) -> None:
        assert self._remote is not None and self._stop is not None
        received = self._control.receive()
        if received is None:
            os._exit(1)  # the supervisor has ended
        message, fds = received
        if message["kind"] == "link":
            self._remote.connect(socket.socket(fileno=fds[0]))
        elif message["kind"] == "drain":
            self._stop.set()
