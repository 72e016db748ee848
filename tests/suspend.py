"""Suspension of a process under test. Invariant: when `suspend_process` returns, no thread of the process runs."""

from __future__ import annotations

import os
import signal
import time

import psutil


def suspend_process(pid: int) -> None:
    """Stop a process and wait until all its threads stand still: on a busy machine they go on for a while."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 60
    while {psutil.Process(thread.id).status() for thread in psutil.Process(pid).threads()} != {psutil.STATUS_STOPPED}:
        assert time.monotonic() < end, f"process {pid} goes on"
        time.sleep(0.01)
