"""State of one way into a server: its engine, whether it drains, and its open generations.

It must not know transports or limits. Invariant: `idle` is set exactly while no generation is open.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from wicore_trt.errors import UnavailableError

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine


def _make_set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(eq=False)
class EntryState:
    """State of one way into the server, gRPC or HTTP. The engine is attached when it is ready; while `draining`, new
    generations are refused. `open` counts generations by tenant, and `idle` is set while there is none."""

    loading_fix: ClassVar[str]
    """Advice to a client that comes before the engine."""
    engine: TextEngine | None = field(default=None, init=False)
    draining: bool = field(default=False, init=False)
    open: Counter[str] = field(default_factory=Counter, init=False)
    idle: asyncio.Event = field(default_factory=_make_set_event, init=False)

    def require_engine(self) -> TextEngine:
        """Return the engine. Raises UnavailableError while it is loading."""
        if self.engine is None:
            raise UnavailableError("The engine is still loading.", fix=self.loading_fix)
        return self.engine

    def require_serving(self) -> TextEngine:
        """Return the engine for a new generation. Raises UnavailableError when the server starts or ends."""
        if self.draining:
            raise UnavailableError("The server is shutting down.", fix="Send the request to another server.")
        return self.require_engine()

    @contextmanager
    def count_generation(self, tenant: str) -> Iterator[TextEngine]:
        """Yield the engine to a generation. Raises UnavailableError as `require_serving` does."""
        engine = self.require_serving()
        self.open[tenant] += 1
        self.idle.clear()
        try:
            yield engine
        finally:
            self.open[tenant] -= 1
            if not self.open[tenant]:
                del self.open[tenant]
            if not self.open:
                self.idle.set()
