"""Steps on a GPU, timed: an engine with made-up weights behind scheduler and core, as `LLM.generate` runs it.

It must not know documents or peers. Invariants: every timed run is of new prompts and gives exactly the tokens that
were asked for, or the run raises; nothing is cached between runs.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpu.cases import BATCH_TOKENS, CONTEXT, OUTPUT, PAGE_TOKENS, EngineConfig, kv_budget, places
from wicore_trt.arithmetic import div_ceil
from wicore_trt.config import Settings, resolve_settings
from wicore_trt.core.assemble import load_engine
from wicore_trt.core.engine import EngineCore
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.executor import Executor, KVLayout
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams

GRAPH_REPEATS = 30
GRAPH_CONTEXT = CONTEXT + OUTPUT // 2
"""Keys of a row of the graph that is timed alone: the mean of a run."""
WARM_BATCH, WARM_TOKENS = 8, 9
SHORT_S, SHORT_RUNS = 0.2, 5
"""A prefill shorter than this is run so often for each long run: a pause of the host moves it most."""
CHEAP_S = 2.0
"""Runs shorter than this are repeated more often."""

Say = Callable[[str], None]


class Run(NamedTuple):
    """Seconds from adding prompts to the last of their tokens, and of each step between two in which all of them had
    one: in such a step they decode and do nothing else."""

    seconds: float
    steps: list[float]


def settings_for(
    config: EngineConfig, engine: Path, batch: int, tokens: int = CONTEXT + OUTPUT, **more: int
) -> Settings:
    """Room for `batch` prompts with outputs, of so many tokens, all at once; no prefix cache, so that no run helps
    another. `more` replaces settings, with __ for the dot in their names."""
    sequences = places(batch)
    longest = div_ceil(tokens, PAGE_TOKENS) * PAGE_TOKENS
    flags = {
        "engine": str(engine),
        "executor.device": "cuda",
        "kv.device_bytes": kv_budget(config, sequences, longest),
        "kv.prefix_cache": False,
        "scheduler.max_batch_tokens": BATCH_TOKENS,
        "scheduler.max_sequences": sequences,
        "scheduler.max_context": longest,
    } | {name.replace("__", "."): value for name, value in more.items()}
    return resolve_settings(None, flags, environ={}).settings


class BatchRunner:
    """A loaded engine that is asked for batches. `close` frees the GPU."""

    def __init__(self, core: EngineCore, load_s: float = 0.0) -> None:
        self.core, self.load_s = core, load_s
        core.set_pace(awaited=False)
        self._rng, self._ids = random.Random(), itertools.count()

    @classmethod
    def load(cls, settings: Settings) -> BatchRunner:
        begun = time.monotonic()
        core = load_engine(settings).engine_core
        return cls(core, time.monotonic() - begun)

    def run(self, batch: int, context: int, tokens: int) -> Run:
        """`batch` prompts of `context` tokens with `tokens` tokens each.

        Raises RuntimeError when a sequence fails or ends early.
        """
        core, vocab = self.core, self.core.executor.spec.vocab_size
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        requests = [
            GenerateRequest(f"bench-{next(self._ids)}", tuple(self._rng.choices(range(vocab), k=context)), params)
            for _ in range(batch)
        ]
        gc.collect()
        outputs, ends = [], list[tuple[float, int]]()
        begun = time.perf_counter()
        for request in requests:
            core.add(request)
        while core.has_work:
            made = core.step()
            ends.append((time.perf_counter(), len(made)))
            outputs += made
        seconds = time.perf_counter() - begun
        counts = dict.fromkeys((r.request_key for r in requests), 0)
        for output in outputs:
            if output.finish_reason not in (None, FinishReason.LENGTH):
                raise RuntimeError(f"{output.request_key} ended with {output.finish_reason}: {output.error}")
            counts[output.request_key] += len(output.token_ids)
        if wrong := {name: count for name, count in counts.items() if count != tokens}:
            raise RuntimeError(f"{tokens} tokens were asked for, and these came: {wrong}")
        return Run(seconds, [b - a for (a, before), (b, now) in pairwise(ends) if before == now == batch])

    def measure(self, config: EngineConfig, batch: int, repeats: int, case_s: float, say: Say) -> dict[str, Any]:
        """A row of the document's `ours`: `repeats` pairs of runs, but no new pair behind `case_s` seconds."""
        before = self.core.scheduler.preemptions
        self.run(min(batch, WARM_BATCH), CONTEXT, WARM_TOKENS)
        first: list[float] = []
        whole: list[float] = []
        steps: list[float] = []

        def more() -> bool:
            limit = case_s if len(whole) < repeats else min(case_s, CHEAP_S)
            return not whole or (sum(first) + sum(whole) < limit and len(whole) < 3 * repeats)

        while more():
            first.append(self.run(batch, CONTEXT, 1).seconds)
            while first[-1] < SHORT_S and len(first) < SHORT_RUNS * (len(whole) + 1):
                first.append(self.run(batch, CONTEXT, 1).seconds)
            run = self.run(batch, CONTEXT, OUTPUT)
            whole.append(run.seconds)
            steps.append(median(run.steps))
        graph = self._graph_ms(batch, say)
        return {
            **{"config": config.name, "batch": batch, "context": CONTEXT, "output_tokens": OUTPUT},
            **{
                "prefill_s": first,
                "total_s": whole,
                "decode_s": steps,
                "graph_ms": graph,
                "graph_context": GRAPH_CONTEXT,
            },
            **{"preemptions": self.core.scheduler.preemptions - before, "load_s": self.load_s},
            "kernels": self.core.executor.kernels,
        }

    def _graph_ms(self, batch: int, say: Say) -> float | None:
        """Median of the decode step's CUDA graph alone; None without one. The last run ended with fewer rows and left
        their inputs, so a step of its own comes first."""
        executor: Any = self.core.executor
        graphs = getattr(executor, "graphs", None) or {}
        bucket = min((rows for rows in graphs if rows >= batch), default=None)
        if bucket is None:
            return None
        try:
            from benchmarks.gpu.step_time import events

            step = decode_batch(executor, batch, GRAPH_CONTEXT)
            executor.execute(step)
            for piece in step.slices:
                executor.release(piece.seq_id)
            return events(executor, graphs[bucket], GRAPH_REPEATS)
        except Exception as error:  # an extra figure must not cost the others
            say(f"the graph of {bucket} rows cannot be timed: {error!r}")
            return None

    def close(self) -> None:
        self.core.close()
        del self.core
        free_device_memory()


def decode_batch(executor: Executor, count: int, keys: int) -> StepBatch:
    """A step of `count` sequences with one token behind `keys` - 1 others, on pages of their own."""
    size, window, slices = executor.layout.page_tokens, executor.spec.sliding_window, []
    free = free_slots(executor.layout)
    whole = div_ceil(keys, size)
    for i in range(count):
        gone = {GLOBAL: 0, LOCAL: max(0, keys - window) // size}
        pages = {g: [-1] * gone[g] + [next(slots) for _ in range(whole - gone[g])] for g, slots in free.items()}
        params = SamplingParams(temperature=0.0)
        slices.append(SequenceSlice(-1 - i, [i], keys - 1, pages, sample=True, params=params))
    return StepBatch(slices)


def free_slots(layout: KVLayout) -> dict[str, Iterator[int]]:
    """Slots of each group, none of which has a byte in common with one of another. Where groups share their memory,
    each takes the next slab when it needs one."""
    if layout.slab_pages is None:
        return {group: iter(range(count)) for group, count in layout.num_pages.items()}
    slabs = iter(range(min(layout.num_pages[group] // pages for group, pages in layout.slab_pages.items())))

    def given(pages: int) -> Iterator[int]:
        for slab in slabs:
            yield from range(slab * pages, (slab + 1) * pages)

    return {group: given(pages) for group, pages in layout.slab_pages.items()}


def free_device_memory() -> None:
    """Give what nothing refers to back to the GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
