"""A page in motion between device, host memory and disk: the stages it passes, and what other threads report of it.

Down go a `Store` (device to host) and a `Save` (host to disk), up go a `Read` (disk to host) and a `Fetch` (to whoever
asked, in host memory or on the device). Only the engine thread changes them; a thread that moved or checked bytes puts
a report into the mailbox and touches nothing else. Plain data; it must not know copiers, files or threads. Invariant:
a move goes along its `LEGAL` stages only, so none is applied twice or after its end.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import ClassVar

from wicore_trt.kv.disk.io import Outcome
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.stored import TierCopy


class Stage(enum.Enum):
    """Where a page in motion is. PLACED, FAILED, RELEASED and ENDED are final."""

    COPYING = "copying"
    """Its bytes go from the device to host memory."""
    CHECKING = "checking"
    """A thread hashes its bytes in host memory."""
    MOVING = "moving"
    """Its bytes go to or from disk."""
    LATE = "late"
    """The disk let its time limit pass: nobody waits any more, and the buffers may still be touched."""
    WAITING = "waiting"
    """It waits for another move that fills the host's copy."""
    HERE = "here"
    """It is in host memory, held for whoever asked, and verified unless the device does that."""
    PLACING = "placing"
    """Its bytes go from host memory to the device."""
    PLACED = "placed"
    """It is on the device, verified."""
    FAILED = "failed"
    RELEASED = "released"
    ENDED = "ended"


Table = Mapping[Stage, frozenset[Stage]]
DISK: Table = {
    Stage.MOVING: frozenset({Stage.LATE, Stage.ENDED}),
    Stage.LATE: frozenset({Stage.ENDED}),
    Stage.ENDED: frozenset(),
}


class Move:
    """`go` changes the stage; an illegal transition is a bug of ours."""

    LEGAL: ClassVar[Table]
    stage: Stage

    def go(self, stage: Stage) -> None:
        assert stage in self.LEGAL[self.stage], f"{type(self).__name__}: {self.stage} -> {stage}"
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
    """A host copy, held meanwhile, on its way to `target` on disk. `expires`: as it is written there, seconds since
    1970."""

    LEGAL: ClassVar[Table] = DISK
    copy: TierCopy
    target: TierCopy
    expires: int
    stage: Stage = Stage.MOVING


@dataclass(slots=True, eq=False)
class Read(Move):
    """A disk copy `source`, held meanwhile, on its way to a host copy. `queued`: bytes that were to be read before."""

    LEGAL: ClassVar[Table] = DISK
    copy: TierCopy
    source: TierCopy
    queued: int
    stage: Stage = Stage.MOVING


@dataclass(slots=True, eq=False)
class Fetch(Move):
    """A page that somebody asked for. It is put into `inbox` whenever it got HERE, PLACED or FAILED; after PLACING it
    may be HERE or FAILED, when what came to the device was not the page. From HERE until PLACED or RELEASED the host's
    `copy` is held. `unwanted`: it is released when it gets here; `wrong`: how often its bytes were not the page's.
    `wanted` says, on any thread, whether it is of use still: a read of the disk that has not begun is left out when it
    is of use to nobody, and the fetch then FAILED. `crowded`: it FAILED only because the disk's queue or the host was
    full just then, so that it may be asked for again."""

    LEGAL: ClassVar[Table] = {
        Stage.WAITING: frozenset({Stage.CHECKING, Stage.HERE, Stage.FAILED}),
        Stage.CHECKING: frozenset({Stage.HERE, Stage.WAITING}),
        Stage.HERE: frozenset({Stage.PLACING, Stage.RELEASED}),
        Stage.PLACING: frozenset({Stage.PLACED, Stage.WAITING}),
        Stage.PLACED: frozenset(),
        Stage.FAILED: frozenset(),
        Stage.RELEASED: frozenset(),
    }
    page: Page
    inbox: deque[Fetch]
    copy: TierCopy | None = None
    stage: Stage = Stage.WAITING
    unwanted: bool = False
    wrong: int = 0
    wanted: Callable[[], bool] = lambda: True
    crowded: bool = False

    @property
    def held(self) -> TierCopy:
        """The host's copy of a page that is here."""
        assert self.copy is not None and self.stage in (Stage.HERE, Stage.PLACING, Stage.PLACED)
        return self.copy


# --- reports of other threads; `digest` and `seconds` as `executor.Done` has them ------------------------------------


@dataclass(frozen=True, slots=True)
class Copied:
    move: Store
    digest: bytes | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Hashed:
    moves: Sequence[Store]
    checksums: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Saved:
    move: Save
    outcome: Outcome
    seconds: float


@dataclass(frozen=True, slots=True)
class HaveRead:
    move: Read
    outcome: Outcome
    seconds: float


@dataclass(frozen=True, slots=True)
class Checked:
    move: Fetch
    right: bool


@dataclass(frozen=True, slots=True)
class Placed:
    move: Fetch
    digest: bytes | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Backed:
    """Host slots [first, stop), which were withheld, have memory that nothing else uses."""

    first: int
    stop: int


Report = Copied | Hashed | Saved | HaveRead | Checked | Placed | Backed
Mailbox = SimpleQueue[Report]
