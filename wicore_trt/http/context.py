"""Hold the state that routes share: engine, limits, open generations.

Must not know routes. Invariant: a generation is counted from before the engine has it until its last stream is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wicore_trt.access.entry import EntryState
from wicore_trt.http.intake import MANY_ITEMS, BodyBudget
from wicore_trt.metrics.machine import GpuUse

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine


@dataclass(eq=False)
class Context(EntryState):
    loading_fix = "Wait until /ready answers 200."
    max_body_bytes: int
    local: bool = False
    """True where this machine alone reaches the address by its own name."""
    allowed_hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    """Origins of web pages that may call."""
    body_budget: BodyBudget = field(default_factory=BodyBudget)
    began: float = field(default_factory=time.time)  # seconds since 1970
    gpus: asyncio.Future[Sequence[GpuUse]] | None = None
    """Last question to the driver."""
    max_items: int = MANY_ITEMS
    """Objects, lists and items that a body may have: a prompt of token ids has one for each."""

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
