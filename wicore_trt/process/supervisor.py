"""Starts engine processes and front, joins them, restarts whichever ends, and answers operators (`http/admin.py`).

It must not know messages, models or devices, and imports nothing that could crash it but the operators' listener.
Invariants: engines and front run or are being started; no hanging process blocks the supervisor. A stuck engine
(server.watchdog_s) is ended, its stacks logged, and so is a silent front. Both have opened the same build of the engine
directory; no process outlives the supervisor; a second signal ends everything at once; processes can apply what
`check_reload` returns.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from wicore_trt.access.admission import Admission
from wicore_trt.access.listening import read_tls
from wicore_trt.access.log import set_level
from wicore_trt.child_process import ENDED, find_halt, import_named
from wicore_trt.config import KEYS, LoadedSettings, settings_to_json, value_of
from wicore_trt.errors import ConfigError, EngineDeadError, EngineFormatError, WicoreError
from wicore_trt.process.child import (
    BEAT_S,
    DUMP,
    KILL_S,
    PATIENCE,
    STOP_S,
    Child,
    ChildSlot,
    describe_exit,
    read_error,
    wait_for_exit,
)
from wicore_trt.process.replicas import divide_gpus, divide_settings

log = logging.getLogger(__name__)

Report = Callable[[str, "str | None"], None]
"""Takes the address of gRPC and the URL of HTTP, None where HTTP is not served."""

FRONT_S, FRONT_START_S = 20.0, 120.0
"""A front that says nothing for so long counts as hung; the second number holds until it listens."""
LOAD_S = 120.0
"""Seconds for which an engine that loads may be silent; its watchdog may be more patient."""
HALT_S, QUIET_S = 1.0, 10.0
"""Seconds for which an engine may be silent that has ended, or one of several ranks that a signal has stopped; and any
that was stopped, or one of several ranks. Suspended with this process, it is not silent."""
SLOW_S = 5.0
"""Time until the next attempt when the system has no room for a process or a socket."""
DUMP_S = 1.0
"""Time for a stuck engine to write its stacks before it is killed."""
ANSWER_S = 3.0
"""Time for the front to send its metrics."""
LIVE = frozenset(
    (
        *("server.keys_file", "server.api_key", "server.requests_per_minute", "server.tokens_per_minute"),
        *("server.cors_origins", "server.allowed_hosts", "server.tls_cert", "server.tls_key", "log.level"),
    )
)
"""Settings that change while the server runs. Of the files that these name the contents are read again, too."""
TERMINAL = "/dev/tty"


class Supervisor:
    """Runs one server. `gpus`: names for all replicas, in their order, where each sees its own. `report_bound` is
    called when the ports are taken, `report_serving` when the first requests are taken. `reread` reads the settings
    again from their files. The processes load by functions "module:name", which tests replace."""

    def __init__(
        self,
        loaded: LoadedSettings,
        *,
        max_context: int | None = None,
        gpus: Sequence[str] = (),
        load_engine: str = "wicore_trt.process.engine:load_engine",
        load_tokenizer: str = "wicore_trt.serve.front:load_tokenizer",
        report_serving: Report = lambda address, url: None,
        report_bound: Report = lambda address, url: None,
        reread: Callable[[], LoadedSettings] | None = None,
    ) -> None:
        self._loaded, self._reread = loaded, reread or (lambda: loaded)
        self._ports: dict[str, Any] = {}  # where the front listens
        self._settings = settings_to_json(loaded.settings)
        self._had_terminal = has_terminal()
        self._grace_s = loaded.settings.server.grace_s
        self._max_context = max_context
        self._load_engine, self._load_tokenizer = load_engine, load_tokenizer
        self._report_serving, self._report_bound = report_serving, report_bound
        self._gpus, replicas = gpus, loaded.settings.server.replicas
        self._front = ChildSlot()
        self._engines = {"engine" if replicas == 1 else f"engine-{i}": ChildSlot() for i in range(replicas)}
        self._slots = {"front": self._front, **self._engines}
        self._front_bound = self._was_bound = self._served = self._stopping = self._refusing = False
        self._checked_build: str | None = None  # whose tokenizer a front has loaded
        self._idle = asyncio.Event()  # the front refuses generations and has none
        self._metrics: dict[int, tuple[list[str], asyncio.Future[str]]] = {}  # parts of answers, by call
        self._calls = itertools.count()
        self._admin: Any = None
        self._end: asyncio.Future[int] | None = None

    def run(self) -> int:
        """Serve until a signal; return the exit code: 0 when every request could finish, 1 when some were cancelled,
        130 for Ctrl-C before it served. Raises the error that engine or front report at their first start."""
        try:
            return asyncio.run(self._supervise())
        finally:
            logging.shutdown()  # flushes the log, so that a caller prints last

    async def _supervise(self) -> int:
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        try:
            server = self._loaded.settings.server
            if server.admin_port is not None:
                self._admin = import_named("wicore_trt.http.admin:AdminServer")(server, self)
                log.info("operators' calls on %s", await self._admin.start())
            self._start_front()
            for name in self._engines:
                self._start_engine(name)
            return await self._end
        finally:
            self._stopping = True
            left = [slot.process for slot in self._slots.values() if slot.process is not None]
            for process in left:
                loop.remove_reader(process.control.sock.fileno())
                process.kill()
            for process in left:
                process.wait_for_end(KILL_S)
            if self._admin is not None:
                await self._admin.stop(0)

    # --- processes -----------------------------------------------------------------------------------------------

    def _start_engine(self, name: str) -> None:
        replica = [*self._engines].index(name)
        child = self._engines[name].start_process(
            "wicore_trt.process.engine", partial(self._on_engine_message, name), partial(self._on_exit, name),
            divide_gpus(self._gpus, replica, len(self._engines)),
        )  # fmt: skip
        settings = divide_settings(self._loaded.settings, replica, self._gpus)
        child.control.send("start", settings=settings_to_json(settings), loader=self._load_engine)
        self._watch_engine(name, child)

    def _start_front(self) -> None:
        self._front_bound = False
        for engine in self._engines.values():
            engine.links = 0
        self._idle.clear()
        child = self._front.start_process(
            "wicore_trt.serve.front", self._on_front_message, partial(self._on_exit, "front")
        )
        child.control.send(
            "start", settings=self._settings, loader=self._load_tokenizer, max_context=self._max_context,
            checked_build=self._checked_build, waits=not self._served,
        )  # fmt: skip
        if self._refusing:
            child.control.send("refuse")
        self._watch_front(child)

    def _watch_front(self, front: Child) -> None:
        if front is not self._front.process or self._stopping:
            return
        if self._front.silent_s >= (FRONT_S if self._front_bound else FRONT_START_S):
            log.error("the front hangs: no sign of life for %.0f s; ending it", self._front.silent_s)
            self._front.kill_process()
            return
        self._front.silent_s += BEAT_S
        asyncio.get_running_loop().call_later(BEAT_S, self._watch_front, front)

    def _watch_engine(self, name: str, process: Child | None) -> None:
        limit_s, engine = self._loaded.settings.server.watchdog_s, self._engines[name]
        if process is None or process is not engine.process or limit_s is None:
            return
        loop, ranked = asyncio.get_running_loop(), engine.ranks > 1
        silent_s, stuck_s = engine.silent_s, max(engine.silent_s, engine.stuck_s)
        engine.silent_s += BEAT_S
        halt = find_halt(process.pid) if silent_s >= HALT_S else None
        lost = halt == ENDED or (halt and ranked) or ((halt or ranked) and silent_s >= QUIET_S)
        if not lost and stuck_s < (limit_s if engine.loaded else max(limit_s, LOAD_S)):
            loop.call_later(BEAT_S, self._watch_engine, name, process)
            return
        had = "had work and ended no step" if engine.stuck_s > silent_s else "gave no sign of life"
        why = f"its process {halt}" if halt else f"it {had} for {stuck_s:.0f} s"
        if engine.loaded and self._front.process is not None:  # the link may break much later
            self._front.process.control.send("lost", replica=[*self._engines].index(name), why=why)
        if halt == ENDED:
            loop.call_later(limit_s, process.kill)  # others of its threads may go on
            return
        log.error("the %s is stuck: %s; the stacks of its threads follow", name, why)
        if engine.loaded:
            engine.error = EngineDeadError(f"The engine was ended: {why}.")
        process.send_signal(DUMP)
        engine.killed = True
        loop.call_later(DUMP_S, process.kill)

    def _join_processes(self, name: str) -> None:
        """Give engine and front a socket to each other if both have opened the same build; else end the older one."""
        slot = self._engines[name]
        engine, front = slot.process, self._front.process
        if engine is None or front is None or slot.killed or not (slot.loaded and self._front.loaded):
            return
        if slot.build != self._front.build and None not in (slot.build, self._front.build):
            name, older = min((name, slot), ("front", self._front), key=lambda item: item[1].started_at)
            log.error("the engine directory was rebuilt while it is served; restarting the %s to use it", name)
            older.kill_process()
            return
        try:
            one, other = socket.socketpair()
        except OSError as error:
            log.error("cannot connect engine and front: %s; trying again", error)
            self._call_later(SLOW_S, lambda: self._join_again(name, engine, front))
            return
        slot.links += 1
        with one, other:
            engine.control.send("link", [one.fileno()])
            front.control.send("link", [other.fileno()], replica=[*self._engines].index(name))

    def _join_again(self, name: str, engine: Child, front: Child) -> None:
        """Join them unless one has ended: its successor joins when it has loaded."""
        if self._engines[name].process is engine and self._front.process is front:
            self._join_processes(name)

    def _on_engine_message(self, name: str, message: dict[str, Any]) -> None:
        engine = self._engines[name]
        match message["kind"]:
            case "ready":
                engine.loaded, engine.build, engine.ranks = True, message["build"], message["ranks"]
                engine.ready_at = time.monotonic()
                self._join_processes(name)
            case "beat":
                engine.silent_s, engine.stuck_s = 0.0, message["stuck_s"]
            case "failed":
                engine.error = read_error(message)
            case "broke":
                engine.error = EngineDeadError(f"The engine stopped: {message['why']}.")

    def _on_front_message(self, message: dict[str, Any]) -> None:
        front = self._front
        match message["kind"]:
            case "loaded":
                front.loaded, front.build = True, message["build"]
                self._checked_build = front.build or self._checked_build
                for name in self._engines:
                    self._join_processes(name)
            case "bound":
                front.ready_at = time.monotonic()
                self._front_bound = True
                # the next front listens on the same ports, also where the system chose them
                self._ports = message["ports"]
                self._keep_settings(self._loaded)
                if not self._was_bound:
                    self._was_bound = True
                    self._report_bound(message["address"], message["url"])
            case "serving" if not self._served:
                self._served = True
                self._report_serving(message["address"], message["url"])
            case "idle":
                self._idle.set()
            case "beat":
                front.silent_s = 0.0
            case "metrics" if message["call"] in self._metrics:
                parts, answer = self._metrics[message["call"]]
                parts.append(message["text"])
                if message["last"] and not answer.done():
                    answer.set_result("".join(parts))
            case "unlinked":
                name, engine = [*self._engines.items()][message["replica"]]
                if message["links"] == engine.links:  # else another link is on its way
                    self._join_processes(name)
            case "failed":
                front.error = read_error(message)

    def _on_exit(self, name: str, code: int) -> None:
        """Start a process again that has ended, unless its error is final or it keeps ending and never served."""
        if self._stopping:
            return
        slot = self._slots[name]
        final = not self._served
        if name != "front":  # a machine that has served may lack memory for a while; a wrong setting stays wrong
            wrong = isinstance(slot.error, (ConfigError, EngineFormatError))
            final = slot.ended_unready and (final or (wrong and not any(e.loaded for e in self._engines.values())))
        fatal = slot.error if final else None
        guess = ", probably out of memory" if -code == signal.SIGKILL and not slot.killed else ""
        pause_s, why = slot.choose_pause(), slot.error or describe_exit(code) + guess
        if fatal is None and pause_s and not self._served:
            fatal = EngineDeadError(f"The {name} ended {PATIENCE + 1} times before it was ready ({why}).")
        if fatal is not None:
            self._finish_run(fatal)
            return
        log.error("the %s ended (%s); starting it again%s", name, why, f" in {pause_s:.0f} s" if pause_s else "")
        self._call_later(pause_s, self._start_front if name == "front" else partial(self._start_engine, name))

    def _call_later(self, seconds: float, start: Callable[[], None]) -> None:
        def begin() -> None:
            try:
                if not self._stopping:
                    start()
            except (OSError, MemoryError) as error:
                log.error("cannot start a process: %s; trying again", error or type(error).__name__)
                self._call_later(SLOW_S, start)

        asyncio.get_running_loop().call_later(seconds, begin)

    # --- settings that change ------------------------------------------------------------------------------------

    def _on_hangup(self) -> None:
        """Reload the settings; but after its terminal was closed, end the server."""
        if self._had_terminal and not has_terminal():
            self._on_signal(signal.SIGHUP)
        elif not self._stopping:
            with suppress(WicoreError):
                self.reload_settings()

    def _keep_settings(self, loaded: LoadedSettings) -> None:
        self._loaded, settings = loaded, loaded.settings
        self._settings = settings_to_json(replace(settings, server=replace(settings.server, **self._ports)))

    def reload_settings(self) -> tuple[Sequence[str], Sequence[str]]:
        """Apply the settings as written now, where they can change; return the keys that changed, and those for a
        restart. Raises ConfigError, changing nothing."""
        try:
            loaded, changed, restart = check_reload(self._loaded, self._reread)
            if self._admin is not None:
                self._admin.change(loaded.settings.server)
        except WicoreError as error:
            log.error("settings were not reloaded: %s", error)
            raise
        self._keep_settings(loaded)
        level = loaded.settings.log.level
        log.info("reloaded settings, keys and certificates; changed: %s", ", ".join(changed) or "none")
        set_level(level)
        if restart:
            log.warning("these settings need a restart: %s", ", ".join(restart))
        for engine in self._engines.values():
            if engine.process is not None:
                engine.process.control.send("level", level=level)
        if self._front.process is not None:
            self._front.process.control.send("settings", settings=self._settings)
        return changed, restart

    # --- operators' calls ----------------------------------------------------------------------------------------

    async def drain(self, wait_s: float) -> bool:
        """Make fronts refuse generations from now on; return whether none is left after `wait_s` seconds."""
        if not self._refusing:
            self._refusing = True
            log.info("generations are refused from now on")
            if self._front.process is not None:
                self._front.process.control.send("refuse")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), wait_s)
        return self._idle.is_set()

    def list_settings(self) -> list[dict[str, Any]]:
        """List key, value and source of each setting; secrets are masked."""
        return [{"key": key, "value": value, "source": source} for key, value, source in self._loaded.rows()]

    async def collect_metrics(self) -> tuple[str, dict[str, tuple[bool, int]]]:
        """Return the front's metrics as text ("" while it hangs), and whether each process runs, and its restarts."""
        text = ""
        if self._front.process is not None:
            call, answer = next(self._calls), asyncio.get_running_loop().create_future()
            self._metrics[call] = [], answer
            self._front.process.control.send("metrics", call=call)
            with suppress(TimeoutError):
                text = await asyncio.wait_for(answer, ANSWER_S)
            del self._metrics[call]
        return text, {name: (slot.process is not None, max(0, slot.restarts)) for name, slot in self._slots.items()}

    # --- the end -------------------------------------------------------------------------------------------------

    def _finish_run(self, outcome: int | WicoreError) -> None:
        assert self._end is not None
        if self._end.done():
            return
        if isinstance(outcome, WicoreError):
            self._end.set_exception(outcome)
        else:
            self._end.set_result(outcome)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping:
            log.warning("second signal: exit at once")
            for slot in self._slots.values():
                slot.kill_process()
            logging.shutdown()
            os._exit(128 + number)
        log.info("%s received", number.name)
        self._stopping = True
        asyncio.ensure_future(self._shut_down(128 + number if number == signal.SIGINT and not self._served else 0))

    async def _shut_down(self, code: int) -> None:
        """Let the front finish its requests, then end all; finish with `code` if all requests could finish."""
        front, front_code = self._front.process, 0
        if self._served and front is not None:
            front.control.send("drain")
            front_code = await wait_for_exit(front, self._grace_s + 2 * STOP_S)
        engines = [slot.process for slot in self._engines.values() if slot.process is not None and slot.loaded]
        for engine in engines:
            engine.control.send("stop", timeout_s=STOP_S)
        await asyncio.gather(*(wait_for_exit(engine, 2 * STOP_S) for engine in engines))
        self._finish_run(1 if front_code else code)


def check_reload(
    given: LoadedSettings, read: Callable[[], LoadedSettings]
) -> tuple[LoadedSettings, tuple[str, ...], tuple[str, ...]]:
    """Compute the change from the running settings to those written now: settings to apply, the keys that change now,
    and the keys that differ but need a restart. Raises ConfigError for wrong settings or files."""
    written = read()
    running, wanted = given.settings, written.settings
    differ = [key for key in KEYS if value_of(wanted, key) != value_of(running, key)]
    changed = tuple(key for key in differ if key in LIVE)
    restart = [key for key in differ if key not in LIVE]
    server = replace(
        running.server, **{k.rpartition(".")[2]: value_of(wanted, k) for k in changed if k.startswith("server.")}
    )
    if (server.tls_cert is None) != (running.server.tls_cert is None):
        raise ConfigError("TLS cannot be switched on or off while the server runs.", fix="Start it again.")
    Admission.from_settings(server)
    read_tls(server)
    if (server.api_key, server.keys_file) == (None, None) != (running.server.api_key, running.server.keys_file):
        raise ConfigError("A server with API keys is not opened to everybody while it runs.", fix="Start it again.")
    log = replace(running.log, level=wanted.log.level)
    sources = {key: where for key in KEYS if (where := (given if key in restart else written).sources.get(key))}
    return LoadedSettings(replace(running, server=server, log=log), sources), changed, tuple(restart)


def has_terminal() -> bool:
    """Tell whether this process has a controlling terminal that is still open."""
    try:
        os.close(os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
