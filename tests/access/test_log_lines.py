"""Lines of the server's log: bounded whatever clients write, and nobody waits for whoever reads them."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading

import pytest

from wicore_trt.access import log
from wicore_trt.errors import shown

LONG = "x" * (1 << 20)


def record(message: str, exc_info=None, **facts) -> logging.LogRecord:
    made = logging.LogRecord("wicore_trt", logging.INFO, __file__, 0, message, None, exc_info)
    made.facts = facts
    return made


@pytest.mark.parametrize("formatter", [log.LineFormatter(), log.JsonFormatter()], ids=lambda f: type(f).__name__)
def test_lines_are_bounded_whatever_is_in_them(formatter):
    try:
        raise ValueError(LONG)
    except ValueError:
        exc_info = sys.exc_info()
    line = formatter.format(record(LONG, exc_info, error=LONG, peer="\x00" * (1 << 20), tokens=3))
    assert len(line) < 40_000 and "ValueError" in line
    if isinstance(formatter, log.JsonFormatter):
        assert json.loads(line)["tokens"] == 3


def test_clients_texts_are_quoted_short():
    assert len(shown(LONG)) <= 80 and shown("abc") == "'abc'" and shown(LONG) == "'" + "x" * 76 + "..."


def test_lines_that_nobody_read_are_counted():
    begun, reads, written = threading.Event(), threading.Event(), queue.Queue()

    def write(line: bytes) -> None:
        begun.set()
        reads.wait(60)
        for text in line.decode().splitlines():
            written.put(text)

    handler = log.DroppingHandler(write, max_lines=5)
    handler.setFormatter(log.LineFormatter())
    handler.handle(record("the first"))
    assert begun.wait(60)
    for number in range(100):
        handler.handle(record(f"line {number}"))
    reads.set()
    assert "line 4" in [written.get(timeout=60) for _ in range(6)][-1]
    handler.handle(record("read"))
    assert "95 lines of the log were lost" in written.get(timeout=60)
    handler.close()


CORE_COMPLAINS = """
import asyncio
from wicore_trt.access import log
log.configure_logging()
import grpc
async def main():
    try:
        grpc.aio.server().add_insecure_port("256.1.1.1:1")
    except RuntimeError:
        print("refused")
asyncio.run(main())
"""


@pytest.mark.parametrize("chosen", [None, "ERROR"])
def test_grpcs_core_writes_nothing_to_stderr_unless_the_user_wants_it(chosen):
    env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    env |= {"GRPC_VERBOSITY": chosen} if chosen else {}
    done = subprocess.run([sys.executable, "-c", CORE_COMPLAINS], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout == "refused\n", done.stderr
    assert bool(done.stderr) == bool(chosen)


def test_the_serve_command_sets_up_the_log_before_grpc_is_imported():
    code = (
        "import os, sys; from wicore_trt.cli.main import run_command; run_command(['serve', '/nonexistent/engine']); "
        "assert 'grpc' not in sys.modules or os.environ['GRPC_VERBOSITY']"
    )
    env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr


def test_an_error_does_not_wait_for_a_full_pipe_that_nobody_reads():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    code = "from wicore_trt.cli import main; main.run_command(['serve', '/nonexistent/engine'])"
    try:
        subprocess.run([sys.executable, "-c", code], stderr=writer, timeout=60, check=True)
    finally:
        os.close(reader)
        os.close(writer)
