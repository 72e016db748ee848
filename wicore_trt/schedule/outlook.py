"""How long a newcomer would wait for its first step.

Made between two steps, and read by any thread. It must not know pages or clocks. Invariant: who finds nothing before it
is expected to wait no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wicore_trt.request_fields import MAX_PRIORITY
from wicore_trt.schedule.queue import Entry
from wicore_trt.types import GenerateRequest


class Newcomers:
    """What has come since the outlook was made: sequences and tokens of prompts, by tenant and priority."""

    def __init__(self) -> None:
        self._sequences, self._tokens = Counter[tuple[str, int]](), Counter[tuple[str, int]]()

    def add(self, request: GenerateRequest) -> None:
        name = request.tenant, request.priority
        self._sequences[name] += request.params.n
        self._tokens[name] += len(request.prompt_token_ids)

    def before(self, request: GenerateRequest) -> tuple[int, int]:
        """Sequences of its tenant that came before a request and have a priority no less urgent, and their tokens."""
        names = [(request.tenant, priority) for priority in range(-MAX_PRIORITY, request.priority + 1)]
        return sum(self._sequences[name] for name in names), sum(self._tokens[name] for name in names)

    def counts(self) -> Counter[str]:
        """Sequences by tenant."""
        found = Counter[str]()
        for (tenant, _), count in self._sequences.items():
            found[tenant] += count
        return found

    def clear(self) -> None:
        self._sequences.clear()
        self._tokens.clear()


def turnover(hold_s: float, places: int) -> float:
    """Seconds from one of so many places that becomes free to the next, 0 where that is not known."""
    return hold_s / places if places else 0.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """The queue as it is between two steps. `prompts` that run: (tenant, place in the order, seconds left). `queued`:
    who waits, by tenant. `share` of the time is the prompts', and a token of a prompt takes `token_s` of it. `free`:
    places; of those taken one becomes free every `turnover_s`, 0 where that is not known. They were taken at `begun`,
    the first one first, and `hold_s` is for how long as a rule, by a clock that said `now`."""

    prompts: Sequence[tuple[str, float, float]] = ()
    queued: Mapping[str, list[Entry[Any]]] = field(default_factory=dict)
    share: float = 1.0
    token_s: float = 0.0
    free: int = 1
    turnover_s: float = 0.0
    begun: Sequence[float] = ()
    hold_s: float = 0.0
    now: float = 0.0

    def wait_s(self, tenant: str, key: float, cost_s: float, more: int = 0, more_s: float = 0.0) -> float:
        """Until the first step of a newcomer with this place in the order and these seconds of its own, behind `more`
        others that take `more_s`. Other tenants have one turn for each of the tenant's own."""
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
        """Until so many more places are free: no sooner than evenly, and not before who holds them has had its time,
        as places that were taken all at once become free all at once."""
        if count <= 0 or not self.turnover_s:
            return 0.0
        evenly, taken = count * self.turnover_s, len(self.begun)
        places = taken + max(0, self.free)  # the free ones are taken now, by those before
        if not places:
            return evenly
        rounds, place = divmod(count - 1, places)
        since = self.begun[place] if place < taken else self.now
        return max(evenly, since + (1 + rounds) * self.hold_s - self.now)
