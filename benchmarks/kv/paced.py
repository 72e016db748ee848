"""Conversations over the product's tiers in real time, without a GPU: what their software costs.

    python -m benchmarks.kv.paced DIRECTORY [--smaller 32] [--link-gb-per-s 50] [--disk-gb-per-s 7]

The workload of `benchmarks.kv.on_gpu`'s `sessions` and its counters; scheduler, cache, tiers, threads and files are the
product's. Steps and copies take the time of 27B's on a GPU (`virtual_disk.World`) and move nothing: pages hold zeros,
and are so many times smaller that this machine's memory suffices. So their number and the engine thread's work are
those of a GPU run; the disk's bytes are not. It must not know how the tiers decide. Invariant: what the disk reads was
written, and is checked. DIRECTORY should be in memory, with room for 3 GiB.
After each round it prints what the engine's thread took, as an argument of `benchmarks.kv.sessions_simulation`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from benchmarks.common import say
from benchmarks.kv.disk_simulation import AheadDevice
from benchmarks.kv.host_costs import counted
from benchmarks.kv.on_gpu import AT_ONCE, GIB, HISTORY, PROMPT_TOKENS, SESSIONS, Engine, one_round, turn_orders, watched
from benchmarks.kv.virtual_disk import (
    BATCH_TOKENS,
    GPUS,
    GRAPH_TOKENS,
    PAGE_BYTES,
    PAGE_TOKENS,
    READS_FIRST,
    SLICE_TOKENS,
    WINDOW,
    World,
)
from wicore_trt.arithmetic import pages_per_slab
from wicore_trt.collector import collect_rarely
from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.core.engine import EngineCore
from wicore_trt.runtime.batch import SampledTokens, StepBatch, StepResult
from wicore_trt.runtime.executor import CameIn, Done, KVLayout
from wicore_trt.runtime.page_digest import PageDigest
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.schedule.step_time import StepTime

TOGETHER = 64
"""Copies that begin and are told of together, as on a GPU."""
LATE_S = 0.01
"""So much later than it should a thread may wake, and make up for it."""
Copies = list[tuple[float, CameIn, list[bytes]]]


class PacedLink:
    """A `PageCopier` whose copies take their time, in a thread for each direction."""

    broken: BaseException | None = None
    checks = True
    coded_bytes: Mapping[str, int] = {}

    def __init__(self, page_bytes: dict[str, int], bytes_per_s: float) -> None:
        keyed = PageDigest(bytes(32), max(page_bytes.values()))
        self.digest, self._rate = keyed.compute_digest, bytes_per_s
        self._zeros = {group: self.digest([memoryview(bytes(size))]) for group, size in page_bytes.items()}
        self._asked: dict[str, Copies] = {"out": [], "in": []}
        self._queues = {way: SimpleQueue[Copies]() for way in self._asked}
        for queue in self._queues.values():
            threading.Thread(target=self._run, args=(queue,), daemon=True).start()

    def pin(self, memory: memoryview) -> bool:
        return True

    def to_host(self, group: str, slot: int, parts: object, done: Done, *, settled: bool = False) -> None:
        seconds, digest = PAGE_BYTES[group] / self._rate, self._zeros[group]
        self._asked["out"].append((seconds, lambda digests, took: done(digests[0], took), [digest]))

    def to_device(self, group: str, slots: Sequence[int], pages: object, done: CameIn) -> None:
        self._asked["in"].append((len(slots) * PAGE_BYTES[group] / self._rate, done, [self._zeros[group]] * len(slots)))

    def flush(self) -> None:
        for way, asked in self._asked.items():
            for at in range(0, len(asked), TOGETHER):
                self._queues[way].put(asked[at : at + TOGETHER])
            self._asked[way] = []

    def _run(self, queue: SimpleQueue[Copies]) -> None:
        free = 0.0
        while True:
            batch = queue.get()
            free = max(free, time.perf_counter()) + sum(seconds for seconds, _, _ in batch)
            time.sleep(max(0.0, free - time.perf_counter()))
            for seconds, done, digests in batch:
                done(cast(Sequence[bytes | None], digests), seconds)


class PacedDevice(AheadDevice):
    """An `AheadExecutor` that takes the time of its steps."""

    def __init__(self, copier: PacedLink, layout: KVLayout, gpu: str) -> None:
        self._world, self.copier, self.layout = World(((0.0, 1.0),), gpu=gpu), cast(Any, copier), layout
        self._under_way, self._ended = deque[tuple[float, float, StepBatch]](), 0.0

    def submit(self, batch: StepBatch) -> None:
        self.copier.flush()
        seconds = self._world.step_s([(s.start, len(s.token_ids)) for s in batch.slices])
        self._under_way.append((time.perf_counter(), seconds, batch))

    def collect(self) -> StepResult:
        begun, seconds, batch = self._under_way.popleft()
        self._ended = max(begun, self._ended) + seconds
        time.sleep(max(0.0, self._ended - time.perf_counter()))
        return StepResult([SampledTokens(s.seq_id, (7,)) for s in batch.slices if s.sample])


def pace_disk(store: Any, bytes_per_s: float) -> None:
    """Let a store's moves begin no sooner than a disk of this rate would end them, reads and writes in the order of the
    native threads."""
    begin, size, told = store._mover.begin, store._slot_bytes, threading.Semaphore(0)  # noqa: SLF001
    waiting = {True: deque[Any](), False: deque[Any]()}  # writes, reads

    def run() -> None:
        free, reads_since = 0.0, 0
        while told.acquire():
            write = not waiting[False] or bool(waiting[True] and reads_since >= READS_FIRST)
            reads_since = 0 if write else reads_since + 1
            run = waiting[write].popleft()
            free = max(free, time.perf_counter() - LATE_S) + sum(len(m.slots) for m in run[0]) * size / bytes_per_s
            time.sleep(max(0.0, free - time.perf_counter()))
            begin(*run)

    def begin_later(moves: Any, *rest: Any) -> None:
        waiting[moves[0].write].append((moves, *rest))
        told.release()

    store._mover.begin = begin_later  # noqa: SLF001
    threading.Thread(target=run, daemon=True).start()


class PacedEngine(Engine):
    """GiB of each tier, before pages are made smaller."""

    def __init__(self, folder: Path, gib: tuple[int, int, int], smaller: int, link: float, gpu: str) -> None:
        small, slabs = {group: size // smaller for group, size in PAGE_BYTES.items()}, pages_per_slab(PAGE_BYTES)
        device, host, disk = (size * GIB for size in gib)
        number = device // max(slabs[group] * size for group, size in PAGE_BYTES.items())
        layout = KVLayout(PAGE_TOKENS, "bfloat16", {g: number * n for g, n in slabs.items()}, small, slabs)
        copier = PacedLink(small, link)
        settings = KVSettings(
            host_bytes=host // smaller, disk_path=str(folder), disk_bytes=disk // smaller * 5 // 4, disk_free_bytes=0
        )  # a slot's header takes a fifth of it here
        manager, loader = make_cache(settings, layout, WINDOW, engine="paced", kernels="none", copier=cast(Any, copier))
        scheduler = Scheduler(
            manager, max_batch_tokens=BATCH_TOKENS, max_sequences=AT_ONCE, loader=loader, slice_tokens=SLICE_TOKENS,
            step_time=StepTime(1.0),
        )  # fmt: skip
        executor = cast(Any, PacedDevice(copier, layout, gpu))
        self.core = EngineCore(executor, scheduler, eos_ids=(1,), max_context=131_072)
        self.core.set_pace(awaited=False)
        self._ids = itertools.count()
        collect_rarely()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--smaller", type=int, default=32, help="times by which pages are smaller")
    parser.add_argument("--link-gb-per-s", type=float, default=50.0)
    parser.add_argument("--disk-gb-per-s", type=float, help="of pages as large as they were; default: what it gives")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="whose steps take their time")
    parser.add_argument("--cpu", action="store_true", help="count the thread's CPU time, where others run, too")
    args = parser.parse_args()
    clock = time.thread_time if args.cpu else time.perf_counter
    rng = random.Random(3)
    history = [rng.choices(PROMPT_TOKENS, k=HISTORY) for _ in range(SESSIONS)]
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        engine = PacedEngine(Path(folder), (16, 16, 56), args.smaller, 1e9 * args.link_gb_per_s, args.gpu)
        tiers = engine.core.scheduler.manager.tiers
        if args.disk_gb_per_s and tiers is not None:
            pace_disk(tiers.store, 1e9 * args.disk_gb_per_s / args.smaller)
        for turn, order in enumerate(turn_orders("random", rng)):
            count = counted(engine.core.executor, clock=clock, graph_tokens=GRAPH_TOKENS)
            with count as host, watched(engine) as went:
                seconds, p50, p90, found = one_round(engine, history, order, rng)
            say(", ".join(f"{name} {value:.3g}" for name, value in went.items()))
            say(f"round {turn}: {SESSIONS / seconds:.2f} turns/s, TTFT {p50:.3f} and {p90:.3f}, {found:.2f}")
            say(f"the engine's thread: {host.costs}")
        engine.core.close()


if __name__ == "__main__":
    main()
