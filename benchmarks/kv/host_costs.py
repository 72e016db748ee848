"""Seconds of the engine's thread by what it did: what a run on a machine measures, and a simulation is given.

`counted` times the product's functions from outside. It must not know how they work. Invariant: each second counts
once, for the innermost of the functions under way, and none while the thread waits for the device.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from functools import wraps
from typing import Any
from unittest import mock

from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.copy_down import CopyDown
from wicore_trt.kv.prefix.loader import PrefixLoader
from wicore_trt.kv.tiers.down import DownTransfers
from wicore_trt.kv.tiers.up import LoadPump, UpTransfers
from wicore_trt.schedule.scheduler import Scheduler

KINDS: dict[str, tuple[tuple[type, str], ...]] = {
    "step": ((EngineCore, "step"),),
    "prompt": (
        (EngineCore, "add"), (Scheduler, "_find_prefix"), (Scheduler, "_give_pages"), (PrefixLoader, "end_load"),
        (Scheduler, "end_sequence"),
    ),
    "ask": ((UpTransfers, "_begin_reads"), (LoadPump, "_ask_next")),
    "land": ((UpTransfers, "_end_read"), (LoadPump, "take_arrivals"), (UpTransfers, "apply_uploaded")),
    "store": (
        (CopyDown, "begin_copies"), (DownTransfers, "apply_copied"), (DownTransfers, "begin_saves"),
        (DownTransfers, "end_save"),
    ),
}  # fmt: skip

COUNTED = {
    "step": "submit", "prompt": "add", "ask": "_begin_reads", "land": "_end_read", "store": "apply_copied",
    "launch": "launch",
}  # fmt: skip
"""Functions by kind: a call counts as one step, prompt, page or launch, or for its pages (`PAGES`)."""

PAGES: dict[str, Callable[[Any], int]] = {"_begin_reads": len, "_end_read": lambda move: len(move.pages)}


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Milliseconds of the engine's thread: `step` for each step, `launch` for one that needs more than a graph,
    `prompt` for each; for a page of the disk `ask` until it is asked for and `land` once it was read; `store` for a
    page that goes down."""

    step: float = 0.0
    prompt: float = 0.0
    ask: float = 0.0
    land: float = 0.0
    store: float = 0.0
    launch: float = 0.0

    def __str__(self) -> str:
        """As an argument of `benchmarks.kv.sessions_simulation`."""
        return "--host-ms " + ",".join(f"{value:.3g}" for value in astuple(self))


class Counted:
    """Seconds by kind and calls by function, so far."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds, self.calls = defaultdict[str, float](float), Counter[str]()
        self._clock, self._kinds, self._since = clock, list[str](), 0.0

    def enter(self, kind: str) -> None:
        now = self._clock()
        if self._kinds:
            self.seconds[self._kinds[-1]] += now - self._since
        self._kinds.append(kind)
        self._since = now

    def leave(self) -> None:
        now = self._clock()
        self.seconds[self._kinds.pop()] += now - self._since
        self._since = now

    @property
    def costs(self) -> HostCosts:
        """Milliseconds of a step, a prompt, a launch and a page so far."""
        return HostCosts(**{kind: 1e3 * self.seconds[kind] / max(1, self.calls[of]) for kind, of in COUNTED.items()})


@contextmanager
def counted(
    executor: Any, *, clock: Callable[[], float] = time.perf_counter, graph_tokens: int = 1 << 30
) -> Iterator[Counted]:
    """Count time and calls within a `with` block. A step of more than `graph_tokens` tokens is a launch."""
    found = Counted(clock)

    def timed(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            found.calls[function.__name__] += PAGES[function.__name__](args[1]) if function.__name__ in PAGES else 1
            launched = kind == "submit" and args[-1].num_tokens > graph_tokens
            found.calls["launch"] += launched
            found.enter("launch" if launched else "step" if kind == "submit" else kind)
            try:
                return function(*args, **given)
            finally:
                found.leave()

        return call

    with ExitStack() as stack:
        names = [(kind, *place) for kind, places in KINDS.items() for place in places]
        names += [("submit", type(executor), "submit"), ("wait", type(executor), "collect")]
        names += [("wait", type(executor), "execute"), ("wait", EngineCore, "_wait_or_fail")]
        for kind, owner, name in names:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), kind)))
        yield found
