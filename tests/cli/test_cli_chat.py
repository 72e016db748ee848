"""`wicore chat` piped and on a terminal, over gRPC and HTTP, against a real server on the fake engine."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from page.browser import KEY, Url, answer_to, prompt_with, server
from web import png

from wicore_trt.cli.chat import strip_controls

WICORE = [sys.executable, "-m", "wicore_trt.cli.main", "chat"]
GREEDY = ["--temperature", "0", "--top-p", "1"]


@pytest.fixture(scope="module")
def hold(tmp_path_factory) -> Path:
    """While it is there, the engine stands still."""
    return tmp_path_factory.mktemp("engine") / "hold"


@pytest.fixture(scope="module")
def url(hold) -> Iterator[Url]:
    with server(chat=True, images=True, hold=str(hold)) as found:
        yield found


def piped(where: str, text: str, *more: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WICORE, where, *GREEDY, *more], input=text, capture_output=True, text=True, timeout=60, **kwargs
    )


def test_piped_turns_are_answered_in_order(url, tmp_path):
    done = piped(url, "hello\n\nmore\n/save talk.json\n/reset\n//slash\n", "--system", "be", cwd=tmp_path)
    first = answer_to("behello")
    second = answer_to(f"behello{first}more")
    assert (done.returncode, done.stdout) == (0, "".join(f"{a}\n" for a in (first, second, answer_to("be/slash"))))
    said = json.loads((tmp_path / "talk.json").read_text())
    assert [turn["role"] for turn in said] == ["system", "user", "assistant", "user", "assistant"]
    assert [turn["content"] for turn in said] == ["be", "hello", first, "more", second]
    assert "\x1b" not in done.stdout + done.stderr


def test_a_file_that_is_there_is_left(url, tmp_path):
    (tmp_path / "mine").write_text("mine")
    done = piped(url, "/save mine\nhello\n", cwd=tmp_path)
    assert done.returncode == 1 and "File exists" in done.stderr and (tmp_path / "mine").read_text() == "mine"


def test_without_a_template_text_goes_on():
    with server(chat=False) as url:
        done = piped(url, "hello\nmore\n", "--max-tokens", "5")
    assert "no chat template" in done.stderr
    first, second = answer_to("hello", 5), answer_to("hello\n" + answer_to("hello", 5) + "\nmore", 5)
    assert done.stdout == f"{first}\n{second}\n"


def test_keys_and_addresses_that_are_wrong():
    with server(chat=True, server={"api_key": KEY}) as url:
        done = piped(url, "hello\n")
        assert done.returncode == 1 and "needs an API key" in done.stderr and done.stderr.count("\n") == 1
        done = piped(url, "hello\n", "--api-key", "another")
        assert done.returncode == 1 and "This API key is not one of the server's. Ask its operator" in done.stderr
        assert piped(url, "hello\n", "--api-key", KEY).stdout == answer_to("hello") + "\n"
    for where in (url, "127.0.0.1:1", "no/such"):
        done = piped(where, "hello\n")
        assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done


def test_over_grpc(url):
    assert piped(url.address, "hello\n").stdout == answer_to("hello") + "\n"


IMAGE = "<start_of_image>"


def test_images_are_shown_with_the_next_line(url, tmp_path):
    for name in "ab":
        (tmp_path / f"{name} one.png").write_bytes(png(ord(name)))
    lines = "hello\n/image b one.png\nmore\n/save talk.json\n/image none.png\n"
    done = piped(url, lines, "--image", "a one.png", cwd=tmp_path)
    first = answer_to(f"{IMAGE}hello")
    assert done.stdout == f"{first}\n{answer_to(f'{IMAGE}hello{first}{IMAGE}more')}\n", done.stderr
    assert done.returncode == 1 and "'none.png' cannot be read" in done.stderr
    kept = json.loads((tmp_path / "talk.json").read_text())
    assert kept[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert piped(url.address, "hello\n", "--image", "a one.png", cwd=tmp_path).stdout == first + "\n"


class Terminal:
    """The command on a terminal, and somebody who types."""

    def __init__(self, *args: str) -> None:
        self._file, theirs = pty.openpty()
        env = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [*WICORE, *args, *GREEDY], stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def until(self, text: str) -> str:
        """What came until this text did."""
        while text not in self.seen:
            try:
                self.seen += os.read(self._file, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it ended: {self.seen!r}") from None
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        self.type("\x04")
        code = self.process.wait(timeout=60)
        os.close(self._file)
        return code


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends(url, hold):
    terminal = Terminal(url)
    terminal.until("> ")
    hold.touch()
    terminal.type(prompt_with(450) + "\r")
    deadline = time.monotonic() + 60
    while httpx.get(f"{url}/status").json()["requests_open"] != 1:
        assert time.monotonic() < deadline
    terminal.interrupt()
    assert "Traceback" not in terminal.until("> ")
    hold.unlink()
    while httpx.get(f"{url}/status").json()["requests_open"]:
        assert time.monotonic() < deadline
    terminal.interrupt()
    terminal.until("Ctrl-D ends.")
    terminal.until("> ")
    terminal.type("/reset\r")
    terminal.until("A new conversation.")
    terminal.type("hello\r")
    assert strip_controls(answer_to("hello")) in terminal.until("from the cache").replace("\r\n", "\n")
    terminal.until("> ")
    assert terminal.end() == 0


def test_what_a_model_writes_cannot_steer_a_terminal():
    assert strip_controls("a\x1b]0;x\x07b\x9b2J\x7f\r\n\tc\u00e9") == "a]0;xb2J\n\tc\u00e9"
