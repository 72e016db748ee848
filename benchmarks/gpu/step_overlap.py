"""Compare steps with and without overlapping launches in a graph of the triton backend: results and times.

Used by `benchmarks.gpu.step_time` and `benchmarks.gpu.step_check`. The kernels of a chain (`plugins.dependent`) can be
launched ordinarily too; a graph of such launches is the reference. Invariant: `replay_problems` compares every bit of
the logits, and no replay follows one of the same tokens, so a kernel that reads too early reads something else.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import torch
from msgspec import structs

from wicore_trt.backends.triton.executor import TritonExecutor
from wicore_trt.backends.triton.rows import RowPlan, decode_plan, plan_rows
from wicore_trt.plugins.aot import CompiledKernel
from wicore_trt.plugins.launch import Launcher
from wicore_trt.plugins.layout import Launch
from wicore_trt.runtime.batch import SequenceSlice, StepBatch

ACTIVATIONS = ("residual", "x", "q", "queries", "attended", "act", "head_in", "logits", "results", "scales", "bytes8")
"""Of `StepMemory`: what a step writes before it reads it."""


class OneByOne:
    """`Launcher` whose kernels begin when the one in front has ended: those in whose name `pattern` is found."""

    def __init__(self, inner: Launcher, pattern: str = "") -> None:
        self._inner, self._pattern = inner, re.compile(pattern)
        self._plain: dict[int, tuple[CompiledKernel, CompiledKernel]] = {}

    def launch(self, kernel: CompiledKernel, call: Launch, stream: int) -> None:
        if id(kernel) not in self._plain:
            ordered = self._pattern.search(kernel.name) is not None
            self._plain[id(kernel)] = (kernel, replace(kernel, dependent=kernel.dependent and not ordered))
        self._inner.launch(self._plain[id(kernel)][1], call, stream)


def overlapping(executor: TritonExecutor) -> int:
    """Count the engine's kernels that may be launched before the one in front has ended."""
    return len({entry.kernel.name for entry in executor.model.table.all_entries() if entry.kernel.dependent})


def captured(executor: TritonExecutor, size: RowPlan, launcher: Launcher | None = None) -> Callable[[], None]:
    """The graph of padded steps of `size` as `launcher` makes it; None: one kernel after the other. All kernels were
    launched before, and the graph's geometry is on the device."""
    model = replace(executor.model, launcher=launcher or OneByOne(executor.model.launcher))

    def work() -> None:
        kept, executor.model = executor.model, model
        try:
            executor.run(executor.block.padded_arrays(size))
        finally:
            executor.model = kept

    with executor.device.active(), torch.inference_mode():
        return executor.device.capture(work)


def replay_problems(executor: TritonExecutor, slices: list[SequenceSlice], count: int) -> list[str]:
    """Take `count` steps, of other tokens each, with overlapping launches and then one kernel after the other; what
    differs, in sentences.

    Those of one token come first in `slices`. Positions rise from theirs to the end of their pages and begin anew, so a
    step reads what steps of the same pass wrote; the KV of those positions is overwritten.
    """
    plan = plan_rows([len(s.token_ids) for s in slices])
    graphs = {decode_plan(rows): graph for rows, graph in executor.graphs.items()} | executor.prompt_graphs
    size, graph = next(each for each in graphs.items() if each[0].holds(plan))
    steps = _steps(executor, slices, count)
    plain = captured(executor, size)
    overlapped = _pass(executor, steps, plan, size, graph)
    ordered = _pass(executor, steps, plan, size, plain)
    wrong = [n for n in range(count) if not torch.equal(overlapped[n], ordered[n])]
    problems = []
    if wrong:
        problems.append(f"{len(wrong)} of {count} replays differ from one kernel after the other, first {wrong[:5]}")
    if any(bool(found[1].any()) for found in ordered):
        problems.append("logits of the replays are not finite, so they prove nothing")
    if count > 1 and torch.equal(ordered[0], ordered[1]):
        problems.append("two steps of different tokens have the same logits, so they prove nothing")
    return problems


def graph_problems(executor: TritonExecutor, slices: list[SequenceSlice], tolerance: float) -> list[str]:
    """Take a step with prompts in its graph and launched as it is; what differs, in sentences. Each sequence has pages
    of its own and enough of them. Kernels are chosen by a step's tokens, padding included, so bits may differ."""
    found: dict[str, torch.Tensor] = {}
    for name, graphs in (("in a graph", executor.prompt_graphs), ("launched", {})):
        kept, executor.prompt_graphs = executor.prompt_graphs, graphs
        try:
            for activation in ACTIVATIONS:
                getattr(executor.memory, activation).view(torch.uint8).fill_(0xFF)
            executor.execute(StepBatch(slices))
            found[name] = executor.memory.logits[executor.rows_of(slices)].float().clone()
        finally:
            executor.prompt_graphs = kept
    got, want = found.values()
    error = float((got - want).abs().max() / want.abs().max())
    what = f"{[len(s.token_ids) for s in slices]} tokens"
    return [] if error <= tolerance else [f"{what}: logits in a graph differ by {error:.3g} of the largest"]


def _steps(executor: TritonExecutor, slices: list[SequenceSlice], count: int) -> list[list[SequenceSlice]]:
    rng, vocab = random.Random(), executor.spec.vocab_size
    steps: list[list[SequenceSlice]] = []
    firsts = [0] * len(slices)
    for number in range(count):
        step = []
        firsts = [(token + rng.randrange(1, vocab)) % vocab for token in firsts]  # never the step before's
        for piece, token in zip(slices, firsts, strict=True):
            tokens = [token] + [rng.randrange(vocab) for _ in piece.token_ids[1:]]
            end = min(len(pages) for pages in piece.pages.values()) * executor.layout.page_tokens
            start = piece.start + number % (end - piece.start - len(tokens) + 1)
            step.append(structs.replace(piece, token_ids=tokens, start=start))
        steps.append(step)
    return steps


def _pass(
    executor: TritonExecutor,
    steps: list[list[SequenceSlice]],
    plan: RowPlan,
    size: RowPlan,
    graph: Callable[[], None],
) -> list[torch.Tensor]:
    """Per step int64 [3, sequences]: token, status and a sum over the logits' bits, which one wrong logit changes
    whatever it is, because its factor is odd."""
    memory, found = executor.memory, []
    factors = torch.arange(executor.spec.vocab_size, device=memory.logits.device) * 2 + 1
    with executor.device.active(), torch.inference_mode():
        for number, slices in enumerate(steps):
            if number % 2:  # every other step finds NaN where it must not read, the others what the last one left
                for name in ACTIVATIONS:
                    getattr(memory, name).view(torch.uint8).fill_(0xFF)
            executor.block.upload_padded(slices, plan, size, executor.layout.num_pages)
            graph()
            begin, first = size.decode.sequences, plan.decode.sequences
            rows = [*range(first), *range(begin, begin + plan.prefill.sequences)]
            bits = memory.logits[rows].view(torch.int32).long()
            found.append(torch.cat([memory.results[:, rows].long(), (bits * factors).sum(1)[None]]))
            executor.device.synchronize()
    return [values.cpu() for values in found]
