"""Reads TensorRT's messages during a build: errors, memory, chosen kernels and progress.

Parses log lines, because inspecting a plan means loading it, which takes a GPU. Must not know networks or files.
Invariant: a build that fails ends in an error that carries TensorRT's own words.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

_KERNEL = re.compile(r"^Name: (?P<name>.+?), LayerType: (?P<type>\w+), .*?Outputs: \[ \{.*?Datatype: (?P<dtype>\w+)")
_MEMORY = re.compile(r"Total Activation Memory: (\d+) bytes")
_WEIGHT = re.compile(r"Name: ((?:transformer\.|lm_head\.)[\w.]+\.weight),")
_REARRANGED = re.compile(r"^__myl_(?:Cast|Mul|Resh|Move|Repl)*Tran")
_ATTENTION = re.compile(r"_mha_|_fmha")
_DTYPES = {"Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "FP8": "fp8", "Int32": "int32"}
_DTYPES |= {"Int64": "int64", "Bool": "bool"}


@dataclass(slots=True)
class BuildLog:
    """Facts of one build. `kernels` counts the plan's kernels by kind ("gemm", "attention", "kgen": fused elementwise,
    ...), `precisions` by the dtype that they write. `activation_bytes` is the device memory that the plan needs beside
    inputs and outputs, 0 where TensorRT did not say. `rearranged` are weights that the plan transposes in every step,
    which costs bandwidth."""

    errors: list[str] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    precisions: Counter[str] = field(default_factory=Counter)
    rearranged: set[str] = field(default_factory=set)
    activation_bytes: int = 0

    def line(self, severity: str, text: str) -> None:
        if severity in ("ERROR", "INTERNAL_ERROR"):
            self.errors.append(text)
        elif severity == "WARNING":
            log.info("tensorrt: %s", text)
        elif memory := _MEMORY.search(text):
            self.activation_bytes = max(self.activation_bytes, int(memory[1]))
        else:
            for part in text.split("\n"):
                self._count_kernel(part)

    def _count_kernel(self, text: str) -> None:
        kernel = _KERNEL.match(text)
        if kernel is None:
            return
        kind = "attention" if _ATTENTION.search(kernel["name"]) else kernel["type"]
        self.kernels[kind] += 1
        if _REARRANGED.match(kernel["name"]):
            self.rearranged.update(_WEIGHT.findall(text.partition("Outputs: [")[0]))
        self.precisions[_DTYPES.get(kernel["dtype"], kernel["dtype"].lower())] += 1

    def reason(self) -> str:
        return " | ".join(dict.fromkeys(self.errors)) or "it gave no reason"


def make_logger(trt: Any, book: BuildLog) -> Any:

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            book.line(severity.name, message)

    return Logger()


def make_monitor(trt: Any, report: Callable[[float], None]) -> Any:
    """Make a trt.IProgressMonitor that reports the fraction done, never going back."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._phases: dict[str, list[Any]] = {}  # name: [parent, steps, steps done]
            self._best = 0.0
            self._lock = threading.Lock()

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            with self._lock:
                self._phases[name] = [parent, max(1, steps), 0]

        def step_complete(self, name: str, step: int) -> bool:
            with self._lock:
                if name in self._phases:
                    self._phases[name][2] = step + 1
                    self._report_progress(name)
            return True

        def phase_finish(self, name: str) -> None:
            with self._lock:
                self._phases.pop(name, None)

        def _report_progress(self, name: str | None) -> None:
            """Report the fraction done, where a phase is one step of its parent."""
            fraction = 0.0
            while name is not None and name in self._phases:
                parent, steps, done = self._phases[name]
                fraction = min(1.0, (done + fraction) / steps)
                name = parent
            if fraction > self._best:
                self._best = fraction
                report(fraction)

    return Monitor()
