"""One life: an engine, what happens to it, and every output beside the oracle's.

A failure is raised as `Failure`. It must not know how lives are chosen or counted. Invariant: a life that returns had
no wrong token, no request stuck, lost or wrongly failed, nothing held at idle.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from oracle.checks import check_idle, check_steady, require, settle
from oracle.device import Failure, scramble
from oracle.model import Answer, answer, seed_of
from oracle.plan import Happening, Planner, Setup, draw_setup
from oracle.real import Real
from oracle.stack import Stack, constants
from oracle.world import Virtual

from wicore_trt.errors import ConfigError, WicoreError
from wicore_trt.kv.fault_injection import FaultPlan
from wicore_trt.types import CacheHints, FinishReason, GenerateRequest, TokenOutput

CLEAN = (FinishReason.STOP, FinishReason.LENGTH)
MAX_IDLE_STEPS = 3000
MAX_PREEMPTIONS = 30


@dataclass
class Live:
    """A sequence that has not ended."""

    seq_id: int
    request: GenerateRequest
    right: Answer
    order: int
    cached: int = 0
    got: list[int] = field(default_factory=list)
    aborted: bool = False
    furthest: int = 0
    preempted: int = 0


class Life:
    def __init__(
        self, setup: Setup, happenings: Sequence[Happening], path: Path, counts: Counter[str], world: Real | None = None
    ) -> None:
        self.setup, self.happenings, self.path, self.counts = setup, happenings, path, counts
        self.rng = random.Random(f"run/{setup.seed}")
        self.world = world if world is not None else Virtual(setup.seed, replace(setup.speeds))
        self.plan = FaultPlan(setup.faults, seed=setup.seed, hang_s=0.0)
        self.live: dict[tuple[str, int], Live] = {}
        self.history: dict[tuple, list[Sequence[int]]] = {}
        self.added = self.spoilt = 0
        self.noticed: dict[int, int] = {}
        """By number of a spoilt entry: how many requests had been added when a request first failed of it."""
        self.steps = 0
        self.progress = (0, 0, 0.0)
        self.lone: dict | None = None
        self.trace: list[str] = []

    # --- run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        with constants(self.setup), self.world.entered():
            self.stack = self._open()
            try:
                for happening in self.happenings:
                    self._wait(happening.after)
                    self.note(str(happening))
                    getattr(self, "_" + happening.kind.replace(" ", "_"))(**happening.values)
                self._finish()
            except (Failure, ConfigError):
                raise
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{error} ({Path(where.filename).name}:{where.name})\n{traceback.format_exc()}"
                raise Failure(f"raised {type(error).__name__}", text) from error
            finally:
                self.stack.die()

    def note(self, text: str) -> None:
        self.trace.append(f"{self.world.now:.6f} {text}")

    def _open(self) -> Stack:
        for attempt in range(4):
            try:
                return Stack(self.setup, self.world, self.path, self.plan, self.counts)
            except WicoreError as error:  # a file operation failed: the operator tries again
                if not self.plan.active or not self.plan.rates or isinstance(error, ConfigError):
                    raise
                self.counts["start refused by a fault"] += 1
                if attempt == 2:
                    self.plan.rates = {}
        raise AssertionError

    def _finish(self) -> None:
        """Idle, then a last look at what earlier requests left."""
        self._wait(-1)
        known = [tokens for realm in self.history.values() for tokens in realm]
        for tokens in self.rng.sample(known, min(3, len(known))):
            self._add(tuple(tokens[: self.setup.max_context - 1]), replace_params())
        self._wait(-1)
        self._restart()
        self.stack.tally()

    def _wait(self, steps: int) -> None:
        if steps >= 0:
            for _ in range(steps):
                if self.stack.core.has_work:
                    self.step()
            return
        while self.stack.core.has_work:
            self.step()
        self._lost()
        self.world.unhang()
        if self._unbroken(lambda: settle(self.stack)):
            check_idle(self.stack)

    def _lost(self) -> None:
        require(not self.live, "lost", f"{len(self.live)} sequences never ended: {sorted(self.live)}")

    def step(self) -> None:
        stack, before = self.stack, self.stack.scheduler.preemptions
        alone = len(self.live) == 1
        self.steps += 1
        outputs: list[TokenOutput] = []
        if not self._unbroken(lambda: outputs.extend(stack.core.step())):
            return
        for output in outputs:
            self._take(output)
        if alone and stack.scheduler.preemptions > before:
            raise Failure("preempts itself", "a sequence that is alone lost its pages")
        self._watch_progress()
        if self.rng.random() < 0.1:
            check_steady(stack)

    def _unbroken(self, work: Callable[[], object]) -> bool:
        """Whether `work` was done. When the device's copies are broken the engine says so, and ends."""
        try:
            work()
        except RuntimeError as error:
            if self.stack.copier.broken is None or "on the device" not in str(error):
                raise
            self.counts["copier broke"] += 1
            self._crash()
            return False
        return True

    def _watch_progress(self) -> None:
        total = 0
        scheduler = self.stack.scheduler
        for sequence in [*scheduler.running, *scheduler.waiting]:
            live = self.live.get((sequence.request.request_id, sequence.index))
            if live is None:
                continue
            if sequence.computed > live.furthest:
                live.furthest, live.preempted = sequence.computed, 0
            total += live.furthest
        mark = (self.added - len(self.live), total)
        now = self.world.clock()
        if mark != self.progress[:2]:
            self.progress, self.idle_steps = (*mark, now), 0
            return
        self.idle_steps += 1
        speeds, tokens = self.stack.world.speeds, sum(len(live.request.prompt_token_ids) + 60 for live in self.live.values())
        waits = max(self.stack.waits[-20:], default=0.0)
        bound = 1.0 + 40 * tokens * speeds.token + 2 * waits + 2000 * (speeds.link + speeds.checksum)
        stalled = now - self.progress[2]
        if self.idle_steps > MAX_IDLE_STEPS or stalled > (bound if self.world.virtual else 30.0):
            raise Failure("stuck", f"{self.idle_steps} steps, {stalled:.3f} s (bound {bound:.3f}) for {sorted(self.live)}")

    def _take(self, output: TokenOutput) -> None:
        place = (output.request_id, output.index)
        live = self.live.get(place)
        require(live is not None, "unknown output", f"{output}")
        self._check_lone(place)
        live.got += output.token_ids
        prompt = live.request.prompt_token_ids
        right = live.right.tokens
        if tuple(live.got) != right[: len(live.got)]:
            raise Failure("wrong token", f"{place}: {live.got}, right is {list(right)}; prompt of {len(prompt)} tokens")
        usage = output.usage
        require(usage.prompt_tokens == len(prompt) and usage.completion_tokens == len(live.got), "usage", f"{output}")
        require(usage.cached_tokens <= max(0, len(prompt)), "cached above prompt", f"{usage}")
        if usage.cached_tokens > live.cached:
            self._check_cached(live, usage.cached_tokens)
        if output.finish_reason is None:
            return
        del self.live[place]
        self.history.setdefault(self._realm(live.request), []).append((*prompt, *live.got))
        reason = output.finish_reason
        self.counts[f"ended: {reason.value}"] += 1
        if reason in CLEAN:
            complete = tuple(live.got) == right and reason is live.right.reason
            require(complete and output.stop_reason == live.right.stop_reason, "wrong end", f"{output}, {live.right}")
        elif reason is FinishReason.CANCELLED:
            require(live.aborted, "cancelled by nobody", f"{output}")
        elif reason is FinishReason.DEADLINE:
            deadline = live.request.deadline
            require(deadline is not None and deadline <= self.world.clock(), "deadline", f"{output}")
        else:
            self._check_error(output, live)

    def _check_error(self, output: TokenOutput, live: Live) -> None:
        """A request may fail when it has read something spoilt that nobody had noticed before it came."""
        bad = self.stack.device.bad
        if "finite" not in (output.error or ""):
            raise Failure("failed request", f"{output.error}")
        if live.seq_id in bad.unlucky:
            self.counts["failed logits"] += 1
            return
        numbers = bad.read.get(live.seq_id, set())
        fresh = [number for number in numbers if live.order < self.noticed.get(number, 1 << 60)]
        for number in numbers:
            self.noticed.setdefault(number, self.added)
        if not fresh:
            text = f"{output}: it read {numbers}, noticed when so many requests had come: {self.noticed}"
            raise Failure("never heals" if numbers else "failed request", text)
        self.counts["failed of a spoilt entry"] += 1

    # --- what happens --------------------------------------------------------------------------------------------

    def _realm(self, request: GenerateRequest) -> tuple:
        return (self.setup.engine, request.tenant, request.cache_salt)

    def _check_cached(self, live: Live, cached: int) -> None:
        """What was cached of a prompt is a prefix that somebody of its tenant and salt had."""
        mine, live.cached = self._realm(live.request), cached
        if cached > self._shared(live, lambda realm: realm == mine):
            salted = self._shared(live, lambda realm: realm[::2] == mine[::2])
            text = f"{cached} tokens of {live.request.request_id} were cached"
            raise Failure("foreign tenant" if cached <= salted else "foreign cache", text)

    def _shared(self, mine: Live, of: Callable[[tuple], bool]) -> int:
        """The longest prefix of a prompt that somebody else has sent or got."""
        prompt = mine.request.prompt_token_ids
        if mine.request.params.n > 1:
            return len(prompt)
        known = [tokens for realm, all_of in self.history.items() if of(realm) for tokens in all_of]
        for live in self.live.values():
            if live is not mine and of(self._realm(live.request)):
                known.append((*live.request.prompt_token_ids, *live.right.tokens))
        return max((common(prompt, other) for other in known), default=0)

    def _add(
        self, prompt: tuple[int, ...], params, salt: str = "", tenant: str = "", hints: CacheHints | None = None,  # noqa: ANN001
        priority: int = 0, deadline: float | None = None,
    ) -> None:  # fmt: skip
        core = self.stack.core
        name = f"r{self.added}"
        request = GenerateRequest(
            name, prompt, params, None if deadline is None else self.world.clock() + deadline, priority,
            tenant=tenant, cache_salt=salt, cache=hints or CacheHints(),
        )  # fmt: skip
        core.validate(request)
        alone = not self.live
        core.add(request)
        for sequence in core._sequences[name]:
            seed = sequence.seed
            require(params.seed is None or seed == seed_of(params.seed, sequence.index), "seed", f"{seed}")
            right = answer(self.setup.model, prompt, params, seed, self.setup.max_context)
            self.live[name, sequence.index] = Live(sequence.seq_id, request, right, self.added)
        self.added += 1
        self.idle_steps, self.progress = 0, (0, 0, self.world.clock())
        device, copier = self.stack.device, self.stack.copier
        self.lone = None
        if alone and params.n == 1 and self.world.virtual:
            self.lone = {
                "place": (name, 0), "now": self.world.clock(), "busy": device.busy_s, "copies": copier.seconds,
                "plans": len(self.stack.waits), "tokens": device.tokens, "total": len(prompt),
            }  # fmt: skip

    def _check_lone(self, place: tuple[str, int]) -> None:
        """The first token of a request that is alone comes after its recompute and what its plans may wait, at most."""
        lone, self.lone = self.lone, None
        if lone is None or lone["place"] != place:
            return
        device = self.stack.device
        waits = self.stack.waits[lone["plans"] :]
        spent = self.world.clock() - lone["now"] - (device.busy_s - lone["busy"]) - (self.stack.copier.seconds - lone["copies"])
        allowed = sum(waits) + 0.0055 * (len(waits) + 1)
        require(spent <= allowed, "late", f"{place} idled {spent:.4f} s; plans may wait {waits}")
        computed = device.tokens - lone["tokens"]
        require(computed <= lone["total"] + 1, "late", f"{place} computed {computed} tokens for {lone['total']}")

    def _abort(self, which: float, one: bool) -> None:
        if not self.live:
            return
        name, index = list(self.live)[int(which * len(self.live))]
        for (other, i), live in self.live.items():
            live.aborted |= other == name and (not one or i == index)
        self._take_all(self.stack.core.abort(name, index if one else None))

    def _take_all(self, outputs: Sequence[TokenOutput]) -> None:
        self.lone = None
        for output in outputs:
            self._take(output)

    def _idle(self) -> None:
        self._wait(-1)

    def _restart(self, engine: str | None = None, wall: int = 0, spare: dict | None = None, speeds=None) -> None:  # noqa: ANN001
        for live in self.live.values():
            live.aborted = True
        self._take_all(self.stack.core.abort_all())
        self._lost()
        self.stack.tally()
        if self._unbroken(self.stack.close):
            self._reopen(engine, wall, spare, speeds)

    def _crash(self, engine: str | None = None, wall: int = 0, spare: dict | None = None, speeds=None) -> None:  # noqa: ANN001
        """The process is killed."""
        for live in self.live.values():
            made = (*live.request.prompt_token_ids, *live.right.tokens)
            self.history.setdefault(self._realm(live.request), []).append(made)
        self.live.clear()
        self.stack.tally()
        self.stack.die()
        self.counts["crash"] += 1
        self._reopen(engine, wall, spare, speeds)

    def _reopen(self, engine: str | None, wall: int, spare: dict | None, speeds) -> None:  # noqa: ANN001
        self.lone = None
        self.setup = replace(self.setup, engine=engine or self.setup.engine, spare=spare or self.setup.spare)
        self.world.wall_ns += wall
        if speeds is not None:
            self.world.speeds = replace(speeds)
        self.stack = self._open()
        self.idle_steps = 0

    def _clear(self) -> None:
        self.stack.manager.clear()

    def _forget_device(self) -> None:
        with self.stack.without_tiers():
            self.stack.manager.clear()

    def _forget_host(self) -> None:
        self._forget_device()
        if self.stack.tiers is None:
            return
        host = self.stack.tiers.host
        for copy in list(host.copies()):
            if copy.ready and not copy.readers:
                host.drop(copy, "test")

    def _flip_host(self, share: float, seed: int) -> None:
        """Bits flip in pages that nobody is moving: what flips between a check and a copy nobody can notice."""
        rng, tiers = random.Random(seed), self.stack.tiers
        for copy in list(tiers.host.copies()) if tiers is not None else ():
            if copy.ready and not copy.readers and rng.random() < share:
                scramble(tiers.transfers.host.payload(copy), rng)
                self.counts["host page flipped"] += 1

    def _flip_saving(self, share: float, seed: int) -> None:
        """Bits flip in pages on their way to the disk; perhaps the process dies before that is noticed."""
        rng, tiers = random.Random(seed), self.stack.tiers
        if tiers is None or tiers.disk is None:
            return
        for copy in list(tiers.disk.copies()):
            source = tiers.host.get(*copy.page.name)
            saving = not copy.ready and source is not None and source.ready and source.readers == 1
            if saving and rng.random() < share:
                scramble(tiers.transfers.host.payload(source), rng)
                self.counts["page flipped while it is saved"] += 1
        if rng.random() < 0.5:
            self.world.advance(self.world.speeds.disk * rng.random())
            self._crash()

    def _flip_disk(self, share: float, seed: int) -> None:
        rng = random.Random(seed)
        for path in sorted((self.path / "disk").glob("*/slab-*")):
            data = bytearray(path.read_bytes())
            for at in range(0, len(data), 4096):
                if rng.random() < share:
                    data[at + rng.randrange(min(4096, len(data) - at))] ^= 1 << rng.randrange(8)
                    self.counts["disk block flipped"] += 1
            path.write_bytes(data)

    def _speeds(self, speeds) -> None:  # noqa: ANN001
        self.world.speeds = replace(speeds)

    def _faults(self, rates: dict) -> None:
        self.plan.rates = dict(rates)

    def _hang(self, count: int) -> None:
        self.world.hangs += count

    def _spoil_entry(self, group: str) -> None:
        self.spoilt += 1
        self.stack.device.bad.entries.append((self.spoilt, group))

    def _spoil_logits(self) -> None:
        self.stack.device.bad.logits += 1

    def _jump(self, seconds: float) -> None:
        """The machine was suspended."""
        self.stack.idle.clear()
        self.lone = None
        if self.world.virtual:
            self.world.now += seconds
        self.progress = (*self.progress[:2], self.world.now)

    def _pass(self, seconds: float) -> None:
        self.lone = None
        self.world.advance(seconds)
        self._unbroken(self.stack.core.tidy)
        self.progress = (*self.progress[:2], self.world.now)

    def _break_copier(self) -> None:
        self.stack.copier.broken = RuntimeError("the device is lost")

    idle_steps = 0


def replace_params():  # noqa: ANN201
    from wicore_trt.types import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def plan_of(seed: int, *, real: bool = False) -> tuple[Setup, list[Happening]]:
    """With real threads a process cannot be killed, and its disk hangs for short times only."""
    setup = draw_setup(seed)
    happenings = Planner(setup).happenings()
    if real:
        kv = setup.kv | {"disk_timeout_s": 0.05 if setup.kv["disk_timeout_s"] < 60 else 20.0}
        setup = replace(setup, kv=kv)
        happenings = [h for h in happenings if h.kind not in ("crash", "flip saving", "break copier", "hang")]
    return setup, happenings


def live(seed: int, keep: Sequence[int] | None = None, counts: Counter[str] | None = None, *, real: bool = False) -> Life:
    """The life of a seed, or what is left of it with only the happenings of these numbers. Raises Failure."""
    setup, happenings = plan_of(seed, real=real)
    if keep is not None:
        happenings = [happenings[i] for i in keep]
    path = Path(tempfile.mkdtemp(prefix="oracle-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    world = Real(seed, replace(setup.speeds)) if real else None
    life = Life(setup, happenings, path, counts if counts is not None else Counter(), world)
    try:
        life.run()
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return life
