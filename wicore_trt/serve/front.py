"""The front: the process that clients talk to. It tokenizes, serves, and hands requests to the engine process.

It must not know the engine's devices. Invariant: a front serves again with the next engine, without a restart.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wicore_trt.access import log as log_lines
from wicore_trt.access import tracing
from wicore_trt.child_process import import_named
from wicore_trt.collector import collect_rarely
from wicore_trt.config import Settings, settings_from_json
from wicore_trt.core.port import EnginePort
from wicore_trt.core.prompts import ImageLimits
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.errors import WicoreError
from wicore_trt.link.remote import RemoteEngine
from wicore_trt.link.replicas import Replicas
from wicore_trt.process.checker import Checker
from wicore_trt.process.child import BEAT_S, Control
from wicore_trt.serve.lifecycle import Servers, ServingProcess

if TYPE_CHECKING:
    from wicore_trt.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_METRICS = 1 << 14
"""Characters that fit a control message, where each may take six bytes."""
IMAGES_MESSAGE_MB = 32
"""Largest request in MiB where images are read: a file of images.files.MAX_FILE as base64, and more."""
RELINK_S = 0.1
"""After the end of a link, before another one is asked for: where the engine has ended, the next one brings it."""
FIRST_TO_GO = 500
"""Makes the system end the front first when memory runs out: it is back in seconds, an engine in minutes."""


def load_tokenizer(settings: Settings, checked_build: str | None) -> Tokenizer:
    """Load the engine's tokenizer; an earlier front has loaded that of `checked_build`. Raises EngineFormatError."""
    from wicore_trt.engine.directory import open_engine
    from wicore_trt.text.model_files import FILES
    from wicore_trt.text.tokenizer import Tokenizer

    assert settings.engine is not None
    engine = open_engine(Path(settings.engine), verify=False)
    build, files = engine.manifest.seal, engine.read_present(FILES)  # compared with the digests that the seal covers
    tokenizer = Tokenizer.from_files(files, engine.path, checked=build == checked_build)
    tokenizer.build, tokenizer.reads_images = build, engine.manifest.vision is not None
    return tokenizer


def main(fd: int) -> int:
    """Run a front; `fd` is its control socket. Return the exit code."""
    control = Control.from_fd(fd)
    received = control.receive_message()
    if received is None:
        return 0
    start = received[0]
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_GO))
    settings = settings_from_json(start["settings"])
    log_lines.configure_logging(json_lines=settings.log.json, level=settings.log.level)
    tracing.start_tracing()
    try:
        tokenizer = import_named(start["loader"])(settings, start["checked_build"])
    except Exception as error:  # raised once the engine has loaded, whose own error would say more
        tokenizer = error
    control.send("loaded", build=getattr(tokenizer, "build", None))  # None where it could not be loaded
    collect_rarely()
    control.sock.setblocking(False)
    try:
        code = FrontProcess(control, settings, start["max_context"], tokenizer, waits=start["waits"]).run()
    except WicoreError as error:
        control.leave_loop()
        control.send_error(error)
        code = error.exit_code
    except BaseException:
        log.exception("the front failed unexpectedly")
        code = 1
    tracing.stop_tracing()
    logging.shutdown()
    os._exit(code)  # not sys.exit, which would wait for hanging threads


class FrontProcess(ServingProcess):
    """Serves the engines of other processes, at the supervisor's orders."""

    def __init__(
        self, control: Control, settings: Settings, max_context: int | None, tokenizer: Tokenizer | Exception,
        *, waits: bool = True,
    ) -> None:  # fmt: skip
        """`waits`: serve only when all replicas have been there."""
        given = settings.server
        if given.max_message_mb is None and getattr(tokenizer, "reads_images", False):
            given = replace(given, max_message_mb=IMAGES_MESSAGE_MB)
        super().__init__(given, max_context)
        self._control, self._tokenizer = control, tokenizer
        self._image_limits = ImageLimits(settings.scheduler.max_images, given.image_hosts)
        self._settings_given, self._waits = settings, waits
        self._replicas: list[RemoteEngine] = []
        self._engine: EnginePort
        self._servers: Servers
        self._links = [0] * given.replicas
        self._tasks: set[asyncio.Task[None]] = set()

    def begin_watching(self, servers: Servers) -> None:
        self._servers = servers
        given = self._settings_given
        self._replicas = [RemoteEngine(partial(self._on_engine_change, i)) for i in range(given.server.replicas)]
        self._engine = self._replicas[0]
        if len(self._replicas) > 1:
            self._engine = Replicas(
                self._replicas, places=given.scheduler.max_sequences, caches=given.kv.prefix_cache,
                keeps_pages=given.kv.disk_path is not None,
            )  # fmt: skip
        asyncio.get_running_loop().add_reader(self._control.sock.fileno(), self._on_message)
        self._send_beat()

    def find_engine(self) -> TextEngine | None:
        known = [replica.info for replica in self._replicas if replica.info is not None]
        if self._engine.dead is not None or not known or (self._waits and len(known) < len(self._replicas)):
            return None
        if isinstance(self._tokenizer, Exception):
            raise self._tokenizer
        return TextEngine(self._engine, self._tokenizer, known[0], Checker().check, self._image_limits)

    def report_bound(self, address: str, url: str | None) -> None:
        named = {"port": address, "http_port": url or "unix:"}
        ports = {k: int(at.rpartition(":")[2]) for k, at in named.items() if not at.startswith("unix:")}
        self._control.send("bound", address=address, url=url, ports=ports)

    def report_serving(self, address: str, url: str | None) -> None:
        self._control.send("serving", address=address, url=url)

    def _send_beat(self) -> None:
        if not self._control.waiting:  # else a beat is outdated when it comes
            self._control.send("beat")
        asyncio.get_running_loop().call_later(BEAT_S, self._send_beat)

    def _on_engine_change(self, replica: int) -> None:
        self.changed.set()
        engine = self._replicas[replica]
        if engine.dead is not None and engine.channel is None:
            asyncio.get_running_loop().call_later(RELINK_S, self._ask_for_link, replica)

    def _ask_for_link(self, replica: int) -> None:
        """Ask for a link if there is none: a link may end without its engine, if one side hung for too long."""
        if self._replicas[replica].channel is None:
            self._control.send("unlinked", replica=replica, links=self._links[replica])

    def _on_message(self) -> None:
        received = self._control.receive_message()
        if received is None:
            os._exit(1)  # the supervisor has ended
        message, fds = received
        match message["kind"]:
            case "link":
                replica = message["replica"]
                self._links[replica] += 1
                if fds:
                    self._replicas[replica].connect(socket.socket(fileno=fds[0]))
                else:
                    log.warning("too many files are open here for a link to the engine; asking for it again")
                    asyncio.get_running_loop().call_later(RELINK_S, self._ask_for_link, replica)
            case "lost":
                self._replicas[message["replica"]].leave_engine(message["why"])
            case "drain":
                self.stop_serving()
            case "refuse":
                self._spawn_task(self._refuse_generations())
            case "metrics":
                self._spawn_task(self._send_metrics(message["call"]))
            case "settings":
                settings = settings_from_json(message["settings"])
                log_lines.set_level(settings.log.level)
                try:
                    self._servers.apply_settings(settings.server)
                except WicoreError as error:  # a file that was valid when the supervisor checked it
                    log.error("keys and certificates were not reloaded: %s", error)

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _refuse_generations(self) -> None:
        """Refuse generations from now on, and report when the open ones have ended."""
        await self._servers.set_draining()
        await self._servers.wait_until_idle()
        self._control.send("idle")

    async def _send_metrics(self, call: int) -> None:
        text = await self._servers.render_metrics()
        for at in range(0, len(text), MAX_METRICS):
            last = at + MAX_METRICS >= len(text)
            self._control.send("metrics", call=call, text=text[at : at + MAX_METRICS], last=last)
