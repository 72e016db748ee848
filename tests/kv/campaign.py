"""An engine over checked memory with real tiers, its traffic, and what must hold. Shared by tests of the whole cache.

Every position that a query sees is checked by FakeExecutor on every step; here every output is compared with the pure
function that it computes, and an idle stack is checked for leaks.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from copiers import PlainCopier
from disk_store_helpers import hurry
from fakes import EOS, FakeExecutor, clear_cache, greedy
from fault_injection import flip_bit

from wicore_trt.config import KVSettings
from wicore_trt.core import assemble_kv
from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.disk.format import Namespace
from wicore_trt.kv.disk.store import DiskStore
from wicore_trt.kv.tiers import open_tiers
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.kv.tiers.moves import CopyState
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams

SLOT = 4096
SLAB = 32 * 2 * SLOT
CLEAN = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True)
class Shape:
    """What an engine is made of; what a restart may change."""

    engine: str = "fake"
    kernels: str = "fake"
    kv_dtype: str = "float32"
    page_tokens: int = 4
    rank: int = 0
    window: int = 8
    pages: dict[str, int] = field(default_factory=lambda: {GLOBAL: 48, LOCAL: 32})
    max_batch_tokens: int = 16
    max_sequences: int = 6
    max_context: int = 120


class LateCopier(PlainCopier):
    """Copies as a GPU's copy engine does: in order, some time after the call, but before the next step. A page on its
    way to the host is read at once; a host page on its way to the device is read late, so its buffers must not change
    until then."""

    def __init__(self, executor: FakeExecutor, seed: int) -> None:
        self._executor = executor
        self._execute = executor.execute
        self._free = executor.close
        executor.execute, executor.close = self._step, self.close
        self.pending: deque = deque()
        self._rng = random.Random(seed)
        self.checks = self._rng.random() < 0.5
        self._lock = threading.Lock()
        self._open = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def to_host(self, group, slot, parts, done, *, settled=False) -> None:
        data = self._page(group, slot, parts)

        def move() -> bytes:
            parts[0][:] = data
            return self.digest([memoryview(data)])

        with self._lock:
            self.pending.append((move, done))

    def to_device(self, group, slots, pages, done) -> None:
        """Some of them at a time."""
        with self._lock:
            for slot, parts in zip(slots, pages, strict=True):
                move = partial(self._fill, group, slot, parts)
                self.pending.append((move, lambda digest, seconds: done([digest], seconds)))

    def _fill(self, group, slot, parts) -> bytes:
        self._executor.to_device(group, [slot], [parts], lambda *_: None)
        return self.digest([memoryview(self._page(group, slot, parts))])

    def _page(self, group, slot, parts) -> bytearray:
        data = bytearray(sum(map(len, parts)))
        self._executor.to_host(group, slot, [memoryview(data)], lambda *_: None)
        return data

    def _flush(self) -> None:
        with self._lock:
            while self.pending:
                move, done = self.pending[0]
                digest = move()
                done(digest if self.checks else None, 0.0)
                self.pending.popleft()

    def _step(self, batch):
        self._flush()
        return self._execute(batch)

    def _run(self) -> None:
        while self._open:
            time.sleep(self._rng.choice([0.0005, 0.002]))
            self._flush()

    def close(self) -> None:
        """What is queued ends before the memory goes."""
        self._open = False
        self._thread.join()
        self._flush()
        self._free()


class Stack:
    """`path`: directory of the disk tier, or None. `settings` go to KVSettings; `now` is the clock of deadlines and
    times to live; `late` makes copies between device and host end late. `wrong` counts outputs that differ from the
    run without a cache. `coded`: pages are large, and the real copier copies them, coded where settings say so.
    `loads_first`: a step begins when loads have ended, as where computing takes far longer; else
    computing and loading race, and how much of a prefix is loaded depends on the machine. Disk operations have a
    minute, so that none times out on a busy machine; `hurry_disk` or `disk_timeout_s` is for tests of hangs."""

    def __init__(
        self, path: Path | None, *, seed: int, shape: Shape | None = None, files: Files | None = None,
        late: bool = False, coded: bool = False, host_slots: int = 120, disk_threads: int = 2,
        disk_timeout_s: float = 60.0, **settings: object,
    ) -> None:  # fmt: skip
        self.rng = random.Random(seed)
        self.shape = shape or Shape()
        self.files = files
        self.late, self.coded = late, coded
        self.disk = {"DISK_THREADS": disk_threads, "DISK_TIMEOUT_S": disk_timeout_s}
        self.loads_first = False
        disk = {"disk_path": str(path), "disk_bytes": 3 << 20}
        self.kv = KVSettings(
            **{"host_bytes": host_slots * SLOT, "disk_free_bytes": 0, **(disk if path is not None else {}), **settings}
        )
        self.now = 1000.0
        self.wrong = self.finished = self.added = 0
        self.known: list[list[int]] = [self.tokens(12)]
        self.expected: dict[tuple[str, int], list[int]] = {}
        self.got: dict[tuple[str, int], list[int]] = {}
        self.ends: Counter[FinishReason] = Counter()
        self.totals: Counter[str] = Counter()
        self.open()

    # --- life ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        shape = self.shape
        sizes, executor = (shape.pages, shape.page_tokens, shape.window, shape.max_batch_tokens), None
        if self.coded:
            from late_device import LateExecutor, code_pages

            executor = LateExecutor(*sizes, seed=self.rng.randrange(1 << 30), **code_pages())
        executor = executor or FakeExecutor(*sizes)
        self.copier = LateCopier(executor, self.rng.randrange(1 << 30)) if self.late else None
        executor.layout = replace(executor.layout, kv_dtype=shape.kv_dtype)
        ranked = partial(Namespace, rank=shape.rank, world=2)
        slabs = partial(DiskStore, slab_bytes=SLAB)  # several files, so that runs of slots end and slabs can be swapped
        clock = SimpleNamespace(monotonic=lambda: self.now, time=time.time)
        with (
            mock.patch.multiple(assemble_kv, Namespace=ranked, time=clock),
            mock.patch.multiple(open_tiers, DiskStore=slabs, **self.disk),
        ):
            manager, loader = assemble_kv.make_cache(
                self.kv, executor.layout, shape.window, engine=shape.engine, kernels=shape.kernels,
                copier=self.copier or executor.copier, files=self.files,
            )  # fmt: skip
        scheduler = Scheduler(
            manager, max_batch_tokens=shape.max_batch_tokens, max_sequences=shape.max_sequences, loader=loader
        )
        scheduler.prefill.observe_step([(0, 64)], 64.0)  # the planner is to load whatever it can
        scheduler.prefill.observe_step = lambda *args: None
        executor.watch(scheduler)
        self.core = EngineCore(
            executor, scheduler, eos_ids=(EOS,), max_context=shape.max_context, clock=lambda: self.now
        )
        self.executor, self.manager, self.tiers = executor, manager, manager.tiers
        self.tiers = manager.tiers

    def close(self) -> None:
        for output in self.core.abort_all():
            self._take(output)
        self.totals.update(self.counts())
        self.core.close()

    def restart(self, **changes: object) -> None:
        self.close()
        self.shape = replace(self.shape, **changes)
        self.open()

    # --- traffic -------------------------------------------------------------------------------------------------

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(2, 97) for _ in range(count)]

    def prompt(self, longest: int = 90) -> list[int]:
        """A known context to go on from, at its end or where it branches off, and something new."""
        known = self.rng.choice(self.known)
        if self.rng.random() < 0.4:
            known = known[: self.rng.randrange(1, len(known) + 1)]
        if len(known) > longest - 10:
            known = known[:12]
        return known + self.tokens(self.rng.randint(1, 10))

    def add(
        self, prompt: list[int] | None = None, *, answer: int = 6, n: int = 1, whole: bool = False,
        seen: list[int] | None = None, **request: object,
    ) -> str:  # fmt: skip
        """`whole`: the answer has all of its tokens, whatever they are; else most do. `seen` is what the model sees in
        place of the prompt's token ids."""
        prompt = prompt if prompt is not None else self.prompt()
        answer = min(answer, self.shape.max_context - len(prompt))
        name = f"r{self.added}"
        self.added += 1
        params = SamplingParams(max_tokens=answer, temperature=0, n=n, ignore_eos=self.rng.random() < 0.8 or whole)
        made = GenerateRequest(name, tuple(prompt), params, **request)
        self.core.validate_request(made)
        self.core.add(made)
        right = greedy(seen or prompt, answer, ignore_eos=params.ignore_eos)
        for index in range(n):
            self.expected[name, index], self.got[name, index] = right, []
        self.known.append(prompt + right)
        if len(self.known) > 24:
            self.known.pop(self.rng.randrange(len(self.known)))
        return name

    def step(self) -> None:
        while self.loads_first and self.tiers.loads.loads:
            self.tiers.wait_for_report(0.01)
            self.tiers.poll_all()
        for output in self.core.step():
            self._take(output)

    def abort(self, name: str) -> None:
        for output in self.core.abort(name):
            self._take(output)

    def _take(self, output) -> None:
        place = output.request_key, output.index
        got = self.got[place]
        got += output.token_ids
        if output.finish_reason is None:
            return
        right = self.expected.pop(place)
        self.ends[output.finish_reason] += 1
        if output.finish_reason in CLEAN:
            self.finished += 1
            self.wrong += got != right
        else:
            assert output.finish_reason is not FinishReason.ERROR, output.error
            self.wrong += got != right[: len(got)]
        del self.got[place]

    def settle(self, timeout_s: float = 30.0, *, check: bool = False) -> float:
        """Step until all requests ended; returns the seconds. A request that does not end in time is stuck."""
        begun = time.monotonic()
        while self.core.has_work:
            self.step()
            if check:
                self.core.scheduler.check_integrity()
            assert time.monotonic() - begun < timeout_s, f"stuck: {sorted(self.expected)}"
        assert not self.expected and not self.got, "a request ended without an output"
        return time.monotonic() - begun

    def serve(self, count: int, **request: object) -> None:
        for _ in range(count):
            self.add(**request)
        self.settle()

    # --- what can be done to it ----------------------------------------------------------------------------------

    def forget_device(self) -> None:
        """Drop what the device caches, and nothing below it."""
        tiers, self.manager.tiers = self.manager.tiers, None
        clear_cache(self.manager)
        self.manager.tiers = tiers

    def forget_host(self) -> None:
        for copy in list(self.tiers.host.iterate_copies()):
            if copy.ready:
                self.tiers.host.drop_copy(copy, "test")

    def flip_host(self, share: float = 1.0) -> int:
        """Flip one random bit in each of this share of the host's pages; returns how many. A page that is on its way
        to the device is left alone: nothing can notice a bit that flips between the check and the copy."""
        flipped, moving = 0, self.moving
        for copy in list(self.tiers.host.iterate_copies()):
            if copy.ready and not (moving and copy.readers) and self.rng.random() < share:
                parts = self.tiers.movers.host.page_parts(copy)
                flip_bit(parts, self.rng.randrange(8 * sum(map(len, parts))))
                flipped += 1
        return flipped

    def hurry_disk(self, timeout_s: float) -> None:
        """From now on disk operations time out after so many seconds, also those under way."""
        hurry(self.tiers.movers.disk[1]._pool, timeout_s)

    def home(self) -> Path:
        """The directory of this engine's pages on disk."""
        (home,) = (path for path in Path(self.kv.disk_path).iterdir() if path.is_dir())
        return home

    # --- what must hold ------------------------------------------------------------------------------------------

    def counts(self) -> Counter[str]:
        """Failures and hits of this life, by tier."""
        found: Counter[str] = Counter(
            preempted=self.core.scheduler.preemptions, parked=self.core.scheduler.loader.parking.parked
        )
        for tier in self.core.stats().kv.tiers:
            found[f"{tier.tier} hits"] += tier.hit_tokens
            for cause, count in tier.failures.items():
                found[f"{tier.tier} {cause}"] += count
        return found

    @property
    def moving(self) -> bool:
        """Whether a page is being copied, checked, read or written."""
        return self.tiers.movers.outstanding > 0 or (self.copier is not None and len(self.copier.pending) > 0)

    def under_way(self) -> str:
        tiers = self.tiers
        depth = tiers.movers.disk[1].queue_depth if tiers.movers.disk is not None else 0
        return f"never ended: {tiers.movers.outstanding} moves, {depth} in the store, {len(tiers.loads.loads)} loads"

    def settle_transfers(self, timeout_s: float = 30.0) -> None:
        """Wait for all that is under way. Writes that wait for a bad disk to get better are not waited for."""
        end = time.monotonic() + timeout_s
        while self.moving or self.tiers.loads.loads:
            self.tiers.wait_for_report(0.01)
            self.tiers.poll_all()
            assert time.monotonic() < end, self.under_way()
        if self.tiers.down.no_writes_before > time.monotonic():
            self.tiers.down.to_save.clear()
        assert self.tiers.wait_idle(timeout_s), "saves never ended"

    def check_idle(self) -> None:
        """Nothing is held, under way or left over when no request lives."""
        assert not self.core.has_work
        self.settle_transfers()
        self.tiers.down.no_space_before = 0.0  # slots that a full file system refused come back now, not after a while
        self.tiers.apply_reports()
        self.core.scheduler.check_integrity()
        tiers, loader = self.tiers, self.core.scheduler.loader
        assert not tiers.movers.outstanding and not tiers.up.waiting and not tiers.down.saving_slots
        assert not tiers.up.reading_bytes, "bytes on their way for ever"
        assert not loader._begun and not self.tiers.loads.loads and not self.manager._computing
        assert all(pool.used_slots == 0 for pool in self.manager.pools.values())
        for index in self.tiers.indexes.values():
            check_idle_index(index)
        if tiers.movers.disk is not None:
            assert wait_for(lambda: tiers.movers.disk[1].queue_depth == 0), "operations left in the store"


def check_idle_index(index: TierIndex) -> None:
    state = index.inspect()
    assert not state.lost_copies, "slots that never came back"
    for copy in index.iterate_copies():
        assert copy.state is CopyState.READY and not copy.readers, "a copy is held for ever"
        assert copy.page.parent is not None or copy.page.index == 0, "a private page was left"
    assert not state.users, "a page is in use for ever"


def wait_for(condition, timeout_s: float = 60.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


@dataclass
class Row:
    """Faults of one kind: done, noticed by a tier (a page refused, a write or the directory given up), and outputs
    that were wrong. Faults that nobody met afterwards, or that changed nothing, are not noticed."""

    injected: int = 0
    detected: int = 0
    wrong: int = 0


class Table(dict[str, Row]):
    def add(self, kind: str, injected: int, detected: int, wrong: int) -> None:
        row = self.setdefault(kind, Row())
        row.injected += injected
        row.detected += detected
        row.wrong += wrong

    @property
    def total(self) -> Row:
        return Row(*(sum(getattr(row, name) for row in self.values()) for name in ("injected", "detected", "wrong")))

    def __str__(self) -> str:
        rows = [*self.items(), ("total", self.total)]
        lines = [f"{kind:40} {row.injected:>10,} {row.detected:>10,} {row.wrong:>6,}" for kind, row in rows]
        return "\n".join([f"{'kind':40} {'injected':>10} {'detected':>10} {'wrong':>6}", *lines])


def crash_stack(path: Path, seed: int) -> Stack:
    """Every life of the directory meets the same contexts, so that it finds pages of earlier lives."""
    stack = Stack(path, seed=seed, host_slots=60, disk_bytes=2 << 20)
    stack.loads_first = True
    common = random.Random(7)
    stack.known = [[common.randrange(2, 97) for _ in range(common.randrange(8, 60))] for _ in range(20)]
    return stack


def live(path: Path, seed: int, out: int) -> None:
    """Serve until killed; "served <wrong> <disk hits>" after each wave."""
    stack = crash_stack(path, seed)
    while True:
        stack.serve(4)
        if stack.rng.random() < 0.3:
            stack.forget_device()
            stack.forget_host()
        os.write(out, f"served {stack.wrong} {stack.counts()['disk hits']}\n".encode())


def fork_server() -> None:
    """Has everything imported and forks one child per line of its input, so that a kill costs milliseconds."""
    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            live(Path(sys.argv[1]), int(line), write)
        os.close(write)
        print(child, flush=True)
        while data := os.read(read, 1 << 16):
            print(data.decode(), end="", flush=True)
        os.close(read)
        _, status = os.waitpid(child, 0)
        print("end", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    fork_server()
