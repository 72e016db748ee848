"""Compares an executor's answers with the oracle's, and with its own in other company.

Two questions, each for the batch-invariant and the default mode. Against the oracle: the executor is given the oracle's
tokens, so that all positions count, and every other greedy token must be a tie within rounding; its logits may err as
much as a CPU that rounds at the same places. Against itself: the same prompts alone, in groups, in other chunks and
without graphs; in batch-invariant mode every bit of every logit must stay.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.answers.data import (
    DEFAULT,
    INVARIANT,
    JUDGES,
    MAX_FACTOR,
    MEAN_FACTOR,
    Errors,
    Oracle,
    find_differences,
    find_divergences,
)
from benchmarks.answers.runs import Run, Said, Step, count_pages, torch_step, triton_step
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.engine.directory import EngineDir, open_engine
from wicore_trt.engine.options import find_backend
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.options import ExecutorOptions

BUDGET = 256
BUDGETS = (97, 700)
"""Other budgets of tokens for a step; an odd one leaves single tokens of prompts behind."""
MAX_CONTEXT = 2048
MAX_SHOWN = 12
Say = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """Engine to judge: opens an executor in `mode`, with or without graphs, and closes it again."""

    dtype: str
    opened: Callable[[str, bool], Iterator[tuple[Step, KVLayout]]]
    modes: tuple[str, ...]
    has_graphs: bool


def check_answers(
    subject: Subject, oracle: Oracle, say: Say, *, alone: int | None = None
) -> tuple[list[str], np.ndarray]:
    """Return sentences on faults, and the tokens of the free run in the first mode. `alone`: prompts that are run
    alone, all if None."""
    problems: list[str] = []
    kept: np.ndarray | None = None
    for mode in subject.modes:
        began = time.monotonic()
        with contextmanager(subject.opened)(mode, True) as (step, layout):
            name = f"{subject.dtype}, {mode}"
            problems += compare_with_oracle(name, JUDGES[subject.dtype, mode], step, layout, oracle, say)
            run = Run(step, layout, oracle.tokens.shape[1])
            base = run.together(oracle.prompts, BUDGET)
            kept = base.tokens if kept is None else kept
            others = dict(run_in_company(run, oracle.prompts, len(oracle.prompts) if alone is None else alone))
        if subject.has_graphs:
            with contextmanager(subject.opened)(mode, False) as (step, layout):
                others["without graphs"] = Run(step, layout, run.new_tokens, seed=3).together(oracle.prompts, BUDGET)
        for how, said in others.items():
            problems += compare_with_itself(name, how, base, said, oracle, say, strict=mode == INVARIANT)
        say(f"{name}: {time.monotonic() - began:.1f} s")
    assert kept is not None
    return problems, kept


def compare_with_oracle(
    name: str, judges: tuple[str, str], step: Step, layout: KVLayout, oracle: Oracle, say: Say
) -> list[str]:
    """Compare all positions behind the oracle's tokens: greedy tokens, and errors of logits."""
    same, exact = judges
    run = Run(step, layout, oracle.tokens.shape[1], forced=oracle.tokens, ids=oracle.ids, marked=False, seed=1)
    said = run.together(oracle.prompts, BUDGET)
    assert said.values is not None
    rounding, turnable, answers = oracle.rounding(same, exact), oracle.turnable(same, exact), oracle.answers[same]
    errors = Errors.between(said.values, oracle.answers[exact].values)
    twin = Errors.between(said.values, answers.values)
    found = find_divergences(said.tokens, answers)
    ties = [d for d in found if d.explained(turnable)]
    others = int((said.tokens != oracle.tokens).sum())
    say(
        f"{name}: {said.tokens.size} positions, {len(found)} greedy tokens are not those of the {same} oracle "
        f"({len(ties)} ties within rounding, {len(found) - len(ties)} not explained), {others} not the float32 oracle's"
    )
    for d in [d for d in found if d not in ties][:MAX_SHOWN] + ties[:MAX_SHOWN]:
        say(f"  {d.line(oracle.names[d.prompt], turnable)}")
    say(
        f"{name}: logits against {exact}: {errors}; the {same} oracle's own {rounding}; allowed {MAX_FACTOR} and "
        f"{MEAN_FACTOR} times that; against the {same} oracle: {twin}"
    )
    problems = [f"{name}: {len(found) - len(ties)} divergences not explained"] if len(ties) < len(found) else []
    if not errors.within(rounding):
        problems.append(f"{name}: logits err by {errors}, the {same} oracle by {rounding}")
    return problems


def run_in_company(run: Run, prompts: Sequence[Sequence[int]], alone: int) -> Iterator[tuple[str, Said]]:
    """Run the prompts in other company and chunks."""
    rng, numbers = random.Random(5), list(range(len(prompts)))
    yield "alone", run.groups(prompts, [[i] for i in numbers[len(numbers) - alone :]], 1 << 16)
    for number in range(2):
        rng.shuffle(numbers)
        cuts = sorted(rng.sample(range(1, len(numbers)), min(4, len(numbers) - 1)))
        groups = [numbers[a:b] for a, b in zip([0, *cuts], [*cuts, len(numbers)], strict=True)]
        yield f"random groups of {sorted(map(len, groups))}", run.groups(prompts, groups, BUDGET * (number + 1))
    for budget in BUDGETS:
        yield f"{budget} tokens a step", run.together(prompts, budget)


def compare_with_itself(
    name: str, how: str, base: Said, said: Said, oracle: Oracle, say: Say, *, strict: bool
) -> list[str]:
    """Compare `base` with `said`, of prompts run otherwise, which may have the last prompts only."""
    count = len(said.tokens)
    tokens, marks = base.tokens[-count:], base.marks[-count:]
    other = find_differences(tokens, said.tokens)
    at = [i for i, step in enumerate(other) if step is not None]
    bits = [i for i, step in enumerate(find_differences(marks, said.marks)) if step is not None]
    names = oracle.names[-count:]
    text = f"{len(at)} of {count} prompts have other tokens, {len(bits)} other bits of logits"
    where = ", ".join(f"{names[i]} from position {other[i]}" for i in at[:MAX_SHOWN])
    say(f"{name}, {how}: {text}{': ' + where if where else ''}")
    return [f"{name}, {how}: {text}"] if strict and (at or bits) else []


def triton_subject(path: Path, oracle: Oracle) -> Subject:
    """An engine of backend triton on this machine's GPU, or on as many as it has ranks; one GPU loads weights once."""
    from wicore_trt.backends.triton.executor import Loading, TritonExecutor
    from wicore_trt.backends.triton.index import load_table
    from wicore_trt.backends.triton.weights import engine_shape, load_constants
    from wicore_trt.runtime.cuda_device import CudaDevice

    engine = open_engine(path, verify=False)
    if engine.manifest.tp_size > 1:
        return ranks_subject(engine, oracle)
    device = CudaDevice()
    shape = engine_shape(engine)
    table = load_table(engine, shape, device.target)
    with device.active():
        constants = load_constants(engine, shape, MAX_CONTEXT, device)
    loading = Loading(shape, table, engine.manifest.max_context, lambda _: constants)

    def opened(mode: str, graphs: bool) -> Iterator[tuple[Step, KVLayout]]:
        settings = _settings(engine, oracle, mode, "auto")
        executor = TritonExecutor(loading, settings, device, graphs=graphs)
        try:
            yield triton_step(executor, executor), executor.layout
        finally:
            executor.close()

    return Subject(engine.manifest.dtype, opened, (INVARIANT, DEFAULT), has_graphs=True)


def ranks_subject(engine: EngineDir, oracle: Oracle) -> Subject:
    """An engine of several ranks, of which rank 0 has all logits. Ranks compare their tokens."""
    backend = find_backend(engine.manifest.backend)

    def opened(mode: str, graphs: bool) -> Iterator[tuple[Step, KVLayout]]:
        settings = replace(_settings(engine, oracle, mode, "auto"), compare_ranks=True)
        executor: Any = backend.open(engine, settings)
        try:
            yield triton_step(executor, executor._local), executor.layout  # noqa: SLF001 -- rank 0's logits
        finally:
            executor.close()

    return Subject(engine.manifest.dtype, opened, (INVARIANT, DEFAULT), has_graphs=False)


def torch_subject(path: Path, oracle: Oracle) -> Subject:
    """An engine of backend torch on the CPU: a rehearsal, which must agree with the oracle everywhere."""
    engine = open_engine(path, verify=False)

    def opened(mode: str, graphs: bool) -> Iterator[tuple[Step, KVLayout]]:
        executor = TorchExecutor(engine, _settings(engine, oracle, mode, "cpu"))
        try:
            yield torch_step(executor), executor.layout
        finally:
            executor.close()

    return Subject(engine.manifest.dtype, opened, (DEFAULT,), has_graphs=False)


def _settings(engine: EngineDir, oracle: Oracle, mode: str, device: str) -> ExecutorOptions:
    lengths = [len(p) + oracle.tokens.shape[1] for p in oracle.prompts]
    return ExecutorOptions(
        device=device,
        kernels="torch" if device == "cpu" else "auto",
        kv_pages=count_pages(lengths, engine.manifest.page_tokens),
        max_batch_tokens=MAX_CONTEXT,
        max_sequences=len(oracle.prompts),
        max_context=MAX_CONTEXT,
        batch_invariant=mode == INVARIANT,
    )
