"""Output without a terminal is plain, with one it is drawn, and NO_COLOR is obeyed."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from wicore_trt.cli import _ui
from wicore_trt.cli._ui import human_bytes, print_table, progress

SCRIPT = """
from wicore_trt.cli._ui import print_table, progress
with progress() as report:
    for i in range(3):
        report("hash", i, 2)
print_table("files", ("name", "state"), [("a[b]", "ok"), ("c", "corrupted")])
"""


def on_a_terminal(**environ: str) -> str:
    reader, writer = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "CI")} | {"TERM": "xterm-256color"} | environ
    done = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=writer, stderr=writer, env=env)
    os.close(writer)
    text = b""
    while True:
        try:
            block = os.read(reader, 4096)
        except OSError:
            break
        if not block:
            break
        text += block
    assert done.wait() == 0
    os.close(reader)
    return text.decode()


def test_terminal_gets_a_bar_and_colours() -> None:
    text = on_a_terminal()
    assert "hash" in text and "100%" in text and "\x1b[31mcorrupted" in text and "a[b]" in text


def test_no_color() -> None:
    text = on_a_terminal(NO_COLOR="1")
    assert "corrupted" in text and "\x1b[31m" not in text and "\x1b[32m" not in text


def test_plain_output(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as report:
        for i in range(3):
            report("hash", i, 2)
    print_table("files", ("name", "state"), [("a[b]", "ok"), ("a longer name", "corrupted")])
    captured = capsys.readouterr()
    assert captured.err == "hash ...\n"
    assert captured.out == ("files:\n  name           state\n  a[b]           ok\n  a longer name  corrupted\n")
    with progress(quiet=True) as report:
        report("hash", 0, 1)
    assert capsys.readouterr().err == ""


def test_a_long_phase_says_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 4.0, 10.0, 12.0, 21.0])
    monkeypatch.setattr(_ui.time, "monotonic", lambda: next(now))
    with progress() as report:
        for done in (0, 20, 50, 60, 90):
            report("convert", done, 100)
    assert capsys.readouterr().err == "convert ...\nconvert 50 %\nconvert 90 %\n"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (1 << 50, "1024.0 TiB")]
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
