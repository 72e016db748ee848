"""The engine process: loads the engine, serves its front, ends when told or when the engine breaks.

It must not know clients or text. Invariants: it tells the supervisor why it ends, unless it is killed, and every BEAT_S
seconds whether it makes progress. On DUMP it writes the stacks of its threads to standard error, whatever they do.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading

from wicore_trt.access import log as log_lines
from wicore_trt.child_process import import_named
from wicore_trt.collector import collect_rarely
from wicore_trt.config import Settings, settings_from_json
from wicore_trt.core.loop import Core
from wicore_trt.errors import RankError, WicoreError, missing_package, shortened
from wicore_trt.link.host import EngineHost
from wicore_trt.process.child import BEAT_S, DUMP, MAX_TEXT, Control
from wicore_trt.types import ModelInfo

log = logging.getLogger(__name__)


def load_engine(settings: Settings) -> tuple[Core, ModelInfo]:
    """Load the engine that the settings name. Raises the errors of `core.assemble.load_engine`."""
    from wicore_trt.core import assemble

    loaded = assemble.load_engine(settings, serves=True)
    return loaded.core, loaded.info


def main(fd: int) -> int:
    """Run the engine process; `fd` is its control socket. Return the exit code."""
    control = Control.from_fd(fd)
    first = control.receive_message()
    if first is None:
        return 0
    start = first[0]
    settings = settings_from_json(start["settings"])
    log_lines.configure_logging(json_lines=settings.log.json, level=settings.log.level)
    faulthandler.register(DUMP)
    loaded = threading.Event()
    threading.Thread(target=_send_beats, args=(control, loaded), name="wicore-beats", daemon=True).start()
    try:
        core, info = import_named(start["loader"])(settings)
    except WicoreError as error:
        control.send_error(error)
        return error.exit_code
    except RankError as error:  # told as no final error, so that the supervisor starts the engine again
        log.error("the engine could not be loaded: %s", error)
        return 1
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (lacking := missing_package(error.name)):
            control.send_error(lacking)
            return lacking.exit_code
        log.exception("the engine could not be loaded")
        control.send_error(WicoreError(f"The engine could not be loaded: {type(error).__name__}: {error}"))
        return 1
    collect_rarely()
    host = EngineHost(core, info, max_waiting=settings.scheduler.max_waiting)
    host.start()
    loaded.set()
    control.send("ready", build=info.build, ranks=info.ranks)
    threading.Thread(target=_obey_supervisor, args=(control, host), name="wicore-control", daemon=True).start()
    # counts beats, not time, so that a suspended machine counts as one beat
    last, same = host.engine.progress, 0
    while not host.engine.ended.wait(BEAT_S):
        now = host.engine.progress
        last, same = now, same + 1 if now is not None and now == last else 0
        control.send("beat", stuck_s=same * BEAT_S)  # for how long it has had work and ended no step
    if host.engine.dead is not None:
        control.send("broke", why=shortened(host.engine.dead, MAX_TEXT))
    logging.shutdown()
    os._exit(1 if host.engine.dead is not None else 0)  # not sys.exit, which would wait for hanging threads


def _send_beats(control: Control, loaded: threading.Event) -> None:
    while not loaded.wait(BEAT_S):
        control.send("beat", stuck_s=0.0)


def _obey_supervisor(control: Control, host: EngineHost) -> None:
    while (received := control.receive_message()) is not None:
        message, fds = received
        if message["kind"] == "link":
            if fds:
                host.attach(socket.socket(fileno=fds[0]))
            else:  # the front finds its end closed and asks again
                log.warning("too many files are open here for a link to the front")
        elif message["kind"] == "level":
            log_lines.set_level(message["level"])
        elif message["kind"] == "stop":
            host.stop(message["timeout_s"])
            return
    os._exit(1)
