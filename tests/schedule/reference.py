"""What the scheduler must do, said once more and slowly: lists are looked through, tokens are given one by one.

For engines without a prefix cache whose pages last for all. `jobs` are added as the engine's requests are; `step` tells
(seq_id, tokens) of the next step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from wicore_trt.schedule import scheduler as scheduling
from wicore_trt.schedule.queue import AGEING_S
from wicore_trt.schedule.step_time import StepLoad, StepTime


@dataclass(eq=False)
class Job:
    seq_id: int
    tenant: str
    arrival: float
    priority: int
    cost: float
    tokens: int
    output: int
    deadline: float | None
    start_by: float
    computed: int = 0
    placed: bool = False
    begun: bool = False
    turn: int = 0
    ran: int = 0
    gave_way: int = 0

    @property
    def remaining(self) -> int:
        return self.tokens - self.computed

    @property
    def key(self) -> tuple[float, int]:
        return (self.arrival + self.priority * AGEING_S + self.cost, self.seq_id)

    def late(self, now: float) -> bool:
        return self.deadline is not None and self.deadline <= now


class Reference:
    def __init__(self, time: StepTime, max_tokens: int, max_sequences: int, least: int) -> None:
        self.time, self.max_tokens, self.max_sequences, self.least = time, max_tokens, max_sequences, least
        self.jobs: list[Job] = []
        self.turns: Counter[str] = Counter()  # places that a tenant was given
        self.now_turn = 0
        self.given: dict[str, int] = {}  # tokens of prompts

    def add(self, job: Job) -> None:
        self.jobs.append(job)
        self.turns[job.tenant] = max(self.turns[job.tenant], self.now_turn)

    def of(self, placed: bool) -> list[Job]:
        return [job for job in self.jobs if job.placed == placed]

    def leave(self, job: Job) -> None:
        """A job has no place any more."""
        job.placed, self.now_turn = False, max(self.now_turn, job.turn)

    def end(self, seq_id: int) -> None:
        for job in [job for job in self.jobs if job.seq_id == seq_id]:
            if job.placed:
                self.leave(job)
            self.jobs.remove(job)

    def head(self) -> Job | None:
        waiting, held = self.of(False), Counter(job.tenant for job in self.of(True))
        firsts = [min((j for j in waiting if j.tenant == t), key=lambda j: j.key) for t in {j.tenant for j in waiting}]
        return min(firsts, key=lambda j: (held[j.tenant], self.turns[j.tenant], j.key), default=None)

    def full(self) -> bool:
        running = self.of(True)
        if len(running) >= self.max_sequences or not running or self.time.target_s is None:
            return len(running) >= self.max_sequences
        more = StepLoad(len(running) + 1, sum(job.tokens for job in running), self.least)
        return self.time.step_s(more) > self.time.target_s

    def step(self, now: float) -> list[tuple[int, int]]:
        for job in [job for job in self.jobs if job.late(now)]:
            self.end(job.seq_id)
        made = {job: 1 for job in self.of(True) if job.remaining == 1}
        load = StepLoad(len(made), sum(job.computed for job in made))
        limit = self.time.limit_s(load)

        def give(job: Job) -> int:
            """One token after the other, until one is too many."""
            nonlocal load
            count = 0
            prompts = sum(n for j, n in made.items() if j.remaining > 1)
            while count < job.remaining and sum(made.values()) + count < self.max_tokens:
                fits = (
                    prompts + count < self.least or self.time.step_s(load.with_prompt(job.computed, count + 1)) <= limit
                )
                if not fits and job.remaining > 1:
                    break
                count += 1
            if count:
                made[job] = count
                if job.remaining > 1:
                    load = load.with_prompt(job.computed, count)
                    self.given[job.tenant] = self.given.get(job.tenant, 0) + count
            return count

        def room() -> bool:
            prompts = sum(n for j, n in made.items() if j.remaining > 1)
            return sum(made.values()) < self.max_tokens and (
                prompts < self.least or self.time.step_s(load.with_prompt(0, 1)) <= limit
            )

        head = self.head()
        if head is not None and self.full():
            held = Counter(job.tenant for job in self.of(True))
            least = held[head.tenant] + 2
            ripe = [j for j in self.of(True) if j.ran >= scheduling.TURN_STEPS << j.gave_way]
            ripe = [job for job in ripe if held[job.tenant] >= least]
            if ripe:
                victim = max(ripe, key=lambda job: (held[job.tenant], job.key))
                if victim in made:
                    del made[victim]  # its time is not given to others in this step
                victim.gave_way, victim.computed, victim.ran = victim.gave_way + 1, 0, 0
                self.turns[victim.tenant] -= 1
                self.leave(victim)
                self.turns[victim.tenant] = max(self.turns[victim.tenant], self.now_turn)
        prompts = [job for job in self.of(True) if job.remaining > 1]
        names = {job.tenant for job in [*prompts, *self.of(False)]}
        first = min((self.given[name] for name in names if name in self.given), default=0)
        self.given = {name: self.given.get(name, first) - first for name in names}
        turn = lambda job: (self.given.get(job.tenant, 0), job.key)  # noqa: E731
        prompts.sort(key=turn)
        while True:
            head = self.head()
            if head and room() and not self.full() and (not prompts or turn(head) <= turn(prompts[0])):
                head.placed, head.turn = True, self.turns[head.tenant]
                self.turns[head.tenant] += 1
                head.begun = True
                give(head)
            elif prompts:
                give(prompts.pop(0))
            else:
                break
        for job in [j for j in self.of(False) if not j.begun and j.start_by <= now]:
            self.end(job.seq_id)
        return sorted((job.seq_id, count) for job, count in made.items())

    def computed(self, made: list[tuple[int, int]]) -> None:
        """The step was made, and all that could sampled a token."""
        for seq_id, count in made:
            job = next(job for job in self.jobs if job.seq_id == seq_id)
            job.computed, job.ran = job.computed + count, job.ran + 1
            if job.computed == job.tokens:
                job.tokens, job.output = job.tokens + 1, job.output - 1
                if not job.output:
                    self.end(seq_id)
