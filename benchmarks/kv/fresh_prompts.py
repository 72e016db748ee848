"""What the engine's thread and the copiers' spend on prompts that find nothing, with tiers and without.

    python -m benchmarks.kv.fresh_prompts [--prompts 24] [--tokens 8192] [--rounds 3] [--profile host]

An engine of 27B's page counts in 16 GiB over a device that takes 5 us a token and runs ahead; pages are small, so that
only the books are measured, and copies go through the product's copier over lanes that move nothing. Prompts come 8 at
a time and answer with 64 tokens. Prints milliseconds of CPU time a prompt (medians over rounds, the first left out) for
an engine that keeps nothing, one that keeps pages on the device and one with a host tier: `between` two steps, when the
device waits for the engine's thread; `beside` a step; and of the copiers' threads. Then what the host tier adds to an
engine that keeps pages on the device, in microseconds a page that was copied. Needs no device.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from benchmarks.kv.device_capacity import PAGE_TOKENS, Blank
from wicore_trt.collector import collect_rarely
from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.core.engine import EngineCore
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import StepBatch, StepResult
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.page_copier import StreamPageCopier
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import GenerateRequest, SamplingParams

PAGE_BYTES = {GLOBAL: 3 * 4096, LOCAL: 63_896}
"""3 and 16 slots, as 27B's."""
SLABS, SLAB_PAGES = 252, {GLOBAL: 26, LOCAL: 5}
"""16 GiB of 27B's."""
HOST_SLOTS = 120_000
TOKEN_S, COPY_S = 5e-6, 3e-3
AT_ONCE, ANSWER = 8, 64
CASES = ("nothing kept", "device", "host")


class _Event:
    def __init__(self, at: float) -> None:
        self._at = at

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._at - time.perf_counter()))

    def seconds_after(self, earlier: Any) -> float:
        return COPY_S


class _Lane:
    """What it is given is over a while later, and nothing was moved."""

    def record(self) -> _Event:
        return _Event(time.perf_counter() + COPY_S)

    def wait(self, event: Any) -> None:
        pass

    def copy(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        list(pieces)


class _Digests:
    def ask(self, lane: Any, pages: Sequence[tuple[int, int]]) -> Callable[[Any], Callable[[], Sequence[bytes]]]:
        count = len(pages)
        return lambda lane: lambda: [bytes(16)] * count


class _Memory:
    def pin(self, memory: memoryview) -> bool:
        return False

    def unpin_all(self) -> None:
        pass


class Device(Blank):
    """Runs ahead, and counts what its caller spends between steps and beside them."""

    score_rows = 0
    graph_sizes: ClassVar[dict[int, tuple[int, ...]]] = {}
    images = None

    def __init__(self, layout: KVLayout, copier: StreamPageCopier) -> None:
        super().__init__(layout, 1024, 8192)
        self.copier: Any = copier
        self.between = self.beside = 0.0
        self._steps: deque[tuple[StepBatch, float]] = deque()
        self.since = time.thread_time()

    def _count(self) -> None:
        now = time.thread_time()
        if self._steps:
            self.beside += now - self.since
        else:
            self.between += now - self.since
        self.since = now

    def submit(self, batch: StepBatch) -> None:
        self.copier.begin_step(batch)
        self._count()
        begin = self._steps[-1][1] if self._steps else time.perf_counter()
        self._steps.append((batch, begin + TOKEN_S * batch.num_tokens))

    def collect(self) -> StepResult:
        self._count()
        batch, end = self._steps.popleft()
        time.sleep(max(0.0, end - time.perf_counter()))
        found = super().execute(batch)
        self.since = time.thread_time()
        return found

    def execute(self, batch: StepBatch) -> StepResult:
        self.submit(batch)
        return self.collect()

    def leads(self, batch: StepBatch) -> bool:
        return True

    def close(self) -> None:
        self.copier.close()


def make_core(case: str) -> EngineCore:
    layout = KVLayout(PAGE_TOKENS, "bfloat16", {g: SLABS * n for g, n in SLAB_PAGES.items()}, PAGE_BYTES, SLAB_PAGES)
    memory = torch.empty(layout.memory_bytes, dtype=torch.uint8)
    pools = {g: memory[: n * PAGE_BYTES[g]].view(n, PAGE_BYTES[g]) for g, n in layout.num_pages.items()}
    lanes = (_Lane(), _Lane(), _Lane())
    pinned, digests = _Memory(), _Digests()
    copier = StreamPageCopier(pools, PAGE_TOKENS, lanes, pinned, layout.find_overlaps, digests)  # type: ignore[arg-type]
    host = HOST_SLOTS * 4096 if case == "host" else 0
    settings = KVSettings(host_bytes=host, prefix_cache=case != "nothing kept")
    manager, loader = make_cache(settings, layout, 1024, engine="e", kernels="k", copier=copier)
    scheduler = Scheduler(manager, max_batch_tokens=8192, max_sequences=AT_ONCE, loader=loader)
    return EngineCore(Device(layout, copier), scheduler, eos_ids=(1,), max_context=16_384)  # type: ignore[arg-type]


def cpu_s(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def one_round(core: EngineCore, rng: random.Random, prompts: int, tokens: int) -> tuple[float, ...]:
    """CPU seconds (between steps, beside them, of the copiers' threads) of so many prompts, and pages copied."""
    waiting = [tuple(rng.choices(range(5, 200_000), k=tokens)) for _ in range(prompts)]
    device: Any = core.executor
    device.between = device.beside = 0.0
    device.since = time.thread_time()
    copiers = [thread for thread in threading.enumerate() if "page-copies" in thread.name]
    before, copied = sum(map(cpu_s, copiers)), pages_copied(core)
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    while waiting or core.has_work:
        while waiting and len(core.scheduler.running) + len(core.scheduler.waiting) < AT_ONCE:
            core.add(GenerateRequest(f"{len(waiting)}/{rng.random()}", waiting.pop(), params))
        core.step()
    while core.do_housekeeping():
        time.sleep(0.002)
    return device.between, device.beside, sum(map(cpu_s, copiers)) - before, float(pages_copied(core) - copied)


def pages_copied(core: EngineCore) -> int:
    return sum(sum((*t.pages.values(), *t.evictions.values())) for t in core.stats().kv.tiers if t.tier == "host")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", choices=("", *CASES), default="", help="print where the time of a case goes")
    args = parser.parse_args()
    collect_rarely()  # as the server's engine process does
    rows: dict[str, list[float]] = {}
    for case in CASES:
        core, rng = make_core(case), random.Random(args.tokens)
        one_round(core, rng, args.prompts, args.tokens)  # fills the device's memory
        profile = cProfile.Profile(time.thread_time) if case == args.profile else None
        if profile is not None:
            profile.enable()
        found = [one_round(core, rng, args.prompts, args.tokens) for _ in range(args.rounds)]
        if profile is not None:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        rows[case] = [statistics.median(column) / args.prompts for column in zip(*found, strict=True)]
        core.close()
    print("| kept | between steps, ms | beside steps, ms | copiers, ms | pages copied |\n|---|---|---|---|---|")
    for case, (between, beside, copiers, pages) in rows.items():
        print(f"| {case} | {between * 1e3:.2f} | {beside * 1e3:.2f} | {copiers * 1e3:.2f} | {pages:.0f} |")
    (between, beside, *_), (more, longer, copiers, pages) = rows["device"], rows["host"]
    figures = ((more - between), (longer - beside), copiers)
    print(
        "host tier, us a page: {:.1f} between, {:.1f} beside, {:.1f} copiers".format(
            *(x / pages * 1e6 for x in figures)
        )
    )


if __name__ == "__main__":
    main()
