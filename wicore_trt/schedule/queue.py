"""Waiting sequences in the order they should be admitted: priority with ageing.

The key is arrival + priority * AGEING_S: one priority level is worth AGEING_S seconds of waiting. Both terms are
fixed at arrival, so the order never changes with time, a plain heap is exact, and nobody waits for ever. A
preempted sequence keeps its key and so returns ahead of later arrivals. Invariant: a sequence is in the queue once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from wicore_trt.schedule.sequence import Sequence

AGEING_S = 5.0


def order_key(sequence: Sequence) -> tuple[float, int]:
    """Smaller runs earlier; ties by seq_id."""
    return (sequence.arrival + sequence.request.priority * AGEING_S, sequence.seq_id)


class WaitingQueue:
    """A heap; removal from the middle is linear, which cancellations are rare enough to pay."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []
        self._members: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """Members in no particular order."""
        return iter(list(self._members.values()))

    def push(self, sequence: Sequence) -> None:
        assert sequence.seq_id not in self._members
        self._members[sequence.seq_id] = sequence
        heapq.heappush(self._heap, (order_key(sequence), sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a member out; not being there is a bug of the caller."""
        del self._members[sequence.seq_id]
        self._heap = [entry for entry in self._heap if entry[1] is not sequence]
        heapq.heapify(self._heap)

    def first(self) -> Sequence | None:
        """The member to admit next, or None when empty."""
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence | None:
        """Take out and return the member to admit next, or None when empty."""
        if self._heap:
            _, sequence = heapq.heappop(self._heap)
            del self._members[sequence.seq_id]
            return sequence
        return None
