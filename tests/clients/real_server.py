"""A server that clients are tried on."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
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
