"""Starts the engine's process and the fronts', joins them, and starts again what ends.

Fronts are forked from a template that has loaded what every front needs, so that the next one is there at once.
Operators' calls (`http/admin.py`) are answered here, whatever the others do. It must not know messages, models or
devices, and imports nothing that could bring it down, but what answers these calls where they are wanted. Invariants:
while it runs there are one engine and all its fronts, or the next one is being started; no process that hangs holds it
up; a loaded engine that has work and gets on with nothing for server.watchdog_s is ended, with its stacks in the log;
a front that says nothing for FRONT_S is ended; engine and fronts are of one build of the engine; when it has ended
nothing of them is left; a second signal ends everything at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from wicore_trt.access.log import set_level
from wicore_trt.config import LoadedSettings, settings_to_json
from wicore_trt.core.cells import shared_memory
from wicore_trt.errors import EngineDeadError, EnvironmentUnfitError, WicoreError
from wicore_trt.process.child import BEAT_S, Child, Fork, error_of, exit_code, named
from wicore_trt.process.place import PATIENCE, SLOW_S, STOP_S, FrontPlace, Place
from wicore_trt.process.reload import checked, has_terminal

log = logging.getLogger(__name__)

Told = Callable[[str, "str | None"], None]
"""What is told the address of gRPC and the URL of HTTP, where that is served."""

FORK_S = 30.0
"""After which a template that has loaded and not made a front, though it was told to, counts as hung."""
FRONT_S = 20.0
"""After which a front that says nothing counts as hung: the next one is there in a tenth of a second."""
DUMP_S = 1.0
"""For a stuck engine to write its stacks, before it is killed."""
ANSWER_S = 3.0
"""How long a front may take to tell its metrics and those of the others."""
MOST_ASKED = 3
"""Fronts that are asked one after the other, should the first ones hang."""


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
        self._cells = shared_memory()  # of all fronts, now and later
        self._settings = settings_to_json(settings)
        self._had_terminal = has_terminal()
        self._grace_s = settings.server.grace_s
        self._max_context = max_context
        self._parts = parts or Parts()
        self._announce, self._bound = announce, bound
        self._engine, self._template = Place(), Place()
        self._fronts = [FrontPlace(number) for number in range(1, settings.server.fronts + 1)]
        self._was_bound = self._announced = self._stopping = False
        self._engine_ready = self._template_ready = False
        self._silent_s = self._stuck_s = (
            0.0  # how long the engine has told nothing, and gets on with nothing as it told
        )
        self._refusing = False
        self._idle = asyncio.Event()  # all fronts refuse generations and have none
        self._asked: dict[int, tuple[list[str], asyncio.Future[str]]] = {}  # metrics, by call
        self._calls = itertools.count()
        self._admin: Any = None
        self._end: asyncio.Future[int] | None = None

    def run(self) -> int:
        """Serve until a signal; returns the exit code: 0 when every request could finish, 1 when some were cancelled,
        130 for Ctrl-C before it served.
        The log has been written then, so that what a caller says comes last.

        Raises what the engine or the front say at their first start.
        """
        try:
            return asyncio.run(self._run())
        finally:
            logging.shutdown()

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
            places = self._places
            for place in places.values():
                place.close()
            for place in reversed(places.values()):  # fronts behind their template
                place.bury()
            if self._admin is not None:
                await self._admin.stop()

    async def _start_admin(self) -> None:
        if self._given.settings.server.admin_port is not None:
            self._admin = named(self._parts.admin)(self._given.settings.server, self)
            log.info("operators' calls on %s", await self._admin.start())

    @property
    def _places(self) -> dict[str, Place]:
        fronts: dict[str, Place] = {front.name: front for front in self._fronts}
        return {**fronts, "template": self._template, "engine": self._engine}

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
        child.control.send("start", [self._cells], settings=self._settings, loader=self._parts.load_tokenizer)
        self._later(0.0, self._start_fronts)

    def _start_fronts(self) -> None:
        for front in self._fronts:
            self._start_front(front)

    def _start_front(self, front: FrontPlace) -> None:
        """Have the template make a front, unless there is none, or the former front has not quite ended. Until the
        first one listens the others wait: they listen where it does."""
        template = self._template.process
        if template is None or front.process is not None or (front is not self._fronts[0] and not self._was_bound):
            return
        fork = Fork()
        front.begin(fork, self._heard_front, self._front_ended)
        # Where all begin anew, as with their template, none may take another one of them for a stranger.
        listening = self._was_bound and len(self._fronts) > 1
        with closing(fork.theirs):  # so that the front has ended where it never began
            template.control.send(
                "fork", [fork.theirs.fileno()], settings=self._settings, max_context=self._max_context,
                front=front.number, listening=listening,
            )  # fmt: skip
        self._watch_fork(front)
        self._watch_front(front, fork)
        self._idle.clear()
        if self._refusing:
            fork.control.send("refuse")
        self._join(front)

    def _watch_fork(self, front: FrontPlace) -> None:
        if self._template_ready:
            asyncio.get_running_loop().call_later(FORK_S, self._end_hung_template, front, front.process)

    def _end_hung_template(self, front: FrontPlace, fork: Child | Fork | None) -> None:
        if isinstance(fork, Fork) and fork is front.process and fork.pid is None and self._template.process is not None:
            log.error("the template of fronts hangs; it is ended")
            self._template.kill()

    def _watch_front(self, front: FrontPlace, fork: Fork) -> None:
        """Look at a front once in BEAT_S seconds, and end it when it says nothing."""
        if fork is not front.process or self._stopping:
            return
        if front.silent_s >= FRONT_S:
            log.error("the %s hangs: it has said nothing for %.0f s; it is ended", front.name, front.silent_s)
            front.kill()
            return
        front.silent_s += BEAT_S if fork.pid is not None else 0.0
        asyncio.get_running_loop().call_later(BEAT_S, self._watch_front, front, fork)

    def _agree(self) -> None:
        """Join engine and fronts, which are of one build; else end what has opened the older one."""
        if not self._agreed() and self._engine_ready and self._template_ready:
            name, older = min(("engine", self._engine), ("template", self._template), key=lambda one: one[1].began)
            log.error("the engine was built anew over the one that is served; the %s is started again on it", name)
            older.kill()
        for front in self._fronts:
            self._join(front)

    def _agreed(self) -> bool:
        builds = {self._engine.build, self._template.build}
        return self._engine_ready and self._template_ready and (len(builds) == 1 or None in builds)

    def _join(self, front: FrontPlace) -> None:
        """Give engine and front a socket to each other."""
        engine, process = self._engine.process, front.process
        if self._agreed() and engine is not None and process is not None:
            try:
                one, other = socket.socketpair()
            except OSError as error:
                log.error("engine and front cannot be joined: %s; trying again", error)
                self._later(SLOW_S, lambda: self._join_again(engine, front, process))
                return
            front.links += 1
            with one, other:
                engine.control.send("link", [one.fileno()])
                process.control.send("link", [other.fileno()])

    def _join_again(self, engine: Child | Fork, front: FrontPlace, process: Child | Fork) -> None:
        """Join them, unless one of them has ended and the next one was joined."""
        if self._engine.process is engine and front.process is process:
            self._join(front)

    def _heard_engine(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "ready":
                self._engine_ready, self._engine.build = True, message["build"]
                self._engine.ready()
                self._agree()
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
        match message["kind"]:
            case "ready":
                self._template_ready, self._template.build = True, message["build"]
                self._template.ready()
                for front in self._fronts:
                    self._watch_fork(front)
                self._agree()
            case "forked":
                fork = self._fronts[message["front"] - 1].process
                if isinstance(fork, Fork):
                    fork.pid = message["pid"]
            case "unforked":
                front = self._fronts[message["front"] - 1]
                if isinstance(front.process, Fork):
                    front.said = EnvironmentUnfitError(f"No front can be made: {message['why']}.")
                    front.process.code.set_result(front.said.exit_code)
            case "exited":
                for fork in (front.process for front in self._fronts):
                    if isinstance(fork, Fork) and fork.pid == message["pid"]:
                        fork.code.set_result(message["code"])

    def _heard_front(self, front: FrontPlace, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "bound":
                front.bound = True
                front.ready()
                # The next front listens where this one does, also where the system chose the port.
                self._ports = message["ports"]
                self._keep(self._given)
                if not self._was_bound:
                    self._was_bound = True
                    self._bound(message["address"], message["url"])
                    self._later(0.0, self._start_fronts)
            case "serving":
                front.serving = True
                if not self._announced and all(other.serving for other in self._fronts):
                    self._announced = True
                    self._announce(message["address"], message["url"])
            case "idle":
                front.idle = True
                if all(other.idle for other in self._fronts):
                    self._idle.set()
            case "beat":
                front.silent_s = 0.0
            case "metrics" if message["call"] in self._asked:
                parts, answer = self._asked[message["call"]]
                parts.append(message["text"])
                if message["last"] and not answer.done():
                    answer.set_result("".join(parts))
            case "ask" | "told":
                self._pass_on(front, message)
            case "unlinked" if message["links"] == front.links:  # else another one is on its way
                self._join(front)
            case "failed":
                front.said = error_of(message)

    def _pass_on(self, front: FrontPlace, message: dict[str, Any]) -> None:
        """A question of one front to the others, or an answer. Nothing is kept: who asked waits for a while."""
        if message["kind"] == "told":
            asker = self._fronts[message["front"] - 1].process
            if asker is not None:
                asker.control.send("told", call=message["call"], told=message["told"])
            return
        others = [other.process for other in self._fronts if other is not front and other.bound]
        asked = [process for process in others if process is not None]
        for process in asked:
            process.control.send("asked", front=front.number, call=message["call"], tenant=message["tenant"])
        if front.process is not None:
            front.process.control.send("expect", call=message["call"], count=len(asked))

    def _engine_ended(self, code: int) -> None:
        said, was_ready, self._engine_ready = self._engine.said, self._engine_ready, False
        if self._stopping:
            return
        if said is not None and not was_ready:
            self._finish(said)  # it cannot be loaded, and will not next time
            return
        self._again("engine", self._engine, code, self._start_engine)

    def _front_ended(self, front: FrontPlace, code: int) -> None:
        if self._stopping:
            return
        said = front.said
        if said is not None and not self._announced:
            self._finish(said)
            return
        self._again(front.name, front, code, lambda: self._start_front(front))

    def _template_ended(self, code: int) -> None:
        for front in self._fronts:
            if isinstance(front.process, Fork) and not front.process.code.done():
                front.killed = self._template.killed
                front.process.code.set_result(code)  # fronts end with their template
        self._template_ready = False
        if self._stopping:
            return
        self._again("template of fronts", self._template, code, self._start_template)

    def _again(self, what: str, place: Place, code: int, start: Callable[[], None]) -> None:
        """Start it again, unless it keeps ending and never served: it will not next time."""
        pause, why = place.pause(), place.why(code)
        if pause and not self._announced:
            self._finish(EngineDeadError(f"The {what} ended {PATIENCE + 1} times before it was ready ({why})."))
            return
        log.error("the %s ended (%s); starting it again%s", what, why, f" in {pause:.0f} s" if pause else "")
        self._later(pause, start)

    def _later(self, seconds: float, start: Callable[[], None]) -> None:
        def begin() -> None:
            try:
                if not self._stopping:
                    start()
            except (OSError, MemoryError) as error:
                log.error("no process can be started: %s; trying again", error or type(error).__name__)
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
            self._tell_fronts("settings", settings=self._settings)
        return told

    def _tell_fronts(self, kind: str, **facts: Any) -> None:
        for front in self._fronts:
            if front.process is not None:
                front.process.control.send(kind, **facts)

    # --- operators' calls ----------------------------------------------------------------------------------------

    async def drain(self, wait_s: float) -> bool:
        """Have the fronts refuse generations, and every later one too; whether none is left after so long."""
        if not self._refusing:
            self._refusing = True
            log.info("generations are refused from now on")
            self._tell_fronts("refuse")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), wait_s)
        return self._idle.is_set()

    def config(self) -> list[dict[str, Any]]:
        """Key, value and source of each setting; secrets are masked."""
        return [{"key": key, "value": value, "source": source} for key, value, source in self._given.rows()]

    async def metrics(self) -> tuple[str, dict[str, tuple[bool, int]]]:
        """What the fronts tell Prometheus, unless all hang, and of each process whether it runs and how often it was
        started again."""
        text = ""
        for front in self._fronts[:MOST_ASKED]:
            if front.process is not None and not text:
                call, answer = next(self._calls), asyncio.get_running_loop().create_future()
                self._asked[call] = [], answer
                front.process.control.send("metrics", call=call)
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
        asyncio.ensure_future(self._drain(128 + number if number == signal.SIGINT and not self._announced else 0))

    async def _drain(self, code: int) -> None:
        """Let the fronts finish their requests, then end all, with `code` where all could."""
        fronts, engine = [front.process for front in self._fronts if front.process is not None], self._engine.process
        codes = [0]
        if self._announced:
            self._tell_fronts("drain")
            end_s = self._grace_s + 2 * STOP_S
            codes += await asyncio.gather(*(exit_code(front, end_s) for front in fronts))
        if engine is not None and self._engine_ready:
            engine.control.send("stop", timeout_s=STOP_S)
            await exit_code(engine, 2 * STOP_S)
        self._finish(1 if any(codes) else code)
