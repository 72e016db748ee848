"""Opener of a rank of the triton executor on the CPU, for `runtime.ranks` and its processes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from parity.tiny import TinyModel
from runtime.triton_cpu import executor_of, small_model

from wicore_trt.backends.triton.executor import TritonExecutor
from wicore_trt.runtime.exchange import RankExchange
from wicore_trt.runtime.options import ExecutorOptions

OPENER = f"{__name__}:open_rank"


@cache
def make_model() -> TinyModel:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return small_model(7, vocab_size=96, **sizes)


def open_rank(path: Path, options: ExecutorOptions, ranks: RankExchange) -> TritonExecutor:
    part = make_model().spec.shard(ranks.rank, ranks.ranks)
    executor = executor_of(make_model(), part=part, ranks=ranks, graphs=True, compare_ranks=options.compare_ranks)
    if path.name == f"rows-{ranks.rank}":  # a row of this rank changes behind each step
        enqueue = executor._enqueue_step
        executor._enqueue_step = lambda *step: (  # type: ignore[assignment]
            enqueue(*step), executor.memory.residual[0].add_(1),
        )[0]  # fmt: skip
    if path.name == f"tokens-{ranks.rank}":  # this rank draws otherwise
        executor.memory.logits.add_(0)
        choose = executor.sampler.drawing.draw_rows
        executor.sampler.drawing.draw_rows = lambda rows, drawn: (  # type: ignore[method-assign]
            choose(rows, drawn), executor.memory.results[0].add_(1),
        )  # fmt: skip
    return executor
