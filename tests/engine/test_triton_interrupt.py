"""Ctrl-C and kill -9 while the processes that compile kernels run: one line, and none of them stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny_source

from wicore_trt.cores import count_cores

pytest.importorskip("triton", reason="pip install -e .[triton]")

from wicore_trt.backends.triton.compile import hold_interrupts

SIZES = {"hidden_size": 32, "head_dim": 16, "intermediate_size": 48, "num_hidden_layers": 2}
STARTED = 30.0  # seconds until there must be workers, on a busy machine
WORKERS = "multiprocessing.spawn"


def workers_of(session: int) -> list[int]:
    """Living processes of a session that compile kernels."""
    shown = subprocess.run(["ps", "-s", str(session), "-o", "pid=,args="], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in shown.splitlines() if WORKERS in line]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_no_worker_outlives_the_build(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SIZES.items():
        monkeypatch.setitem(tiny_source.CONFIG, name, value)  # type: ignore[arg-type]
    source = tiny_source.write_tiny_source(tmp_path / "source")
    command = [sys.executable, "-m", "wicore_trt.cli.main", "build", str(source), str(tmp_path / "out")]
    build = subprocess.Popen(
        [*command, "--backend", "triton", "--target", "sm90"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    deadline = time.monotonic() + STARTED
    while len(workers_of(build.pid)) < min(2, count_cores()):
        assert build.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    if number == signal.SIGINT:
        os.killpg(build.pid, number)  # as a terminal does
    else:
        build.kill()
    told = build.communicate(timeout=60)[1]
    deadline = time.monotonic() + 60
    while workers_of(build.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not workers_of(build.pid)
    if number == signal.SIGINT:
        assert "Traceback" not in told
        assert build.returncode == 130 and told.splitlines()[-1] == "interrupted", told
        assert [p.name for p in tmp_path.iterdir() if "out" in p.name] == []


def test_an_interrupt_that_another_thread_gets_is_held_back() -> None:
    """As a library's threads do, this one does not block it; Python handles it in the main thread."""
    ended, reached = threading.Event(), False
    thread = threading.Thread(target=ended.wait)
    thread.start()
    come, told = socket.socketpair()
    told.setblocking(False)
    before, handler = signal.set_wakeup_fd(told.fileno()), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt), hold_interrupts():
            assert thread.ident is not None
            signal.pthread_kill(thread.ident, signal.SIGINT)
            assert come.recv(1) == bytes([signal.SIGINT])  # the other thread has got it
            reached = True
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(before)
        ended.set()
        thread.join()
        come.close()
        told.close()
    assert reached
