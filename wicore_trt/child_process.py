"""Starts of processes that belong to this one. Must not know what they do.

Invariants: a child ends when its parent does, however that ends, and ignores the signals that end a server; it imports
from where its parent does, so the current folder adds nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PF_ENDING = 0x4 | 0x8 | 0x200  # linux/sched.h: PF_EXITING, and PF_POSTCOREDUMP and PF_DUMPCORE of one that dumps core
ENDED = "has ended"
_CODE = """
import json, sys
_, module, given, path, parent = sys.argv
sys.path[:] = json.loads(path)
from importlib import import_module
import_module("wicore_trt.child_process").tie_to_parent(int(parent))
sys.exit(import_module(module).main(json.loads(given)))
"""


def child_command(module: str, given: object) -> list[str]:
    """Make the command of a child of this process that runs `main(given)` of `module`, with `given` as JSON."""
    return [sys.executable, "-P", "-c", _CODE, module, json.dumps(given), json.dumps(sys.path), str(os.getpid())]


def start_beside(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a child from a thread that lasts as long as the child: to the kernel the parent is a thread, and the
    calling one may end earlier. Raises OSError."""
    started: Future[subprocess.Popen[bytes]] = Future()

    def run() -> None:
        try:
            started.set_result(subprocess.Popen(command, **options))
        except BaseException as error:
            started.set_exception(error)
            return
        with suppress(ChildProcessError):  # another thread has waited for it
            os.waitid(os.P_PID, started.result().pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=run, name="wicore-child", daemon=True).start()
    return started.result()


def tie_to_parent(parent: int) -> None:
    """Kill this process when its parent ends, also if that has ended already, and ignore SIGTERM, SIGINT and SIGHUP."""
    # some service managers signal every process of a service: a child that obeyed would end requests too early
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def find_halt(pid: int) -> str | None:
    """Tell why a process does not go on by itself; a busy one does, or one under a debugger. A killed process gives its
    memory back before its sockets close, 10 GiB a second."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ended = state in "ZX" or int(fields[5]) & _PF_ENDING
        return ENDED if ended else "was stopped by a signal" if state == "T" else None
    return None


def import_named(place: str) -> Any:
    """Import the object at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
