"""A page in motion between device, host memory and disk: the stages it passes.

Down go a `Store` (device to host) and a `Save` (host to disk). Up go a `Read` (disk to host) and a `Fetch` (to whoever
asked, in host memory); of many pages, a `ChecksumJob` (in host memory) and an `Upload` (host to device). Only the
engine thread changes them. Plain data; it must not know copiers, files or threads. Invariants (I6): a move goes along
its `LEGAL` stages, so none is applied twice or after its end; a copy along `TRANSITIONS`, so nothing freed is used.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from msgspec import Struct

from wicore_trt.kv.disk.io import PageMove
from wicore_trt.kv.pages.page import Page


class CopyState(enum.Enum):
    """WRITING is filled now; READY can be read; LOST left the index, its buffers still touched; FREE is final."""

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


class TierCopy(Struct, eq=False, gc=False):
    """Page in one tier, a Struct as it is smallest. The number of its `slots` tells whether it is coded. `readers`
    count transfers that read them; `checksum` is set by the tier that checks it; `saved`: the next tier has had it, or
    is not to have it; `origin` is the tier it was fetched from and not used since, for the statistics; `found`: it was
    ready once, so events tell when it leaves; None where they never do, as one sequence alone can use it."""

    page: Page
    slots: Sequence[int]
    state: CopyState = CopyState.WRITING
    readers: int = 0
    checksum: Checksum | None = None
    saved: bool = False
    origin: str = ""
    found: bool | None = False

    @property
    def ready(self) -> bool:
        return self.state is CopyState.READY

    @property
    def being_read(self) -> bool:
        """True while its bytes are still to come from the tier below."""
        return self.state is CopyState.WRITING and self.origin != ""

    def change_state(self, state: CopyState) -> None:
        """Change state; an illegal transition is a bug of ours."""
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state} (I6)"
        self.state = state
        self.found = self.ready if self.found is False else self.found


class Stage(enum.Enum):
    """Stage of a page in motion. TAKEN, FAILED and ENDED are final."""

    __hash__ = object.__hash__  # tables of stages are read for each page, and Enum's own is a function of Python

    COPYING = "copying"
    """Bytes go from the device to host memory."""
    CHECKING = "checking"
    """A thread hashes the bytes in host memory."""
    MOVING = "moving"
    """Bytes go to or from disk."""
    LATE = "late"
    """The disk let its time limit pass: nobody waits any more, and the buffers may still be touched."""
    WAITING = "waiting"
    """Another move fills the host's copy."""
    HERE = "here"
    """The page is in host memory, held for the fetch, and verified unless the device does that."""
    TAKEN = "taken"
    """The fetch's owner holds the host's copy from here on, or let go of it."""
    UPLOADING = "uploading"
    """Bytes go from host memory to the device."""
    FAILED = "failed"
    ENDED = "ended"


Table = Mapping[Stage, frozenset[Stage]]
DISK: Table = {
    Stage.MOVING: frozenset({Stage.LATE, Stage.ENDED}),
    Stage.LATE: frozenset({Stage.ENDED}),
    Stage.ENDED: frozenset(),
}


class Move:
    """Page or pages in motion. `enter_stage` changes the stage; an illegal transition is a bug of ours."""

    LEGAL: ClassVar[Table]
    stage: Stage

    def enter_stage(self, stage: Stage) -> None:
        assert stage in self.LEGAL[self.stage], f"{type(self).__name__}: {self.stage} -> {stage} (I6)"
        self.stage = stage


@dataclass(slots=True, eq=False)
class Store(Move):
    """A page of the device on its way to a host copy. CHECKING only where the device does not compute digests."""

    LEGAL: ClassVar[Table] = {
        Stage.COPYING: frozenset({Stage.CHECKING, Stage.ENDED}),
        Stage.CHECKING: frozenset({Stage.ENDED}),
        Stage.ENDED: frozenset(),
    }
    copy: TierCopy
    stage: Stage = Stage.COPYING


@dataclass(slots=True, eq=False)
class Save(Move):
    """A host copy, held meanwhile, on its way to `target` on disk. `expires` as written there: seconds since 1970."""

    LEGAL: ClassVar[Table] = DISK
    copy: TierCopy
    target: TierCopy
    expires: int
    stage: Stage = Stage.MOVING


@dataclass(slots=True, eq=False)
class Read(Move):
    """Disk copies, `sources`, held meanwhile, on their way to host copies; `asked` by `time.perf_counter`."""

    LEGAL: ClassVar[Table] = DISK
    copies: list[TierCopy]
    sources: list[TierCopy]
    pages: list[PageMove]
    asked: float
    stage: Stage = Stage.MOVING


@dataclass(slots=True, eq=False)
class Fetch(Move):
    """A page that somebody asked for. It is put into `inbox` when it is HERE or FAILED. While it is HERE the host's
    `copy` is held. `unwanted`: it is released when it gets here; `wrong`: how often its bytes were not the page's.
    `wanted` says, on any thread, whether it is of use still: a read of use to nobody is left out if it has not begun,
    and the fetch then FAILED. `crowded`: it FAILED only because the disk's queue or the host was full just then."""

    LEGAL: ClassVar[Table] = {
        Stage.WAITING: frozenset({Stage.CHECKING, Stage.HERE, Stage.FAILED}),
        Stage.CHECKING: frozenset({Stage.HERE, Stage.WAITING}),
        Stage.HERE: frozenset({Stage.TAKEN}),
        Stage.TAKEN: frozenset(),
        Stage.FAILED: frozenset(),
    }
    page: Page
    inbox: deque[Fetch]
    copy: TierCopy | None = None
    stage: Stage = Stage.WAITING
    unwanted: bool = False
    wrong: int = 0
    wanted: Callable[[], bool] = lambda: True
    crowded: bool = False

    def take_copy(self) -> TierCopy:
        """Hand the host's copy of a page that is HERE to the caller, who releases it."""
        self.enter_stage(Stage.TAKEN)
        assert self.copy is not None
        return self.copy


OnVerdict = Callable[[Sequence[int], bool], None]
"""Hears once, on the engine thread, of each copy by its place whether its bytes were right; a wrong one is dropped."""


@dataclass(slots=True, eq=False)
class ChecksumJob(Move):
    """Host copies, held, whose bytes a thread hashes. Right ones are held still when `on_verdict` hears of them."""

    LEGAL: ClassVar[Table] = {Stage.CHECKING: frozenset({Stage.ENDED}), Stage.ENDED: frozenset()}
    copies: Sequence[TierCopy]
    on_verdict: OnVerdict
    stage: Stage = Stage.CHECKING


@dataclass(slots=True, eq=False)
class Upload(Move):
    """Host copies of one layer group, held meanwhile, on their way into device slots. Right ones are on the device when
    `on_verdict` hears of them, some at a time and in order, and not held any more; so far of the first `told`."""

    LEGAL: ClassVar[Table] = {Stage.UPLOADING: frozenset({Stage.ENDED}), Stage.ENDED: frozenset()}
    copies: Sequence[TierCopy]
    on_verdict: OnVerdict
    told: int = 0
    stage: Stage = Stage.UPLOADING
