"""A server that clients are tried on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil


@dataclass
class Served:
    """A server: its URL, its gRPC address, the served model."""

    process: subprocess.Popen[str]
    url: str
    address: str
    model: str

    def child(self, name: str) -> psutil.Process:
        """Its process of this name: engine or front."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        [child] = [p for p in found if p.is_running() and any(name in part for part in p.cmdline())]
        return child

    def stats(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/v1/stats").json()


@contextmanager
def serving(engine: Path, log: Path) -> Iterator[Served]:
    """A server of an engine, which has to end well. `log` is where its log goes."""
    command = [sys.executable, "-m", "wicore_trt.cli.main", "serve", str(engine), "--grpc-port", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--http-port", "0"], stdout=subprocess.PIPE, stderr=stderr, text=True, env=env
        )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("ready on ").strip()
        url = process.stdout.readline().removeprefix("HTTP on ").strip()
        assert url, log.read_text()
        yield Served(process, url, address, httpx.get(f"{url}/v1/models").json()["data"][0]["id"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0 and "Traceback" not in log.read_text(), log.read_text()[-10_000:]
    finally:
        process.kill()
