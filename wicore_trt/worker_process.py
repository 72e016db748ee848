"""Run jobs in a process of its own, whose time and memory the kernel bounds: both sides of it.

A job is bytes from strangers that a program or a decoder reads. Must not know what jobs mean. Invariant: every job
gets its answer, or the reason why it has none. A worker keeps nothing after a job, and ends when its owner does.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from wicore_trt.errors import UnavailableError, shortened

T = TypeVar("T")
WAIT_SECONDS = 60.0
"""Seconds after which a machine counts as too busy for a job's processor time."""
_MESSAGE = 300  # characters of what went wrong
ANSWERS = -1
"""Worker's file in memory for its answers, which its owner reads."""
_PIPE_BYTES = 1 << 20  # as much as Linux lets a user have
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": f"{1 << 27}", "MALLOC_TRIM_THRESHOLD_": f"{1 << 28}",
           "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
"""Settings of glibc: a job uses the memory of the last one. New pages take longer than a picture's arithmetic. Numpy
needs no threads."""
_PYTHON = sys.executable  # that of this program, whatever others make of the name later
_CODE = """
import json, sys
_, module, path, answers = sys.argv
sys.path[:] = json.loads(path)
from importlib import import_module
import_module("wicore_trt.worker_process").ANSWERS = int(answers)
import_module(module).main()
"""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of one job: seconds of processor time; bytes of memory beside what the worker has when it is ready, of an
    answer, and of the stack (0: as usual)."""

    cpu_seconds: float
    memory: int
    answer: int
    stack: int = 0


class JobFailure(Exception):
    """Failure of a job, with the reason as the end of a sentence; `ended` where it ended the worker."""

    def __init__(self, why: str, *, ended: bool = True) -> None:
        super().__init__(why)
        self.ended = ended


class WorkerProcess:
    """Owner of a process that runs `module`, whose `main` calls `serve_jobs`; jobs come one at a time, from any
    thread. The process starts with the first job or with `start_worker`, and is replaced when it has ended."""

    def __init__(self, module: str, limits: WorkerLimits) -> None:
        self._module, self._limits = module, limits
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._answers = -1  # a file in memory; sealed, so that it holds one answer at most
        self._starter = 0  # the process that started it: a fork has none
        os.register_at_fork(after_in_child=self._reset_lock)
        atexit.register(self._kill_worker)

    def start_worker(self) -> None:
        """Start the process unless it runs."""
        with self.lock:
            self._find_worker()

    def run_job(self, *parts: bytes) -> bytes:
        """Return the answer to a job, which is the `parts` in a row. Raises JobFailure, and UnavailableError when no
        process can be started."""
        return self.copy_answer(parts, lambda file, size: os.pread(file, size, 0))

    def copy_answer(self, parts: Sequence[bytes], copy: Callable[[int, int], T]) -> T:
        """Return what `copy` makes of the answer, the file that holds it and its bytes: a copy, which no worker changes
        later. Raises as `run_job`, and what `copy` raises."""
        with self.lock:  # a worker that another killed, for the machine's memory say, is no fault of the job
            head = self._ask_worker(parts) or self._ask_worker(parts)
            if head is None:
                raise JobFailure("its process was killed twice")
            if head[:1] != b"+":
                raise JobFailure(head[1:].decode("utf-8", "replace"), ended=False)
            size = min(int.from_bytes(head[1:], "little"), self._limits.answer)
            return copy(self._answers, size)

    def _find_worker(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self._starter == os.getpid() and self.process.poll() is None:
            return self.process
        path = json.dumps([os.path.abspath(place) for place in sys.path])
        pipe = subprocess.PIPE
        self._close_answers()
        try:
            self._answers = os.memfd_create("answers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._answers, self._limits.answer)
            fcntl.fcntl(self._answers, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            worker = subprocess.Popen(
                [_PYTHON, "-P", "-c", _CODE, self._module, path, str(self._answers)], stdin=pipe, stdout=pipe,
                stderr=subprocess.DEVNULL, start_new_session=True, cwd="/", pass_fds=(self._answers,),
                env=os.environ | _MALLOC,
            )  # fmt: skip
        except OSError as error:
            self._close_answers()
            raise UnavailableError(f"A process cannot be started now: {error}.", fix="Try again soon.") from None
        for stream in (worker.stdin, worker.stdout):
            assert stream is not None
            with suppress(OSError):
                fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.process, self._starter = worker, os.getpid()
        return worker

    def _ask_worker(self, parts: Sequence[bytes]) -> bytes | None:
        """Ask the worker and return the head of its answer; None where another process killed it."""
        worker, began = self._find_worker(), time.monotonic()
        assert worker.stdin is not None and worker.stdout is not None
        late = threading.Timer(WAIT_SECONDS, worker.kill)  # also when it neither reads the job nor ends its answer
        late.daemon = True
        try:
            late.start()
            _write_frame(worker.stdin, *parts)
            return _read_frame(worker.stdout, 8 * _MESSAGE)
        except (EOFError, OSError):
            why, waited = self._end_worker(worker), time.monotonic() - began
            if worker.returncode in (-signal.SIGKILL, -signal.SIGTERM):
                if waited < WAIT_SECONDS:
                    return None
                raise UnavailableError("A job got no time of this machine's processors.", fix="Try again.") from None
            raise JobFailure(why) from None
        except BaseException:  # KeyboardInterrupt: the answer on its way must not become that of the next job
            worker.kill()
            self._end_worker(worker)
            raise
        finally:
            late.cancel()

    def _end_worker(self, worker: subprocess.Popen[bytes]) -> str:
        """End a worker that gave no answer; return why, as far as it is known."""
        self.process = None
        self._close_answers()
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
            return f"it takes more than {self._limits.cpu_seconds:g} s"
        return f"its process ended with code {code}, for its memory or its recursion"

    def _close_answers(self) -> None:
        if self._answers >= 0:
            os.close(self._answers)
        self._answers = -1

    def _reset_lock(self) -> None:
        self.lock = threading.Lock()  # another thread may have held it, which is not in the child

    def _kill_worker(self) -> None:
        if self.process is not None and self._starter == os.getpid():
            self.process.kill()
            self._end_worker(self.process)


# Protocol, on stdin and stdout: a length in 8 bytes and that much. An answer is "-" and a reason, or "+" and the size
# (little endian) of an answer in ANSWERS.
def _read_frame(stream: IO[bytes], most: int) -> bytes:
    """Read one frame. Raises EOFError when the stream has ended, or the frame is longer than `most` bytes."""
    head = stream.read(8)
    size = struct.unpack("<Q", head)[0] if len(head) == 8 else most + 1
    data = stream.read(size) if size <= most else b""
    if len(data) != size:
        raise EOFError
    return data


def _write_frame(stream: IO[bytes], *parts: bytes) -> None:
    stream.write(struct.pack("<Q", sum(map(len, parts))))
    for part in parts:
        stream.write(part)
    stream.flush()


def serve_jobs(answer: Callable[[bytes], bytes | int], limits: WorkerLimits) -> None:
    """Answer jobs until stdin ends, in the worker. `answer` returns an answer, or the bytes of one that it wrote into
    ANSWERS. It raises JobFailure for a reason to tell; whatever else it raises is one, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the owner ends this process by closing stdin
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, also inside of a long operation
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + limits.memory
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(limits.stack)
    thread = threading.Thread(target=_answer_jobs, args=(answer, limits))
    thread.start()
    thread.join()


def _answer_jobs(answer: Callable[[bytes], bytes | int], limits: WorkerLimits) -> None:
    with suppress(EOFError, BrokenPipeError):
        while True:
            job = _read_frame(sys.stdin.buffer, limits.memory)
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
            parts = _try_answer(answer, job, limits)
            del job
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write_frame(sys.stdout.buffer, *parts)
            del parts


def _try_answer(answer: Callable[[bytes], bytes | int], job: bytes, limits: WorkerLimits) -> tuple[bytes, bytes]:
    try:
        found = answer(job)
        if isinstance(found, int):
            return b"+", found.to_bytes(8, "little")
        if len(found) <= limits.answer and os.pwrite(ANSWERS, found, 0) == len(found):
            return b"+", len(found).to_bytes(8, "little")
        why = f"it makes more than {limits.answer} bytes"
    except JobFailure as error:
        why = str(error)
    except MemoryError:
        why = "it takes too much memory"
    except Exception as error:
        why = shortened(" ".join(f"{type(error).__name__}: {error}".split()), _MESSAGE)
    return b"-", why.encode("utf-8", "replace")
