"""Order waiting sequences for admission, and estimate how long a newcomer waits among them.

The next tenant holds the fewest places; among equals, it was given the fewest since it began to wait. So a tenant with
a thousand sequences, preempted ones too, delays another one by one sequence. Must not know pages. Invariant (I18): a
sequence is in the queue once, and holds a place from `pop_next` to `push_sequence`, `undo_pops` or `end_place`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from wicore_trt.request_fields import MAX_PRIORITY
from wicore_trt.types import GenerateRequest

AGEING_S = 5.0


class Queued(Protocol):
    """Fields that the queue reads of a sequence, and `turn`, which it writes (`schedule.sequence.Sequence`)."""

    seq_id: int
    request: GenerateRequest
    arrival: float
    cost_s: float
    turn: int | None


S = TypeVar("S", bound=Queued)


def order_key(sequence: Queued) -> tuple[float, int]:
    """Sort key within a tenant, smallest first: arrival + priority * AGEING_S + cost_s; ties by seq_id. A prompt that
    takes ten seconds lets those pass that arrive in its first ten. No term changes while a sequence waits, and
    priorities are bounded. So a heap is exact, and nobody is overtaken by a sequence that came later than cost_s + 2 *
    MAX_PRIORITY * AGEING_S after it. A preempted sequence returns with its key, ahead of later arrivals."""
    return (sequence.arrival + sequence.request.priority * AGEING_S + sequence.cost_s, sequence.seq_id)


@dataclass(slots=True)
class QueueEntry(Generic[S]):
    """Entry of a heap. Its sequence is None once taken out from the middle."""

    key: tuple[float, int]
    sequence: S | None

    def __lt__(self, other: QueueEntry[S]) -> bool:
        return self.key < other.key


@dataclass(slots=True)
class _TenantQueue(Generic[S]):
    """Waiting sequences of one tenant in a heap, and the places that it holds. `turns` counts the places it was given,
    beginning at no fewer than any that ended before. The heap's first entry has a sequence, and so has half of it."""

    turns: int = 0
    held: int = 0
    count: int = 0
    heap: list[QueueEntry[S]] = field(default_factory=list)

    def drop_removed(self) -> None:
        """Drop entries without a sequence; rebuild the heap only when they are the majority."""
        if 2 * self.count < len(self.heap):
            self.heap = [entry for entry in self.heap if entry.sequence is not None]
            heapq.heapify(self.heap)
        while self.heap and self.heap[0].sequence is None:
            heapq.heappop(self.heap)


class WaitingQueue(Generic[S]):
    """Queue of all tenants. Taking a member is linear in the number of tenants that wait."""

    def __init__(self) -> None:
        self._members: dict[int, QueueEntry[S]] = {}
        self._tenants: dict[str, _TenantQueue[S]] = {}
        self._now = 0  # most turns with which a place was given that was given up since

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: S) -> bool:
        return sequence.seq_id in self._members

    def __iter__(self) -> Iterator[S]:
        return iter([entry.sequence for entry in self._members.values() if entry.sequence is not None])

    def count_by_tenant(self) -> Mapping[str, int]:
        return {name: tenant.count for name, tenant in self._tenants.items() if tenant.count}

    def copy_entries(self) -> dict[str, list[QueueEntry[S]]]:
        """Copy the waiting entries by tenant, in no particular order, for any thread to read later."""
        return {name: tenant.heap.copy() for name, tenant in self._tenants.items() if tenant.count}

    def push_sequence(self, sequence: S) -> None:
        """Add a sequence; it gives up the place that it may hold."""
        assert sequence.seq_id not in self._members
        tenant = self._tenants.setdefault(sequence.request.tenant, _TenantQueue())
        if sequence.turn is not None:
            tenant.turns -= 1
            self.end_place(sequence)
        tenant.turns = max(tenant.turns, self._now)
        self._push_entry(sequence, tenant)

    def undo_pops(self, sequences: Iterable[S]) -> None:
        """Undo the `pop_next` of sequences that did not run."""
        for sequence in sequences:
            tenant = self._tenants[sequence.request.tenant]
            tenant.turns -= 1
            tenant.held -= 1
            sequence.turn = None
            self._push_entry(sequence, tenant)

    def end_place(self, sequence: S) -> None:
        """Give up the place of a sequence that was taken out."""
        assert sequence.turn is not None
        self._tenants[sequence.request.tenant].held -= 1
        self._now = max(self._now, sequence.turn)
        sequence.turn = None

    def _push_entry(self, sequence: S, tenant: _TenantQueue[S]) -> None:
        entry = self._members[sequence.seq_id] = QueueEntry(order_key(sequence), sequence)
        heapq.heappush(tenant.heap, entry)
        tenant.count += 1

    def remove_member(self, sequence: S) -> None:
        """Take a member out; an absent one is a bug of the caller."""
        self._members.pop(sequence.seq_id).sequence = None
        tenant = self._tenants[sequence.request.tenant]
        tenant.count -= 1
        tenant.drop_removed()

    def peek_next(self) -> S | None:
        tenant = self._next_tenant()
        return tenant.heap[0].sequence if tenant is not None else None

    def pop_next(self) -> S | None:
        """Take out the member to admit next and give it a place; None when empty."""
        tenant = self._next_tenant()
        if tenant is None:
            return None
        sequence = heapq.heappop(tenant.heap).sequence
        assert sequence is not None
        del self._members[sequence.seq_id]
        tenant.count -= 1
        tenant.drop_removed()
        sequence.turn = tenant.turns
        tenant.turns += 1
        tenant.held += 1
        return sequence

    def _next_tenant(self) -> _TenantQueue[S] | None:
        best = None
        for tenant in self._tenants.values():
            if tenant.heap:
                rank = (tenant.held, tenant.turns, tenant.heap[0].key)
                if best is None or rank < best[0]:
                    best = rank, tenant
        return best[1] if best is not None else None


@dataclass(slots=True)
class Newcomers:
    """Counts of requests that came since the outlook was made: sequences and prompt tokens, by tenant and priority."""

    _sequences: Counter[tuple[str, int]] = field(default_factory=Counter)
    _tokens: Counter[tuple[str, int]] = field(default_factory=Counter)

    def add_request(self, request: GenerateRequest) -> None:
        name = request.tenant, request.priority
        self._sequences[name] += request.params.n
        self._tokens[name] += len(request.prompt_token_ids)

    def count_before(self, request: GenerateRequest) -> tuple[int, int]:
        """Count the tenant's earlier sequences of the same or a more urgent priority, and their tokens."""
        sequences = tokens = 0
        for priority in range(-MAX_PRIORITY, request.priority + 1):
            name = request.tenant, priority
            sequences, tokens = sequences + self._sequences[name], tokens + self._tokens[name]
        return sequences, tokens

    def count_by_tenant(self) -> Counter[str]:
        found = Counter[str]()
        for (tenant, _), count in self._sequences.items():
            found[tenant] += count
        return found


@dataclass(frozen=True, slots=True)
class Outlook:
    """Queue as it is between two steps. Times are seconds. `prompts` that run: (tenant, order key, seconds left).
    `queued`: waiting entries by tenant. `share` of the time is the prompts', and a prompt token takes `token_s` of it.
    `free`: places. A taken one becomes free every `turnover_s`, 0 if unknown. The taken places began at `begun`, in
    order, and last about `hold_s`, by a clock that said `now`."""

    prompts: Sequence[tuple[str, float, float]] = ()
    queued: Mapping[str, list[QueueEntry[Any]]] = field(default_factory=dict)
    share: float = 1.0
    token_s: float = 0.0
    free: int = 1
    turnover_s: float = 0.0
    begun: Sequence[float] = ()
    hold_s: float = 0.0
    now: float = 0.0

    def wait_s(self, tenant: str, key: float, cost_s: float, more: int = 0, more_s: float = 0.0) -> float:
        """Estimate the seconds until a newcomer's first step, from its order `key` and `cost_s`. `more` others that
        take `more_s` are ahead. Other tenants have one turn for each of the tenant's own."""
        ahead, seconds = more, more_s
        for name, place, left in self.prompts:
            seconds += min(left, cost_s) if name != tenant else left if place <= key else 0.0
        for entry in self.queued.get(tenant, ()):
            waits = entry.sequence
            if waits is not None and entry.key[0] <= key:
                ahead, seconds = ahead + 1, seconds + waits.cost_s
        turns = ahead + 1
        for name, others in self.queued.items():
            if name != tenant:
                costs = [s.cost_s for entry in others if (s := entry.sequence) is not None]
                count = min(len(costs), turns)
                ahead, seconds = ahead + count, seconds + sum(costs) * count / max(1, len(costs))
        return max(seconds / self.share, self.place_s(ahead + 1 - self.free))

    def place_s(self, count: int) -> float:
        """Estimate the seconds until `count` more places are free. At the soonest they become free evenly, and not
        before their holders have had their time: places that were taken all at once become free all at once."""
        if count <= 0 or not self.turnover_s:
            return 0.0
        evenly, taken = count * self.turnover_s, len(self.begun)
        places = taken + max(0, self.free)  # the free ones are taken now, by those before
        if not places:
            return evenly
        rounds, place = divmod(count - 1, places)
        since = self.begun[place] if place < taken else self.now
        return max(evenly, since + (1 + rounds) * self.hold_s - self.now)
