"""A real server on the fake engine and a real Chromium that looks at its page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from fake_tokenizer import IMAGE_SOFT
from fakes import FakeEncoder, greedy
from process.fake_parts import AnyTextTokenizer

TESTS = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TOKENIZER = AnyTextTokenizer()
KEY = "the-operators-own-key"


class Url(str):
    """Of a server whose gRPC is at `address`."""

    address: str


@contextmanager
def server(**options) -> Iterator[Url]:
    """A supervised server; gives its URL when it is ready."""
    settings = {"http_port": 0, "grace_s": 5.0, **options.pop("server", {})}
    command = [
        sys.executable,
        str(TESTS / "process" / "fake_parts.py"),
        json.dumps({**options, "server": settings, "both": True}),
    ]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    try:
        *_, address, url = process.stdout.readline().split()
        url = Url(url)
        url.address = address
        process.stdout.readline()
        for _ in range(3000):
            if httpx.get(f"{url}/ready").status_code == 200:
                break
            time.sleep(0.02)
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=60)


def answer_to(text: str, most: int = 512) -> str:
    """Answer of the fake model; <start_of_image> is an image."""
    head, *rest = (TOKENIZER.encode(part) for part in text.split("<start_of_image>"))
    image = [*TOKENIZER.encode("\n\n<start_of_image>"), *[IMAGE_SOFT] * FakeEncoder.tokens, *TOKENIZER.encode("~\n\n")]
    return TOKENIZER.decode(greedy(sum(([*image, *part] for part in rest), head), most))


def prompt_with(least: int) -> str:
    """A prompt with an answer of at least so many characters."""
    return next(p for i in range(10**6) if len(answer_to(p := f"prompt {i}", 4 * least)) >= least)
