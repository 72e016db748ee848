"""Hold the state that routes share: engine, limits, open generations.

Must not know routes. Invariants: `idle` is set while no generation is open; a generation is counted from before the
engine has it until its last stream is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wicore_trt.access.admission import Admission
from wicore_trt.errors import UnavailableError
from wicore_trt.http.intake import MANY_ITEMS, BodyBudget
from wicore_trt.metrics.machine import GpuUse

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine


@dataclass(slots=True)
class Context:
    """State of one server. The engine is attached when it is ready."""

    admission: Admission
    max_body_bytes: int
    local: bool = False
    """Whether this machine alone reaches the address by its own name."""
    allowed_hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    """Web pages of these may call."""
    body_budget: BodyBudget = field(default_factory=BodyBudget)
    draining: bool = False
    open: Counter[str] = field(default_factory=Counter)  # generations by tenant
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = field(default_factory=time.time)  # seconds since 1970
    gpus: asyncio.Future[Sequence[GpuUse]] | None = None
    """Last question to the driver."""
    engine: TextEngine | None = None
    max_items: int = MANY_ITEMS
    """Objects, lists and items that a body may have: a prompt of token ids has one for each."""

    def __post_init__(self) -> None:
        self.idle.set()

    def attach(self, engine: TextEngine) -> None:
        self.engine = engine
        self.max_items = MANY_ITEMS + 2 * engine.info.max_context_tokens

    @property
    def state(self) -> str:
        """State: starting, serving, degraded (some replica has ended), draining, or broken (the engine has ended, and
        the next one may be starting)."""
        if self.draining:
            return "draining"
        if self.engine is None:
            return "starting"
        if self.engine.dead is not None:
            return "broken"
        return "degraded" if any(part.dead is not None for part in self.engine.engine.parts) else "serving"

    def require_engine(self) -> TextEngine:
        """Return the engine. Raises UnavailableError while it is loading."""
        if self.engine is None:
            raise UnavailableError("The engine is still loading.", fix="Wait until /ready answers 200.")
        return self.engine

    def require_serving(self) -> TextEngine:
        """Return the engine for a new generation. Raises UnavailableError when the server starts or ends."""
        if self.draining:
            raise UnavailableError("The server is shutting down.", fix="Send the request to another server.")
        return self.require_engine()

    @contextmanager
    def count_generation(self, tenant: str) -> Iterator[None]:
        self.open[tenant] += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.open[tenant] -= 1
            if not self.open[tenant]:
                del self.open[tenant]
            if not self.open:
                self.idle.set()
