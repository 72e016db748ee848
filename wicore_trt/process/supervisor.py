"""Starts the engine's process and the front's, joins them, and starts again what ends.

The front is forked from a template that has loaded what every front needs, so that the next one is there at once.
Operators' calls (`http/admin.py`) are answered here, whatever the others do. It must not know messages, models or
devices, and imports nothing that could bring it down, but what answers these calls where they are wanted. Invariants:
while it runs there is one engine and one front, or the next one is being started; no process that hangs holds it up; a
loaded engine that has work and gets on with nothing for server.watchdog_s is ended, with its stacks in the log;
when it has ended nothing of them is left; a second signal ends everything at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from wicore_trt.access.log import set_level
from wicore_trt.config import LoadedSettings, settings_to_json
from wicore_trt.errors import EngineDeadError, WicoreError
from wicore_trt.process.child import BEAT_S, Child, Fork, error_of, how_it_ended, named
from wicore_trt.process.reload import checked, has_terminal

log = logging.getLogger(__name__)

Told = Callable[[str, "str | None"], None]
"""What is told the address of gRPC and the URL of HTTP, where that is served."""

KILL_S, STOP_S = 1.0, 5.0
"""For a process that was killed to be gone; for the engine to end its step when it is told to stop, and for the front
to close after its grace time."""
FORK_S = 30.0
"""After which a template that has loaded and not made a front, though it was told to, counts as hung."""
DUMP_S = 1.0
"""For a stuck engine to write its stacks, before it is killed."""
ANSWER_S = 3.0
"""How long the front may take to tell its metrics."""
QUICK_S, PATIENCE, SLOW_S = 10.0, 3, 5.0
"""A process that ended by itself so soon after its start, so many times in a row, is started again after a pause, and
so is one that the system has no room for."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the processes run, as "module" or "module:name"; tests put their own in place."""

    engine: str = "wicore_trt.process.engine"
    front: str = "wicore_trt.serve.front"
    load_engine: str = "wicore_trt.process.engine:load"
    load_tokenizer: str = "wicore_trt.serve.front:load_tokenizer"
    admin: str = "wicore_trt.http.admin:AdminServer"


class Supervisor:
    """One server. `announce` is told the addresses when it serves for the first time, `bound` when the ports are
    taken. `reread` reads the settings again from where they were written."""

    def __init__(
        self,
        loaded: LoadedSettings,
        *,
        max_context: int | None = None,
        parts: Parts | None = None,
        announce: Told = lambda address, url: None,
        bound: Told = lambda address, url: None,
        reread: Callable[[], LoadedSettings] | None = None,
    ) -> None:
        settings = loaded.settings
        self._given, self._reread = loaded, reread or (lambda: loaded)
        self._ports: dict[str, Any] = {}  # where the front listens
        self._settings = settings_to_json(settings)
        self._had_terminal = has_terminal()
        self._grace_s = settings.server.grace_s
        self._max_context = max_context
        self._parts = parts or Parts()
        self._announce, self._bound = announce, bound
        self._engine, self._front, self._template = _Place(), _Place(), _Place()
        self._was_bound = self._announced = self._stopping = False
        self._engine_ready = self._template_ready = False
        self._silent_s = self._stuck_s = (
            0.0  # how long the engine has told nothing, and gets on with nothing as it told
        )
        self._refusing = False
        self._idle = asyncio.Event()  # the front refuses generations and has none
        self._asked: dict[int, asyncio.Future[str]] = {}  # metrics, by call
        self._calls = itertools.count()
        self._admin: Any = None
        self._links = 0  # that the front was given
        self._end: asyncio.Future[int] | None = None

    def run(self) -> int:
        """Serve until a signal; returns the exit code: 0 when every request could finish, 1 when some were cancelled.

        Raises what the engine or the front say at their first start.
        """
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        try:
            await self._start_admin()
            self._start_template()
            self._start_engine()
            return await self._end
        finally:
            self._stopping = True
            for place in self._places.values():
                place.close()
            if self._admin is not None:
                await self._admin.stop()

    async def _start_admin(self) -> None:
        if self._given.settings.server.admin_port is not None:
            self._admin = named(self._parts.admin)(self._given.settings.server, self)
            log.info("operators' calls on %s", await self._admin.start())

    @property
    def _places(self) -> dict[str, _Place]:
        return {"front": self._front, "template": self._template, "engine": self._engine}

    # --- processes -----------------------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        self._engine_ready = False
        self._silent_s = self._stuck_s = 0.0
        child = Child(self._parts.engine)
        self._engine.put(child, self._heard_engine, self._engine_ended)
        child.control.send("start", settings=self._settings, loader=self._parts.load_engine)

    def _start_template(self) -> None:
        self._template_ready = False
        child = Child(self._parts.front)
        self._template.put(child, self._heard_template, self._template_ended)
        child.control.send("start", settings=self._settings, loader=self._parts.load_tokenizer)
        self._later(0.0, self._start_front)

    def _start_front(self) -> None:
        """Have the template make a front, unless there is none, or the former front has not quite ended."""
        template = self._template.process
        if template is None or self._front.process is not None:
            return
        fork, self._links = Fork(), 0
        self._front.put(fork, self._heard_front, self._front_ended)
        template.control.send("fork", [fork.theirs.fileno()], settings=self._settings, max_context=self._max_context)
        fork.theirs.close()
        self._watch_fork()
        self._idle.clear()
        if self._refusing:
            fork.control.send("refuse")
        self._join()

    def _watch_fork(self) -> None:
        if self._template_ready:
            asyncio.get_running_loop().call_later(FORK_S, self._end_hung_template, self._front.process)

    def _end_hung_template(self, fork: Child | Fork | None) -> None:
        if (
            isinstance(fork, Fork)
            and fork is self._front.process
            and fork.pid is None
            and self._template.process is not None
        ):
            log.error("the template of fronts hangs; it is ended")
            self._template.process.kill()

    def _join(self) -> None:
        """Give both a socket to each other."""
        engine, front = self._engine.process, self._front.process
        if self._engine_ready and engine is not None and front is not None:
            try:
                one, other = socket.socketpair()
            except OSError as error:
                log.error("engine and front cannot be joined: %s; trying again", error)
                self._later(SLOW_S, lambda: self._join_again(engine, front))
                return
            self._links += 1
            with one, other:
                engine.control.send("link", [one.fileno()])
                front.control.send("link", [other.fileno()])

    def _join_again(self, engine: Child | Fork, front: Child | Fork) -> None:
        """Join them, unless one of them has ended and the next one was joined."""
        if self._engine.process is engine and self._front.process is front:
            self._join()

    def _heard_engine(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "ready":
                self._engine_ready = True
                self._join()
                self._watch_engine(self._engine.process)
            case "beat":
                self._silent_s, self._stuck_s = 0.0, message["stuck_s"]
            case "failed":
                self._engine.said = error_of(message)
            case "broke":
                self._engine.said = EngineDeadError(f"The engine stopped: {message['why']}.")

    def _watch_engine(self, engine: Child | Fork | None) -> None:
        """Look at a loaded engine once in BEAT_S seconds, and end it when it is stuck or says nothing."""
        limit_s = self._given.settings.server.watchdog_s
        if not isinstance(engine, Child) or engine is not self._engine.process or self._stopping or limit_s is None:
            return
        loop, stuck_s = asyncio.get_running_loop(), max(self._silent_s, self._stuck_s)
        self._silent_s += BEAT_S
        if stuck_s < limit_s:
            loop.call_later(BEAT_S, self._watch_engine, engine)
            return
        why = f"it had work and ended no step for {stuck_s:.0f} s"
        log.error("the engine is stuck: %s; the stacks of its threads follow", why)
        self._engine.said = EngineDeadError(f"The engine was ended: {why}.")
        engine.dump()
        loop.call_later(DUMP_S, engine.kill)

    def _heard_template(self, message: dict[str, Any]) -> None:
        front = self._front.process
        match message["kind"]:
            case "ready":
                self._template_ready = True
                self._watch_fork()
            case "forked" if isinstance(front, Fork):
                front.pid = message["pid"]
            case "exited" if isinstance(front, Fork) and front.pid == message["pid"]:
                front.code.set_result(message["code"])

    def _heard_front(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "bound":
                if not self._was_bound:
                    self._was_bound = True
                    self._bound(message["address"], message["url"])
                # The next front listens where this one does, also where the system chose the port.
                self._ports = message["ports"]
                self._keep(self._given)
            case "serving":
                if not self._announced:
                    self._announced = True
                    self._announce(message["address"], message["url"])
            case "idle":
                self._idle.set()
            case "metrics" if message["call"] in self._asked:
                self._asked.pop(message["call"]).set_result(message["text"])
            case "unlinked" if message["links"] == self._links:  # else another one is on its way
                self._join()
            case "failed":
                self._front.said = error_of(message)

    def _engine_ended(self, code: int) -> None:
        said, was_ready, self._engine_ready = self._engine.said, self._engine_ready, False
        if self._stopping:
            return
        if said is not None and not was_ready:
            self._finish(said)  # it cannot be loaded, and will not next time
            return
        self._again("engine", self._engine, said or how_it_ended(code), code, self._start_engine)

    def _front_ended(self, code: int) -> None:
        if self._stopping:
            return
        said = self._front.said
        if said is not None and not self._announced:
            self._finish(said)
            return
        self._again("front", self._front, said or how_it_ended(code), code, self._start_front)

    def _template_ended(self, code: int) -> None:
        front = self._front.process
        if isinstance(front, Fork) and not front.code.done():
            front.code.set_result(code)  # fronts end with their template
        if self._stopping:
            return
        self._again("template of fronts", self._template, how_it_ended(code), code, self._start_template)

    def _again(self, what: str, place: _Place, why: object, code: int, start: Callable[[], None]) -> None:
        """Start it again, unless it keeps ending and never served: it will not next time."""
        pause = place.pause(code)
        if pause and not self._announced:
            self._finish(EngineDeadError(f"The {what} ended {PATIENCE + 1} times before it was ready ({why})."))
            return
        log.error("the %s ended (%s); starting it again", what, why)
        self._later(pause, start)

    def _later(self, seconds: float, start: Callable[[], None]) -> None:
        def begin() -> None:
            try:
                if not self._stopping:
                    start()
            except OSError as error:
                log.error("no process can be started: %s; trying again", error)
                self._later(SLOW_S, start)

        asyncio.get_running_loop().call_later(seconds, begin)

    # --- settings that change ------------------------------------------------------------------------------------

    def _on_hangup(self) -> None:
        """Read the settings again; but a closed terminal ends what was started in it."""
        if self._had_terminal and not has_terminal():
            self._on_signal(signal.SIGHUP)
        elif not self._stopping:
            self.reload()

    def _keep(self, loaded: LoadedSettings) -> None:
        self._given, settings = loaded, loaded.settings
        self._settings = settings_to_json(replace(settings, server=replace(settings.server, **self._ports)))

    def reload(self) -> dict[str, Any]:
        """Take what the files say now where it can change, and tell the front and the engine."""
        told: dict[str, Any] = {"changed": (), "restart": (), "error": None}
        try:
            change = checked(self._given, self._reread)
            if self._admin is not None:
                self._admin.change(change.loaded.settings.server)
        except WicoreError as error:
            told["error"] = str(error)
            log.error("the settings stay as they are: %s", error)
        else:
            told |= {"changed": change.changed, "restart": change.restart}
            self._keep(change.loaded)
            level = change.loaded.settings.log.level
            log.info(
                "settings, keys and certificates were read again; changed: %s", ", ".join(change.changed) or "none"
            )
            set_level(level)
            if change.restart:
                log.warning("these settings need a restart: %s", ", ".join(change.restart))
            if self._engine.process is not None:
                self._engine.process.control.send("level", level=level)
            if self._front.process is not None:
                self._front.process.control.send("settings", settings=self._settings)
        return told

    # --- operators' calls ----------------------------------------------------------------------------------------

    async def drain(self, wait_s: float) -> bool:
        """Have the front refuse generations, and every later one too; whether none is left after so long."""
        if not self._refusing:
            self._refusing = True
            log.info("generations are refused from now on")
            if self._front.process is not None:
                self._front.process.control.send("refuse")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), wait_s)
        return self._idle.is_set()

    def config(self) -> list[dict[str, Any]]:
        """Key, value and source of each setting; secrets are masked."""
        return [{"key": key, "value": value, "source": source} for key, value, source in self._given.rows()]

    async def metrics(self) -> tuple[str, dict[str, tuple[bool, int]]]:
        """What the front tells Prometheus, unless it hangs, and of each process whether it runs and how often it was
        started again."""
        text, front, call = "", self._front.process, next(self._calls)
        if front is not None:
            answer = self._asked[call] = asyncio.get_running_loop().create_future()
            front.control.send("metrics", call=call)
            with suppress(TimeoutError):
                text = await asyncio.wait_for(answer, ANSWER_S)
            self._asked.pop(call, None)
        return text, {n: (p.process is not None, max(0, p.restarts)) for n, p in self._places.items()}

    # --- the end -------------------------------------------------------------------------------------------------

    def _finish(self, outcome: int | WicoreError) -> None:
        assert self._end is not None
        if self._end.done():
            return
        if isinstance(outcome, WicoreError):
            self._end.set_exception(outcome)
        else:
            self._end.set_result(outcome)

    def _kill_all(self) -> None:
        for place in self._places.values():
            if place.process is not None:
                place.process.kill()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping:
            log.warning("second signal: exit at once")
            self._kill_all()
            logging.shutdown()
            os._exit(128 + number)
        log.info("%s received", number.name)
        self._stopping = True
        asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Let the front finish its requests, then end all."""
        front, engine = self._front.process, self._engine.process
        code = 0
        if front is not None and self._announced:
            front.control.send("drain")
            code = await asyncio.to_thread(front.wait, self._grace_s + 2 * STOP_S)
        if engine is not None and self._engine_ready:
            engine.control.send("stop", timeout_s=STOP_S)
            await asyncio.to_thread(engine.wait, 2 * STOP_S)
        self._finish(0 if code == 0 else 1)


class _Place:
    """Where one process runs, or the next one will."""

    def __init__(self) -> None:
        self.process: Child | Fork | None = None
        self.said: WicoreError | None = None  # why it ends
        self.restarts = -1
        self._began = 0.0
        self._quick = 0

    def put(self, process: Child | Fork, heard: Callable[[dict[str, Any]], None], ended: Callable[[int], None]) -> None:
        """A process was started; `heard` gets its messages and `ended` its exit code, on the event loop."""
        self.process, self.said, self._began = process, None, time.monotonic()
        self.restarts += 1
        loop, number = asyncio.get_running_loop(), process.control.fileno()

        async def reap() -> None:
            code = await asyncio.to_thread(process.wait, STOP_S)
            process.control.close()
            self.process = None
            ended(code)

        def on_message() -> None:
            received = process.control.receive()
            if received is None:
                loop.remove_reader(number)
                asyncio.ensure_future(reap())
                return
            for fd in received[1]:
                os.close(fd)
            heard(received[0])

        loop.add_reader(number, on_message)

    def close(self) -> None:
        """End the process, and hear no more of it."""
        if self.process is not None:
            asyncio.get_running_loop().remove_reader(self.process.control.fileno())
            self.process.kill()
            self.process.wait(KILL_S)

    def pause(self, code: int) -> float:
        """Seconds to wait before the next start: none, unless it keeps ending by itself."""
        own = code >= 0 or -code not in (signal.SIGKILL, signal.SIGTERM)
        self._quick = self._quick + 1 if own and time.monotonic() - self._began < QUICK_S else 0
        return SLOW_S if self._quick > PATIENCE else 0.0
