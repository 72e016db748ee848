"""States of a sequence and the transitions that are legal, in one table."""

from __future__ import annotations

import enum


class SequenceState(enum.Enum):
    """WAITING holds no pages; RUNNING does; FINISHED is final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# A preempted sequence goes back to WAITING with its tokens and is computed again, or found in the cache.
TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}
