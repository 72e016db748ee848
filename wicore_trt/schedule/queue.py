"""Waiting sequences in the order they should be admitted: tenants in turn, each one's by priority with ageing.

Between tenants that wait, the one that was given the fewest places since it began to wait is next, so a tenant with a
thousand sequences delays another one by one sequence. Of one tenant the key is arrival + priority * AGEING_S: a
priority level is worth AGEING_S seconds of waiting. Both terms are fixed at arrival and priorities are bounded, so a
heap is exact and nobody is overtaken for longer than 2 * MAX_PRIORITY * AGEING_S. A preempted sequence keeps its key
and its place is given back, so it returns ahead of later arrivals. It must not know pages or who runs. Invariant: a
sequence is in the queue once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from wicore_trt.schedule.sequence import Sequence

AGEING_S = 5.0


def order_key(sequence: Sequence) -> tuple[float, int]:
    """Smaller runs earlier; ties by seq_id."""
    return (sequence.arrival + sequence.request.priority * AGEING_S, sequence.seq_id)


@dataclass(slots=True)
class _Tenant:
    """Waiting sequences of one tenant, a heap. `turns` counts the places it was given, beginning at what the others had
    when it began to wait."""

    turns: int = 0
    heap: list[tuple[tuple[float, int], Sequence]] = field(default_factory=list)


class WaitingQueue:
    """Taking is linear in the number of tenants that wait, removal from the middle in the tenant's sequences."""

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._now = 0  # turns of the tenant that was last given a place

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._members

    def __iter__(self) -> Iterator[Sequence]:
        """Members in no particular order."""
        return iter(list(self._members.values()))

    def counts(self) -> Mapping[str, int]:
        """Members by tenant, of those that have any."""
        return {name: len(tenant.heap) for name, tenant in self._tenants.items() if tenant.heap}

    def push(self, sequence: Sequence, behind: Sequence | None = None) -> None:
        """Add a sequence; one that was taken out gives its turn back. But when it gave way to `behind`, a member of
        another tenant, its tenant keeps the turn and comes after the other one."""
        assert sequence.seq_id not in self._members
        entry = (order_key(sequence), sequence)
        tenant = self._tenants.setdefault(sequence.request.tenant, _Tenant())
        if behind is not None:
            tenant.turns = max(tenant.turns, self._tenants[behind.request.tenant].turns + 1)
            sequence.had_turn = False
        elif sequence.had_turn:
            sequence.had_turn = False
            tenant.turns -= 1
        elif not tenant.heap:
            tenant.turns = max(tenant.turns, self._now)
        self._members[sequence.seq_id] = sequence
        heapq.heappush(tenant.heap, entry)

    def remove(self, sequence: Sequence) -> None:
        """Take a member out; not being there is a bug of the caller."""
        del self._members[sequence.seq_id]
        tenant = self._tenants[sequence.request.tenant]
        tenant.heap = [entry for entry in tenant.heap if entry[1] is not sequence]
        heapq.heapify(tenant.heap)

    def first(self) -> Sequence | None:
        """The member to admit next, or None when empty."""
        tenant = self._next()
        return tenant.heap[0][1] if tenant is not None else None

    def pop(self) -> Sequence | None:
        """Take out and return the member to admit next, or None when empty."""
        tenant = self._next()
        if tenant is None:
            return None
        _, sequence = heapq.heappop(tenant.heap)
        del self._members[sequence.seq_id]
        self._now = tenant.turns
        tenant.turns += 1
        sequence.had_turn = True
        return sequence

    def _next(self) -> _Tenant | None:
        waiting = [tenant for tenant in self._tenants.values() if tenant.heap]
        return min(waiting, key=lambda tenant: (tenant.turns, tenant.heap[0][0]), default=None)
