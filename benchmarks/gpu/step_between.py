"""Measure the time between the graphs of decode steps that follow each other, by part.

Used by `benchmarks.gpu.step_time`. The parts are put on the stream again and again without waiting, first the graph
alone, then more and more of what a step puts around it; the last measure is the executor's own: steps that are
submitted before the tokens of the one in front are read. What one adds to the one before it is what that part costs the
device, or the host where that is what a step waits for; the graph alone is measured again at the end, so that a clock
that changed meanwhile is not taken for a part. Knows nothing of clocks: `seconds` measures a number of
rounds. Invariant: all of them compute the same step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from msgspec import structs

from wicore_trt.backends.triton.executor import TritonExecutor
from wicore_trt.backends.triton.inputs import Unread, array_offsets, array_sizes
from wicore_trt.backends.triton.rows import RowPlan
from wicore_trt.runtime.batch import UNREAD, StepBatch

Seconds = Callable[[Callable[[], None]], float]
"""How long a call takes, with all that it puts on the stream."""


def between(
    executor: TritonExecutor, batch: StepBatch, size: RowPlan, rounds: int, seconds: Seconds
) -> dict[str, float]:
    """Milliseconds a step by what is in it. `batch` decodes, and was executed last; `size` is that of its graph."""
    device, memory, block = executor.device, executor.memory, executor.block
    graph, host = executor.graphs[size.tokens], device.staging(tuple(memory.results.shape))
    offsets, end = array_offsets(array_sizes(size, tuple(executor.layout.num_pages)))
    unread = Unread(memory.results[0], [*range(size.decode.rows)])
    parts: dict[str, Callable[[], object]] = {
        "graph": graph,
        "upload": lambda: block._send_block(end),  # noqa: SLF001 -- the parts of a step are nobody else's
        "token ids": lambda: block._copy_unread(unread, offsets),  # noqa: SLF001
        "results": lambda: host.copy_(memory.results, non_blocking=True),
        "event": device.record,
    }
    found: dict[str, float] = {}
    with device.active(), torch.inference_mode():
        for count in range(1, len(parts) + 1):
            taken = list(parts.items())[:count]
            # The upload and the token ids lie in front of the graph.
            work = [*(w for n, w in taken if n in ("upload", "token ids")), graph, *(w for n, w in taken[3:])]
            found[taken[-1][0]] = 1e3 * seconds(partial(_repeat, work, rounds)) / rounds
        found["graph, again"] = 1e3 * seconds(partial(_repeat, [graph], rounds)) / rounds
    found["ahead"] = 1e3 * seconds(partial(_ahead, executor, batch, rounds)) / rounds
    return found


def _repeat(work: list[Callable[[], object]], rounds: int) -> None:
    for _ in range(rounds):
        for part in work:
            part()


def _ahead(executor: TritonExecutor, batch: StepBatch, rounds: int) -> None:
    """Each step is submitted before the last one is collected."""
    later = StepBatch([structs.replace(s, token_ids=[UNREAD]) for s in batch.slices])
    executor.submit(batch)
    for _ in range(rounds - 1):
        executor.submit(later)
        executor.collect()
    executor.collect()
