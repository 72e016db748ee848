"""The serving loop on a GPU, timed: an engine with made-up weights behind scheduler and core, as a server runs it.

It must not know documents or peers. Invariants: every timed run is of new prompts and gives exactly the tokens that
were asked for, or the run raises; nothing is cached between runs.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import BATCH_TOKENS, CONTEXT, OUTPUT, PAGE_TOKENS, EngineConfig, kv_budget, places
from wicore_trt.arithmetic import div_ceil
from wicore_trt.config import Settings, resolve_settings
from wicore_trt.core.assemble import load_engine
from wicore_trt.core.engine import EngineCore
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.executor import Executor
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


def settings_for(config: EngineConfig, engine: Path, batch: int) -> Settings:
    """Room for `batch` prompts with outputs, all at once; no prefix cache, so that no run helps another."""
    sequences = places(batch)
    longest = div_ceil(CONTEXT + OUTPUT, PAGE_TOKENS) * PAGE_TOKENS
    flags = {
        "engine": str(engine),
        "executor.device": "cuda",
        "kv.device_bytes": kv_budget(config, sequences, longest),
        "kv.prefix_cache": False,
        "scheduler.max_batch_tokens": BATCH_TOKENS,
        "scheduler.max_sequences": sequences,
        "scheduler.max_context": longest,
    }
    return resolve_settings(None, flags, environ={}).settings


class BatchRunner:
    """A loaded engine that is asked for batches. `close` frees the GPU."""

    def __init__(self, core: EngineCore, load_s: float = 0.0) -> None:
        self.core, self.load_s = core, load_s
        self._rng, self._ids = random.Random(), itertools.count()

    @classmethod
    def load(cls, settings: Settings) -> BatchRunner:
        begun = time.monotonic()
        core = load_engine(settings).engine_core
        return cls(core, time.monotonic() - begun)

    def run(self, batch: int, context: int, tokens: int) -> float:
        """Seconds from adding `batch` prompts of `context` tokens to the last of `tokens` tokens of each.

        Raises RuntimeError when a sequence fails or ends early.
        """
        core, vocab = self.core, self.core.executor.spec.vocab_size
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        requests = [
            GenerateRequest(f"bench-{next(self._ids)}", tuple(self._rng.choices(range(vocab), k=context)), params)
            for _ in range(batch)
        ]
        gc.collect()
        outputs = []
        begun = time.perf_counter()
        for request in requests:
            core.add(request)
        while core.has_work:
            outputs += core.step()
        seconds = time.perf_counter() - begun
        counts = dict.fromkeys((r.request_id for r in requests), 0)
        for output in outputs:
            if output.finish_reason not in (None, FinishReason.LENGTH):
                raise RuntimeError(f"{output.request_id} ended with {output.finish_reason}: {output.error}")
            counts[output.request_id] += len(output.token_ids)
        if wrong := {name: count for name, count in counts.items() if count != tokens}:
            raise RuntimeError(f"{tokens} tokens were asked for, and these came: {wrong}")
        return seconds

    def measure(self, config: EngineConfig, batch: int, repeats: int, case_s: float, say: Say) -> dict[str, Any]:
        """A row of the document's `ours`: `repeats` pairs of runs, but no new pair behind `case_s` seconds."""
        before = self.core.scheduler.preemptions
        self.run(min(batch, WARM_BATCH), CONTEXT, WARM_TOKENS)
        first: list[float] = []
        whole: list[float] = []

        def more() -> bool:
            limit = case_s if len(whole) < repeats else min(case_s, CHEAP_S)
            return not whole or (sum(first) + sum(whole) < limit and len(whole) < 3 * repeats)

        while more():
            first.append(self.run(batch, CONTEXT, 1))
            while first[-1] < SHORT_S and len(first) < SHORT_RUNS * (len(whole) + 1):
                first.append(self.run(batch, CONTEXT, 1))
            whole.append(self.run(batch, CONTEXT, OUTPUT))
        graph = self._graph_ms(batch, say)
        return {
            **{"config": config.name, "batch": batch, "context": CONTEXT, "output_tokens": OUTPUT},
            **{"prefill_s": first, "total_s": whole, "graph_ms": graph, "graph_context": GRAPH_CONTEXT},
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
    free = {group: list(slots) for group, slots in executor.layout.apart().items()}
    whole = div_ceil(keys, size)
    for i in range(count):
        gone = {GLOBAL: 0, LOCAL: max(0, keys - window) // size}
        pages = {g: [-1] * gone[g] + [slots.pop() for _ in range(whole - gone[g])] for g, slots in free.items()}
        params = SamplingParams(temperature=0.0)
        slices.append(SequenceSlice(-1 - i, [i], keys - 1, pages, sample=True, params=params, history=[i]))
    return StepBatch(slices)


def free_device_memory() -> None:
    """Give what nothing refers to back to the GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
