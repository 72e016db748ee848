"""Decode steps of Gemma 3 270M with Q4_0 weights: ours against our BF16 engine and against llama.cpp on the same file.

`make bench-cpu`. One process, the same threads, contestants taking turns of a few steps each; a step is one token of
one sequence, logits included, and the median counts. llama.cpp is measured where `llama_cpp` can be imported, or from
`--llama-site`, the site-packages of an environment that has it. It rounds activations to 8 bits, we do not. Exit code 1
when a goal is missed. `benchmarks.answers.q4_0` compares the answers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.answers.q4_0 import write_q4_0
from benchmarks.common import note
from benchmarks.cpu.decode import OURS, QUIET_LOAD
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.bench.bound import ModelCost
from wicore_trt.checkpoint.demo import fetch_model
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import EngineDir
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.options import ExecutorOptions

BF16, LLAMA = "wicore bfloat16", "llama.cpp"
BOUND_GOAL, LLAMA_GOAL = 0.8, 0.9
PROMPT, STEPS, PAGE = 128, 4, 32
Steps = Callable[[Sequence[int]], object]
"""Decode these tokens one after another, from the end of the prompt on."""


def our_steps(engine: EngineDir, prompt: Sequence[int], threads: int) -> tuple[TorchExecutor, Steps]:
    """Our executor with the prompt in its cache."""
    pages = list(range((PROMPT + STEPS) // PAGE + 1))
    table = dict.fromkeys(("global", "local"), len(pages))
    options = ExecutorOptions("cpu", kv_pages=table, page_tokens=PAGE, max_batch_tokens=PROMPT, threads=threads,
                              max_context=PROMPT + STEPS)  # fmt: skip
    executor, row = TorchExecutor(engine, options), torch.zeros(1, dtype=torch.int64)

    def step(tokens: Sequence[int], start: int) -> None:
        executor.logits(StepBatch([SequenceSlice(0, list(tokens), start, dict.fromkeys(table, pages))]), row)

    def decode(tokens: Sequence[int]) -> None:
        for i, token in enumerate(tokens):
            step([token], PROMPT + i)

    step(prompt, 0)
    return executor, decode


def llama_steps(path: Path, prompt: Sequence[int], threads: int) -> Steps:
    """llama.cpp's context with the prompt in its cache."""
    llama = import_module("llama_cpp").Llama(
        str(path), n_ctx=2 * PROMPT, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    llama.eval(list(prompt))

    def decode(tokens: Sequence[int]) -> None:
        llama.n_tokens = PROMPT  # the next call drops what the cache holds behind it
        for token in tokens:
            llama.eval([token])

    return decode


def time_steps(contestants: dict[str, Steps], rounds: int, vocab: int) -> dict[str, dict[str, float]]:
    """Milliseconds per step, "median" and "best", and "cpu": of all threads, by the median."""
    names, found = list(contestants), {name: list[tuple[float, float]]() for name in contestants}
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            tokens = [random.randrange(1000, vocab) for _ in range(STEPS)]
            begun = time.perf_counter(), time.process_time()
            contestants[name](tokens)
            took = time.perf_counter() - begun[0], time.process_time() - begun[1]
            if number:  # the first round warms up
                found[name].append((1e3 * took[0] / STEPS, 1e3 * took[1] / STEPS))
    return {
        name: {
            "median": statistics.median(wall for wall, _ in times),
            "best": min(times)[0],
            "cpu": statistics.median(cpu for _, cpu in times),
        }
        for name, times in found.items()
    }


def missed_goals(times: dict[str, dict[str, float]], bound: float) -> list[str]:
    """A sentence for each goal that was not reached."""
    speedup, missed = times[BF16]["median"] / times[OURS]["median"], list[str]()
    if speedup < BOUND_GOAL * bound:
        missed.append(f"{speedup:.2f}x of {BF16}, the goal is {BOUND_GOAL} of {bound:.2f}x")
    if LLAMA in times and (ratio := times[LLAMA]["median"] / times[OURS]["median"]) < LLAMA_GOAL:
        missed.append(f"{ratio:.2f}x of {LLAMA}, the goal is {LLAMA_GOAL}x")
    return missed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.q4_0", description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--llama-site", type=Path, help="site-packages that have llama-cpp-python")
    args = parser.parse_args(argv)
    if (load := os.getloadavg()[0]) > QUIET_LOAD:
        note(f"load average {load:.1f}: other work is running here, so these figures say little")
    if args.llama_site:
        sys.path.append(str(args.llama_site))
    torch.set_num_threads(args.threads)
    source, contestants = fetch_model("gemma3-270m"), dict[str, Steps]()
    with tempfile.TemporaryDirectory() as scratch:
        file = write_q4_0(source, Path(scratch) / "gemma-3-270m-q4_0.gguf")
        engines = {OURS: build_engine(file, Path(scratch) / "q4_0", dtype="q4_0"),
                   BF16: build_engine(source, Path(scratch) / "bfloat16")}  # fmt: skip
        spec = engines[OURS].manifest.spec
        prompt = [2, *(random.randrange(1000, spec.vocab_size) for _ in range(PROMPT - 1))]
        held = []
        for name, engine in engines.items():
            executor, contestants[name] = our_steps(engine, prompt, args.threads)
            held.append(executor)
        try:
            contestants[LLAMA] = llama_steps(file, prompt, args.threads)
        except ImportError as error:
            note(f"{LLAMA} is left out: {error}")
        times = time_steps(contestants, args.rounds, spec.vocab_size)
        contestants.clear()
        for executor in held:
            executor.close()
        weights = [engine.manifest.weights for engine in engines.values()]
        costs = [ModelCost.from_dtypes(spec, w.storage, w.head or "bfloat16", "bfloat16") for w in weights]
    read = [c.linear_bytes * c.linear_parameters + c.head_bytes * c.head_parameters for c in costs]
    bound = read[1] / read[0]
    print("| one sequence | ms a token | best | CPU | of bfloat16 |\n| --- | --- | --- | --- | --- |")
    for name, t in times.items():
        speedup = times[BF16]["median"] / t["median"]
        print(f"| {name} | {t['median']:.2f} | {t['best']:.2f} | {t['cpu']:.2f} | {speedup:.2f}x |")
    missed = missed_goals(times, bound)
    print(json.dumps({"times": times, "bound": bound, "missed": missed}, indent=2))
    for sentence in missed:
        note(f"goal missed: {sentence}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
