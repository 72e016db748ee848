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
from dataclasses import replace
from pathlib import Path

from fakes import clear_cache
from fault_injection import FaultPlan

from oracle.checks import check_idle, check_steady, require, settle
from oracle.device import Failure, scramble
from oracle.ledger import Ledger, Live
from oracle.model import Answer, answer, list_spans, seed_of, token_ids, whole_images
from oracle.plan import Happening, Planner, Setup, draw_setup
from oracle.real import Real
from oracle.router import Router
from oracle.stack import Stack, constants
from oracle.watch import Lone, Progress
from oracle.world import Virtual
from wicore_trt.errors import ConfigError, WicoreError
from wicore_trt.types import CacheHints, GenerateRequest, SamplingParams, TokenOutput


class Life:
    def __init__(
        self, setup: Setup, happenings: Sequence[Happening], path: Path, counts: Counter[str], world: Real | None = None
    ) -> None:
        self.setup, self.happenings, self.path, self.counts = setup, happenings, path, counts
        self.rng = random.Random(f"run/{setup.seed}")
        self.world = world if world is not None else Virtual(setup.seed, replace(setup.speeds))
        self.plan = FaultPlan(setup.faults, seed=setup.seed, hang_s=0.0)
        self.ledger = Ledger(counts)
        self.progress = Progress(self.ledger, self.world.clock())
        self.lone: Lone | None = None
        self.together = False
        """Whether several requests lived at once since one had to start afresh."""
        self.spoilt = self.steps = 0
        self.trace: list[tuple[float, Happening]] = []

    # --- run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        with constants(self.setup), self.world.entered():
            self.stack = self._open()
            try:
                for happening in self.happenings:
                    self._wait(happening.after)
                    self.trace.append((self.world.now, happening))
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

    def _open(self) -> Stack:
        for attempt in range(4):
            try:
                stack = Stack(self.setup, self.world, self.path, self.plan, self.counts)
                Router(stack.manager, self.counts)  # the log keeps it
                return stack
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
        known = [tokens for realm in self.ledger.history.values() for tokens in realm]
        for tokens in self.rng.sample(known, min(3, len(known))):
            prompt = whole_images(tokens[: self.setup.max_context - 1], self.setup.image_tokens)
            self._add(tuple(prompt), SamplingParams(max_tokens=1, temperature=0.0))
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
        self.ledger.none_left()
        self.world.unhang()
        if self._unbroken(lambda: settle(self.stack)):
            check_idle(self.stack)

    def step(self) -> None:
        stack, before, afresh = self.stack, self.stack.scheduler.preemptions, self.counts["started afresh"]
        alone = len(self.ledger.live) == 1
        self.steps += 1
        outputs: list[TokenOutput] = []
        if not self._unbroken(lambda: outputs.extend(stack.core.step())):
            return
        self._take(outputs)
        if not alone:
            self.together = True
        elif self.counts["started afresh"] > afresh:  # pages of those that were there lay between its own
            require(self.together, "starts afresh", "a sequence that is alone lost its pages twice")
            self.together, self.lone = False, None
        elif stack.scheduler.preemptions > before:
            raise Failure("preempts itself", "a sequence that is alone lost its pages")
        self.progress.stepped(stack)
        if self.rng.random() < 0.1:
            check_steady(stack)

    def _unbroken(self, work: Callable[[], object]) -> bool:
        """Whether `work` was done. When the device's copies are broken the engine says so, and ends."""
        try:
            work()
        except RuntimeError as error:
            if self.stack.copier.broken is None or "Copies of KV pages failed" not in str(error):
                raise
            self.counts["copier broke"] += 1
            self._crash()
            return False
        return True

    def _take(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            lone, self.lone = self.lone, None
            if lone is not None and lone.place == (output.request_key, output.index):
                lone.answered(self.stack)
            self.ledger.take(output, self.world.clock(), self.stack.device.bad)

    # --- what happens --------------------------------------------------------------------------------------------

    def _add(
        self, prompt: tuple[int, ...], params: SamplingParams, salt: str = "", tenant: str = "",
        hints: CacheHints | None = None, priority: int = 0, deadline: float | None = None, right: Answer | None = None,
    ) -> None:  # fmt: skip
        core, ledger, setup = self.stack.core, self.ledger, self.setup
        name = f"r{ledger.requests}"
        request = GenerateRequest(
            name, token_ids(prompt), params, None if deadline is None else self.world.clock() + deadline, priority,
            tenant=tenant, cache_salt=salt, cache=hints or CacheHints(), content=list_spans(prompt, setup.image_tokens),
        )  # fmt: skip
        core.validate_request(request)
        alone = not ledger.live
        core.add(request)
        known = right is not None and setup.engine == "oracle"
        for sequence in core.sequences[name].values():
            seed, index = sequence.seed, sequence.index
            require(params.seed is None or seed == seed_of(params.seed, index), "seed", seed)
            if right is None or not known or (params.temperature and (index or params.seed is None)):
                right = answer(setup.model, prompt, params, seed, setup.max_context, setup.image_tokens)
            ledger.add(
                Live(sequence.seq_id, request, prompt, right, (setup.engine, tenant, salt), ledger.requests), index
            )
        ledger.requests += 1
        self.progress.again(self.world.clock())
        watched = alone and params.n == 1 and self.world.virtual
        self.lone = Lone.begin((name, 0), len(prompt), self.stack) if watched else None

    def _abort(self, which: float, one: bool) -> None:
        places = list(self.ledger.live)
        if not places:
            return
        name, index = places[int(which * len(places))]
        for (other, i), live in self.ledger.live.items():
            live.aborted |= other == name and (not one or i == index)
        self.lone = None
        self._take(self.stack.core.abort(name, index if one else None))

    def _idle(self) -> None:
        self._wait(-1)

    def _restart(self, engine: str | None = None, wall: int = 0, spare: dict | None = None, speeds=None) -> None:
        for live in self.ledger.live.values():
            live.aborted = True
        self.lone = None
        self._take(self.stack.core.abort_all())
        self.ledger.none_left()
        self.stack.tally()
        if self._unbroken(self.stack.close):
            self._reopen(engine, wall, spare, speeds)

    def _crash(self, engine: str | None = None, wall: int = 0, spare: dict | None = None, speeds=None) -> None:
        """The process is killed."""
        self.ledger.forget()
        self.stack.tally()
        self.stack.die()
        self.counts["crash"] += 1
        self._reopen(engine, wall, spare, speeds)

    def _reopen(self, engine: str | None, wall: int, spare: dict | None, speeds) -> None:
        self.lone = None
        self.setup = replace(self.setup, engine=engine or self.setup.engine, spare=spare or self.setup.spare)
        self.world.wall_ns += wall
        if speeds is not None:
            self.world.speeds = replace(speeds)
        self.stack = self._open()
        self.progress.again(self.world.clock())

    def _clear(self) -> None:
        clear_cache(self.stack.manager)

    def _drop(self, share: float, seed: int) -> None:
        """Pages leave every tier, as when their time is over, whoever uses them."""
        rng = random.Random(seed)
        for key in sorted({page.key for _, page in self.stack.manager.list_pages()}):
            if rng.random() < share:
                self.stack.manager.drop_page(key, "dropped")

    def _forget_device(self) -> None:
        with self.stack.without_tiers():
            clear_cache(self.stack.manager)

    def _forget_host(self) -> None:
        self._forget_device()
        if self.stack.tiers is None:
            return
        host = self.stack.tiers.host
        for copy in list(host.iterate_copies()):
            if copy.ready and not copy.readers:
                host.drop_copy(copy, "test")

    def _flip_host(self, share: float, seed: int) -> None:
        """Bits flip in pages that nobody is moving: what flips between a check and a copy nobody can notice."""
        rng, tiers = random.Random(seed), self.stack.tiers
        for copy in list(tiers.host.iterate_copies()) if tiers is not None else ():
            if copy.ready and not copy.readers and rng.random() < share:
                scramble(tiers.movers.host.page_parts(copy), rng)
                self.counts["host page flipped"] += 1

    def _flip_saving(self, share: float, seed: int) -> None:
        """Bits flip in pages on their way to the disk; perhaps the process dies before that is noticed."""
        rng, tiers = random.Random(seed), self.stack.tiers
        if tiers is None or tiers.disk is None:
            return
        for copy in list(tiers.disk.iterate_copies()):
            source = tiers.host.find_copy(*copy.page.name)
            saving = not copy.ready and source is not None and source.ready and source.readers == 1
            if saving and rng.random() < share:
                scramble(tiers.movers.host.page_parts(source), rng)
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

    def _speeds(self, speeds) -> None:
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
        self.progress.again(self.world.clock())

    def _pass(self, seconds: float) -> None:
        self.stack.idle.clear()
        self.lone = None
        self.world.advance(seconds)
        self._unbroken(self.stack.core.do_housekeeping)
        self.progress.again(self.world.clock())

    def _break_copier(self) -> None:
        self.stack.copier.broken = RuntimeError("the device is lost")


def plan_of(seed: int, *, real: bool = False) -> tuple[Setup, list[Happening]]:
    """With real threads a process cannot be killed, and its disk hangs for short times only."""
    setup = draw_setup(seed)
    happenings = Planner(setup).happenings()
    if real:
        timeout_s = 0.05 if setup.disk_timeout_s < 60 else 20.0
        setup = replace(setup, disk_timeout_s=timeout_s)
        happenings = [h for h in happenings if h.kind not in ("crash", "flip saving", "break copier", "hang")]
    return setup, happenings


def live(
    seed: int, keep: Sequence[int] | None = None, counts: Counter[str] | None = None, *, real: bool = False
) -> Life:
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
