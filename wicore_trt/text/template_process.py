"""Own the process that renders chat templates: start it when needed, replace it when it ends.

One worker serves all tokenizers and keeps nothing after a job. Knows the protocol of `text.template_worker` and must
not know messages. Invariant: every job gets its result, or the reason why it has none, and no template takes more of
this process than the text of its answer.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from wicore_trt.text import template_worker
from wicore_trt.text.template_worker import CPU_SECONDS, read_answer, write_job

_WAIT_SECONDS = 60.0  # for a machine so busy that CPU_SECONDS take that long
_COMMAND = [sys.executable, "-P", os.path.abspath(template_worker.__file__)]  # by path: no other directory has a say
_lock = threading.Lock()
_worker: tuple[int, subprocess.Popen[bytes]] | None = None  # with the process that started it: a fork has none


def run_template(source: str, tokens: Mapping[str, str], values: Mapping[str, Any] | None) -> dict[str, str]:
    """Render `values` and `tokens` with a template; with `values` None list the names that it reads, one a line.
    Returns {"text"}, {"refused"} when it called raise_exception, or {"broken"}: why it has no text, as the end of a
    sentence. {"ended"} is added where the worker had to be ended."""
    job = {"source": source, "tokens": dict(tokens), "values": values}
    with _lock:  # a worker that another killed, for the machine's memory say, is no fault of the template
        return _ask_worker(job) or _ask_worker(job) or {"broken": "its process was killed twice", "ended": "1"}


def _ask_worker(job: Mapping[str, Any]) -> dict[str, str] | None:
    """Ask a worker; None where another process killed it."""
    global _worker
    if _worker is None or _worker[0] != os.getpid() or _worker[1].poll() is not None:
        pipe = subprocess.PIPE
        started = subprocess.Popen(
            _COMMAND, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/"
        )
        _worker = (os.getpid(), started)
    worker, began = _worker[1], time.monotonic()
    assert worker.stdin is not None and worker.stdout is not None
    late = threading.Timer(_WAIT_SECONDS, worker.kill)  # also when it neither reads the job nor ends its answer
    late.daemon = True
    try:
        late.start()
        write_job(worker.stdin, job)
        return read_answer(worker.stdout)
    except (EOFError, OSError):
        why, waited = _end_worker(worker), time.monotonic() - began
        killed = worker.returncode in (-signal.SIGKILL, -signal.SIGTERM) and waited < _WAIT_SECONDS
        return None if killed else {"broken": why, "ended": "1"}
    except BaseException:  # KeyboardInterrupt: the answer on its way must not become that of the next job
        worker.kill()
        _end_worker(worker)
        raise
    finally:
        late.cancel()


def _end_worker(worker: subprocess.Popen[bytes]) -> str:
    """End a worker that gave no answer; return why, as far as it is known."""
    global _worker
    _worker = None
    try:
        code = worker.wait(1.0)  # of a process that has just ended
    except subprocess.TimeoutExpired:
        worker.kill()
        code = worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        assert pipe is not None
        with suppress(OSError):  # of what was not written yet
            pipe.close()
    if code in (-signal.SIGPROF, -signal.SIGKILL):
        return f"it takes more than {CPU_SECONDS:g} s"
    return f"its process ended with code {code}, for its memory or its recursion"


def _reset_lock() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it, which is not in the child


os.register_at_fork(after_in_child=_reset_lock)


@atexit.register
def _kill_worker() -> None:
    if _worker is not None and _worker[0] == os.getpid():
        _worker[1].kill()
        _end_worker(_worker[1])
