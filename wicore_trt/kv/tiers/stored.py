"""One stored page in one tier, and the states it passes through.

Plain data; it must not know which tier it is in or what is evicted. Invariant: a copy moves along `TRANSITIONS` only,
so that nothing that was freed is written, read or freed again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from wicore_trt.kv.pages.page import Page


class CopyState(enum.Enum):
    """WRITING is filled now; READY can be read; LOST left the index while its buffers are still touched; FREE is
    final."""

    __hash__ = object.__hash__

    WRITING = "writing"
    READY = "ready"
    LOST = "lost"
    FREE = "free"


TRANSITIONS: dict[CopyState, frozenset[CopyState]] = {
    CopyState.WRITING: frozenset({CopyState.READY, CopyState.LOST, CopyState.FREE}),
    CopyState.READY: frozenset({CopyState.LOST, CopyState.FREE}),
    CopyState.LOST: frozenset({CopyState.FREE}),
    CopyState.FREE: frozenset(),
}


Checksum = tuple[bytes, Page]
"""The digest of a page's bytes, and the identity that they belong to: equal only where both are."""


@dataclass(slots=True, eq=False)
class TierCopy:
    """One page in one tier. `readers` count transfers that read its slots; `checksum` is set by the tier that checks
    it; `saved`: the next tier has had it, or is not to have it; `origin` is the tier it was fetched from and not used
    since, for the statistics; `private`: one sequence alone can use it; `found`: it was ready once, and not private, so
    events tell when it leaves."""

    page: Page
    slots: tuple[int, ...]
    state: CopyState = CopyState.WRITING
    readers: int = 0
    checksum: Checksum | None = None
    saved: bool = False
    origin: str = ""
    private: bool = False
    found: bool = False

    @property
    def ready(self) -> bool:
        return self.state is CopyState.READY

    @property
    def being_read(self) -> bool:
        """Whether its bytes are still to come from the tier below."""
        return self.state is CopyState.WRITING and self.origin != ""

    def move(self, state: CopyState) -> None:
        """Change state; an illegal transition is a bug of ours."""
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state
        self.found = self.found or (self.ready and not self.private)


@dataclass(slots=True, eq=False)
class TierNode:
    """All copies of one page index of a chain. `busy` counts writers, readers and one for a session's hold (`held`);
    `spare`: the local copy is to leave before any other page."""

    key: bytes
    tenant: bytes
    copies: dict[str, TierCopy] = field(default_factory=dict)
    busy: int = 0
    held: bool = False
    spare: bool = False

    @property
    def slots(self) -> int:
        return sum(len(copy.slots) for copy in self.copies.values())
