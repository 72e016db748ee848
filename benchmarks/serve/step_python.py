"""What the engine's thread does in Python for a decode step, by part, in CPU time.

    python -m benchmarks.serve.step_python [--rows 1,64,256] [--context 2048] [--cases greedy,drawn] [--profile greedy]

The real loop, scheduler, cache, link and triton executor's host side (step inputs, the block that goes to the device,
what is read back) with 27B's page counts, over a device that is not there: its step is a sleep without the
interpreter's lock, started before the last one's tokens are read wherever the executor agrees. Prints microseconds of
the thread's CPU time a step: the mean and the median of all, then the mean of the quickest 32 in a row, in which each
sequence fills a page, and of those by part: on a busy machine these come nearest to what an idle one needs. Some of a
step's work is not in it: launching the graph and the kernels that sample, and CUDA's copies. On a busy machine a step
that has slept finds its caches cold; `--step-ms 0` shows the Python alone. `logprobs` samples on the host, from a small
vocabulary. Needs no device.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import os
import pstats
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import say
from benchmarks.kv.engine_thread import SLOT_BYTES, Device
from wicore_trt.backends.triton.executor import TritonExecutor
from wicore_trt.backends.triton.inputs import StepBlock
from wicore_trt.backends.triton.memory import StepLimits
from wicore_trt.backends.triton.sampler import WORDS, DeviceSampler, StepSampler
from wicore_trt.collector import collect_rarely
from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.sizing import builtin_spec
from wicore_trt.link.host import EngineHost
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.pool_sizes import shared_pages
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.schedule.step_time import StepTime
from wicore_trt.types import GenerateRequest, ModelInfo, SamplingParams

PAGE_TOKENS, WINDOW, BATCH_TOKENS, VOCAB = 32, 1024, 8192, 1024
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PARTS = ("schedule", "batch", "inputs", "read", "land", "emit")
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "greedy": ({"temperature": 0.0}, False),
    "drawn": ({"temperature": 0.7, "top_p": 0.95}, False),
    "tiers": ({"temperature": 0.0}, True),
    "stops": ({"temperature": 0.0, "stop_token_ids": (3, 4, 5, 6)}, False),
    "logprobs": ({"temperature": 0.0, "logprobs": 5}, False),
}
"""Sampling parameters, and whether there are lower tiers."""


class Drawing(DeviceSampler):
    """Writes the parameters of a step; nobody draws."""

    available = True

    def __init__(self, rows: int) -> None:
        self._rows, self._vocab = rows, VOCAB
        self._staging = [torch.zeros(rows * sum(WORDS.values()), dtype=torch.int32) for _ in range(2)]

    def draw_rows(self, rows: int, drawn: Any) -> None:
        self._staging.reverse()
        self._fill_parameters(rows, drawn)


class HostSide(TritonExecutor):
    """A `TritonExecutor` whose device only takes time: `step_s` a step, one after the other."""

    def __init__(self, layout: KVLayout, rows: int, context: int, step_s: float) -> None:
        self.spec, self.device, self._closed = builtin_spec("gemma3-27b"), self, False  # type: ignore[assignment]
        self.max_batch_tokens, self.max_sequences, self.score_rows = BATCH_TOKENS, rows, 0
        self.graph_sizes: dict[int, tuple[int, ...]] = {}
        self.images = None
        self.slice_tokens, self.kernels, self.layout = 256, "none", layout
        self.graphs, self.prompt_graphs = dict.fromkeys(BUCKETS, self.run), {}
        limits = StepLimits(BATCH_TOKENS, rows, context)
        self.block = StepBlock(limits, tuple(layout.num_pages), PAGE_TOKENS, BUCKETS[-1], self)  # type: ignore[arg-type]
        self._hosts = [(found := self.staging((2, rows)), found.numpy(), self.staging((0,))) for _ in range(2)]
        results, logits = self.staging((2, rows)) + 7, torch.randn(rows, VOCAB)
        results[1], self._tokens = 0, results[0]
        self.memory = SimpleNamespace(results=results, logits=logits)  # type: ignore[assignment]
        self.model = SimpleNamespace(segments=None, memory=self.memory)  # type: ignore[assignment]
        self.sampler = StepSampler(self.model, self, Drawing(rows))  # type: ignore[arg-type]
        self._measured_layers = cycle([0])
        self._steps, self._rows = deque(), ([], [])
        self._page_copies = Copies(layout, WINDOW, BATCH_TOKENS)
        self.copier = self._page_copies
        self._step_s, self._end = step_s, 0.0

    def run(self, *arrays: Any) -> None:
        """No kernels."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def staging(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=torch.int32)

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> Callable[[], None]:
        """The end of a step that begins when the one before it is over."""
        self._end = end = max(self._end, time.monotonic()) + self._step_s
        return lambda: time.sleep(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        self._closed = True


class Copies(Device):
    """Copies pages at once."""

    def begin_step(self, batch: Any) -> None:
        pass


class Meter:
    """CPU time of the thread that calls, by part; a part inside another one counts for itself alone."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._inside = [0.0]

    def of(self, owner: Any, name: str, part: str) -> None:
        """Count the calls of a method of an object."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            begun = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                took = time.thread_time() - begun
                self.spent[part] += took - self._inside.pop()
                self._inside[-1] += took

        setattr(owner, name, timed)


def make_host(rows: int, context: int, step_s: float, *, tiers: bool) -> EngineHost:
    """An engine of the triton backend with room for all rows, in memory that the layer groups share."""
    spec, longest = builtin_spec("gemma3-27b"), context + 8192
    tokens = rows * longest + BATCH_TOKENS
    budget = tokens * (spec.page_bytes(GLOBAL, 1, 2) + spec.page_bytes(LOCAL, 1, 2))
    shared = shared_pages(spec, PAGE_TOKENS, 2, budget, longest, max_batch_tokens=BATCH_TOKENS)
    assert shared is not None
    ratio = shared.slab_pages[GLOBAL] // shared.slab_pages[LOCAL]
    layout = KVLayout(
        PAGE_TOKENS, "bfloat16", shared.num_pages, {GLOBAL: SLOT_BYTES, LOCAL: ratio * SLOT_BYTES}, shared.slab_pages
    )
    executor = HostSide(layout, rows, longest, step_s)
    host_bytes = 4 * rows * longest // PAGE_TOKENS * SLOT_BYTES if tiers else 0
    manager, loader = make_cache(
        KVSettings(host_bytes=host_bytes), layout, WINDOW, engine="e", kernels="k", copier=executor.copier
    )
    scheduler = Scheduler(
        manager, max_batch_tokens=BATCH_TOKENS, max_sequences=rows, loader=loader, step_time=StepTime()
    )
    core = EngineCore(executor, scheduler, eos_ids=(1,), max_context=longest)
    info = ModelInfo(
        model_id="none", backend="triton", kernels="none", dtype="bfloat16", kv_dtype="bfloat16", quantization=None,
        max_context_tokens=longest, vocab_size=VOCAB, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
        fingerprint="0", eos_token_ids=(1,), bos_token_id=None, chat=False,
    )  # fmt: skip
    return EngineHost(core, info, max_waiting=4096)


READ_ALL = "import socket; s = socket.socket(fileno=0)\nwhile s.recv(1 << 18): pass"
"""The front: reads and throws away."""


def measure(case: str, rows: int, context: int, steps: int, step_s: float, *, profiled: bool) -> dict[str, float]:
    """Microseconds a step."""
    params, tiers = CASES[case]
    host = make_host(rows, context, step_s, tiers=tiers)
    core, loop, meter, rng = host.core, host.engine, Meter(), random.Random(rows)
    assert isinstance(core, EngineCore)
    for owner, names, part in (
        (core.scheduler, ("schedule_step", "schedule_ahead"), "schedule"),
        (core, ("_start_step",), "batch"),
        (core.executor, ("submit",), "inputs"),
        (core.executor, ("collect", "leads"), "read"),
        (core, ("_land_step",), "land"),
        (loop, ("_emit_outputs",), "emit"),
    ):
        for name in names:
            meter.of(owner, name, part)
    step, profile, last, decoding, over = core.step, cProfile.Profile(), 0.0, threading.Event(), threading.Event()
    totals, parts = list[float](), list[dict[str, float]]()

    def stepped() -> Any:
        """Between two calls of `step` lies all that the thread does for one."""
        nonlocal last
        now = time.thread_time()
        running = core.scheduler.running
        if decoding.is_set() and len(totals) < steps:
            totals.append(now - last)
            parts.append(dict(meter.spent))
            if len(totals) == steps:
                profile.disable()
                over.set()
        elif not decoding.is_set() and len(running) == rows and all(s.output_len > 4 for s in running):
            decoding.set()
            if profiled:
                profile.enable()
        meter.spent.clear()
        last = now
        return step()

    core.step = stepped  # type: ignore[method-assign]
    ours, theirs = socket.socketpair()
    front = subprocess.Popen([sys.executable, "-c", READ_ALL], stdin=ours.fileno())
    collect_rarely()  # as the engine's process does
    host.start()
    host.attach(theirs)
    wanted = SamplingParams(max_tokens=8000, ignore_eos=True, **params)
    for i in range(rows):
        prompt = tuple(itertools.islice(iter(lambda: rng.randrange(10, VOCAB), -1), context))
        loop.add(GenerateRequest(f"1/{i}", prompt, wanted))
    assert over.wait(600), "the engine is stuck"
    host.stop(10)
    front.kill()
    front.wait()
    ours.close()
    if profiled:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    at = min(range(max(1, steps - PAGE_TOKENS + 1)), key=lambda i: sum(totals[i : i + PAGE_TOKENS]))
    quickest = slice(at, at + PAGE_TOKENS)
    least = statistics.mean(totals[quickest])
    found = {part: statistics.mean(spent.get(part, 0.0) for spent in parts[quickest]) for part in PARTS}
    rest, mean, median = least - sum(found.values()), statistics.mean(totals), statistics.median(totals)
    values = {"all": mean, "median": median, "least": least, **found, "rest": rest}
    return {name: 1e6 * value for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--profile", choices=("", *CASES), default="", help="print where the time of a case goes")
    given = parser.parse_args()
    torch.set_num_threads(1)  # what is copied here is copied by a GPU's engines there
    say(f"us of CPU time a step; load {os.getloadavg()[0]:.1f}")
    columns = ("all", "median", "least", *PARTS, "rest")
    print("| case, rows | " + " | ".join(columns) + " |\n|---" + "|---" * len(columns) + "|")
    for case in given.cases.split(","):
        for rows in map(int, given.rows.split(",")):
            profiled = case == given.profile
            found = measure(case, rows, given.context, given.steps, given.step_ms / 1e3, profiled=profiled)
            print(f"| {case}, {rows} | " + " | ".join(f"{found[name]:.0f}" for name in columns) + " |", flush=True)


if __name__ == "__main__":
    main()
