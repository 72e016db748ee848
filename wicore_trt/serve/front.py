"""The process that clients talk to: tokenizes, serves, and hands requests to the engine's process.

A template loads modules and tokenizer, which takes seconds, and makes each front by forking itself. It must not know
the engine's devices. Invariants: the template runs one thread and no event loop; a front serves again when a new engine
comes, without a new start of its own.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import signal
import socket
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wicore_trt.access import log as log_lines
from wicore_trt.access import tracing
from wicore_trt.collector import collect_rarely
from wicore_trt.config import Settings, settings_from_json
from wicore_trt.core.cells import Cells, SharedCells
from wicore_trt.errors import WicoreError
from wicore_trt.link.remote import RemoteEngine
from wicore_trt.process.checker import Checker
from wicore_trt.process.child import BEAT_S, Control, Rein, belong_to, named
from wicore_trt.serve.siblings import Siblings

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine
    from wicore_trt.serve.servers import Servers
    from wicore_trt.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_METRICS = 1 << 14
"""Characters that fit a control message, where each may take six bytes."""
RELINK_S = 0.1
"""After the end of a link, before another one is asked for: where the engine has ended, the next one brings it."""


FIRST_TO_GO = 500
"""What the system adds to a front's score when memory runs out and a process has to go. Strangers can make it grow, and
the next one is there in a tenth of a second, whereas an engine takes minutes to load."""


def load_tokenizer(settings: Settings) -> Tokenizer:
    """The tokenizer of the engine that the settings name. Raises EngineFormatError."""
    from wicore_trt.engine.directory import open_engine
    from wicore_trt.text.tokenizer import FILES, Tokenizer

    assert settings.engine is not None
    engine = open_engine(Path(settings.engine), verify=False)
    tokenizer = Tokenizer.from_files(engine.read_present(FILES), engine.path)
    tokenizer.build = engine.manifest.seal
    return tokenizer


def main(fd: int) -> int:
    """The life of the template; `fd` is its control socket. It has one thread and opens nothing but the memory that
    fronts share, so that a fork of it is a whole process. That memory comes with its start, and outlives it. Returns
    the exit code."""
    control = Control.of_child(fd)
    received = control.receive()
    if received is None:
        return 0
    start, [memory] = received
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import_module("wicore_trt.serve.lifecycle")
    settings = settings_from_json(start["settings"])
    try:
        tokenizer = named(start["loader"])(settings)
    except Exception as error:  # each front says so when the engine, whose error says more, has been loaded
        tokenizer = error
    cells = SharedCells(memory)
    collect_rarely()
    control.send("ready", build=getattr(tokenizer, "build", None))  # None where it could not be loaded
    poll, forks = select.poll(), dict[int, int]()  # process ids by file descriptor
    poll.register(control.fileno(), select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in forks:
                poll.unregister(ready)
                os.close(ready)
                pid, status = os.waitpid(forks.pop(ready), 0)
                control.send("exited", pid=pid, code=os.waitstatus_to_exitcode(status))
                continue
            received = control.receive()
            if received is None:
                return 0
            message, fds = received
            template = os.getpid()
            try:
                pid, watched = _forked(fds)
            except OSError as error:  # too little memory, say, or too many processes: no reason to end with all fronts
                control.send("unforked", front=message["front"], why=str(error))
                continue
            if pid == 0:
                belong_to(template)
                control.close()
                os._exit(serve(Rein.of_child(fds[0]), message, tokenizer, cells))
            forks[watched] = pid
            poll.register(watched, select.POLLIN)
            control.send("forked", front=message["front"], pid=pid)


def _forked(fds: list[int]) -> tuple[int, int]:
    """The process id of a fork of this process, and a file descriptor that tells of its end; 0 twice in the fork, which
    alone keeps `fds`. Raises OSError where there is none."""
    pid = None
    try:
        if not fds:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        pid = os.fork()
        return pid, os.pidfd_open(pid) if pid else 0
    except OSError:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    finally:
        if pid != 0:
            for fd in fds:
                os.close(fd)


def serve(control: Rein, start: dict[str, Any], tokenizer: Tokenizer | Exception, cells: Cells) -> int:
    """The life of a front, whose number is `front`; `cells` are those of all. Returns the exit code."""
    from wicore_trt.serve.lifecycle import run_server

    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_GO))
    settings = settings_from_json(start["settings"])
    log_lines.configure(json_lines=settings.log.json, level=settings.log.level.upper())
    tracing.configure()
    front = Front(control, tokenizer, cells)
    make = partial(Siblings, start["front"], settings.server.fronts, cells, control.offer, listening=start["listening"])
    try:
        code = run_server(
            settings.server, front.engine, front.announce, start["max_context"], front.bound, front.watch,
            lambda: front.sees(make()),
        )  # fmt: skip
    except WicoreError as error:
        control.outlive_loop()
        control.send_error(error)
        code = error.exit_code
    except BaseException:
        log.exception("the front broke")
        code = 1
    tracing.close()
    logging.shutdown()
    return code  # nothing that hangs holds up the end


class Front:
    """What the lifecycle of a server needs where the engine is another process's."""

    def __init__(self, control: Rein, tokenizer: Tokenizer | Exception, cells: Cells) -> None:
        self._control, self._tokenizer, self._cells = control, tokenizer, cells
        self._siblings: Siblings | None = None
        self._remote: RemoteEngine | None = None
        self._came = asyncio.Event()
        self._stop: asyncio.Event | None = None
        self._servers: Servers | None = None
        self._links = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def engine(self) -> TextEngine:
        """The engine, when there is one."""
        from wicore_trt.core.text_engine import TextEngine

        await self._came.wait()
        assert self._remote is not None and self._remote.info is not None
        if isinstance(self._tokenizer, Exception):
            raise self._tokenizer
        return TextEngine(self._remote, self._tokenizer, self._remote.info, Checker().check, self._cells)

    def sees(self, siblings: Siblings) -> Siblings:
        """These are the other fronts."""
        self._siblings = siblings
        return siblings

    def watch(self, stop: asyncio.Event, servers: Servers) -> None:
        """Listen to the supervisor; `stop` is set when it says so."""
        self._stop, self._servers = stop, servers
        self._remote = RemoteEngine(self._changed)
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._on_message)
        self._beat()

    def _beat(self) -> None:
        """Tell the supervisor that this front gets on."""
        self._control.offer("beat")
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

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
        elif not self._remote.linked:
            asyncio.get_running_loop().call_later(RELINK_S, self._ask_for_link)

    def _ask_for_link(self) -> None:
        """The link has ended, perhaps without its engine: one side may have hung for too long."""
        assert self._remote is not None
        if not self._remote.linked:
            self._control.send("unlinked", links=self._links)

    def _on_message(self) -> None:
        assert self._remote is not None and self._stop is not None
        received = self._control.receive()
        if received is None:
            os._exit(1)  # the supervisor has ended
        message, fds = received
        if message["kind"] == "link":
            self._links += 1
            if fds:
                self._remote.connect(socket.socket(fileno=fds[0]))
            else:  # this process has too many files open
                asyncio.get_running_loop().call_later(RELINK_S, self._ask_for_link)
        elif message["kind"] == "drain":
            self._stop.set()
        elif message["kind"] == "refuse":
            self._spawn(self._refuse())
        elif message["kind"] == "metrics":
            self._spawn(self._tell_metrics(message["call"]))
        elif message["kind"] == "settings":
            self._change(message)
        elif message["kind"] == "asked":
            told = self._servers.told(message["tenant"]) if self._servers is not None else None
            self._control.send("told", front=message["front"], call=message["call"], told=told)
        elif message["kind"] in ("expect", "told") and self._siblings is not None:
            self._siblings.heard(message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _refuse(self) -> None:
        """Take no more generations, and say when those that are open have ended."""
        assert self._servers is not None
        await self._servers.set_draining()
        await self._servers.until_idle()
        self._control.send("idle")

    async def _tell_metrics(self, call: int) -> None:
        assert self._servers is not None
        text = await self._servers.metrics()
        for at in range(0, len(text), MAX_METRICS):
            last = at + MAX_METRICS >= len(text)
            self._control.send("metrics", call=call, text=text[at : at + MAX_METRICS], last=last)

    def _change(self, message: dict[str, Any]) -> None:
        """The settings were read again."""
        assert self._servers is not None
        settings = settings_from_json(message["settings"])
        log_lines.set_level(settings.log.level)
        try:
            self._servers.change(settings.server)
        except WicoreError as error:  # a file that was good a moment ago
            log.error("keys and certificates are kept: %s", error)
