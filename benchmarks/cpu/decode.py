"""The CPU goals, measured side by side: our default engine against transformers on Gemma 3 270M. `make bench-cpu`.

One run, one process, the same threads, the same prompts, the contestants taking turns; every prompt is new. A decode
step is (time for all tokens - time for one) / (tokens - 1). Speed is judged against the better of transformers' float32
and bfloat16, quality by perplexity against transformers' float32. Exit code 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import measured_engine, note
from wicore_trt.bench.bound import ModelCost, decode_bound_s, measure_rates
from wicore_trt.bench.perplexity import (
    ROWS,
    Scorer,
    chosen_logprobs,
    compute_perplexity,
    load_scorer,
    read_tokens,
    score_tokens,
)
from wicore_trt.bench.report import Roof, make_report, time_figure
from wicore_trt.checkpoint.demo import fetch_model
from wicore_trt.engine.directory import EngineDir
from wicore_trt.llm import LLM
from wicore_trt.text.model_files import FILES
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import SamplingParams

SPEEDUP_GOALS = {1: 1.5, 8: 1.2}
PERPLEXITY_GOAL_PERCENT = 0.5
QUIET_LOAD = 0.5
OURS, FLOAT32, BFLOAT16 = "wicore", "transformers float32", "transformers bfloat16"
PEERS = (FLOAT32, BFLOAT16)

Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, int], None]
"""generate(prompts, tokens): continue prompts of equal length by exactly that many greedy tokens."""


def load_transformers(gguf: Path, dtype: torch.dtype) -> Any:
    """transformers' Gemma3ForCausalLM from the same file. Needs `transformers`, `accelerate` and `gguf`."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # its GGUF reader draws bars whatever its own switch says
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
    return model.eval()


def transformers_generate(model: Any) -> Generate:
    """Its own `generate`, greedy, end-of-sequence tokens suppressed."""

    def generate(prompts: Prompts, tokens: int) -> None:
        ids = torch.tensor([list(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
        assert out.shape == (len(prompts), ids.shape[1] + tokens)

    return generate


def our_generate(llm: LLM) -> Generate:
    def generate(prompts: Prompts, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        for (completion,) in llm.generate([list(prompt) for prompt in prompts], params):
            assert completion.usage.completion_tokens == tokens and completion.usage.cached_tokens == 0

    return generate


def transformers_scorer(model: Any) -> Scorer:
    """The perplexity Scorer of a transformers model; its head runs over ROWS rows at a time."""

    def score(token_ids: Sequence[int], first: int) -> list[float]:
        found: list[float] = []
        with torch.inference_mode():
            hidden = model.model(torch.tensor([list(token_ids[:-1])])).last_hidden_state[0]
            for row in range(first - 1, len(hidden), ROWS):
                logits = model.lm_head(hidden[row : row + ROWS])
                if (cap := model.config.final_logit_softcapping) is not None:
                    logits = torch.tanh(logits / cap) * cap
                targets = torch.tensor(token_ids[row + 1 : row + 1 + len(logits)])
                found += chosen_logprobs(logits, targets).tolist()
        return found

    return score


def prompt_source(token_ids: Sequence[int], bos_id: int, length: int) -> Iterator[list[int]]:
    """Prompts of `length` tokens, BOS and a piece of a text each, no two alike, in an order that is always the same."""
    places = list(range(len(token_ids) - length))
    random.Random(0).shuffle(places)
    for at in places:
        yield [bos_id, *token_ids[at : at + length - 1]]


def time_steps(
    contestants: dict[str, Generate], prompts: Iterator[list[int]], batch: int, tokens: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Medians over `repeats` rounds (after one that is not counted) of seconds: "prefill" and "step" per contestant.

    Who goes first changes from round to round, so that a machine that slows down slows down everyone.
    """
    prefills: dict[str, list[float]] = {name: [] for name in contestants}
    steps: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(repeats + 1):
        first = [next(prompts) for _ in range(batch)]
        whole = [next(prompts) for _ in range(batch)]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            prefill = _seconds(contestants[name], first, 1)
            total = _seconds(contestants[name], whole, tokens)
            if number:
                prefills[name].append(prefill)
                steps[name].append((total - prefill) / (tokens - 1))
        note(f"batch {batch}, round {number} of {repeats}")
    return {n: {"prefill": statistics.median(prefills[n]), "step": statistics.median(steps[n])} for n in names}


def _seconds(generate: Generate, prompts: Prompts, tokens: int) -> float:
    started = time.perf_counter()
    generate(prompts, tokens)
    return time.perf_counter() - started


def speed_results(
    times: dict[int, dict[str, dict[str, float]]], roof: Roof, prompt_tokens: int, tokens: int
) -> list[dict[str, Any]]:
    """One result per batch size: figures of each contestant, and the speed-up over the better peer."""
    results = []
    for batch, by_name in times.items():
        best = min(PEERS, key=lambda name: by_name[name]["step"])
        bound = decode_bound_s(roof.cost, roof.rates, batch, prompt_tokens, tokens)
        results.append(
            {
                "batch": batch,
                "prompt_tokens": prompt_tokens,
                "output_tokens": tokens,
                "step": {n: time_figure(t["step"], bound if n == OURS else None) for n, t in by_name.items()},
                "prefill": {n: time_figure(t["prefill"]) for n, t in by_name.items()},
                "best_peer": best,
                "speedup": by_name[best]["step"] / by_name[OURS]["step"],
                "prefill_speedup": min(by_name[n]["prefill"] for n in PEERS) / by_name[OURS]["prefill"],
                "goal": SPEEDUP_GOALS[batch],
            }
        )
    return results


def missed_goals(speeds: Sequence[dict[str, Any]], quality: dict[str, Any]) -> list[str]:
    """A sentence for each goal that was not reached."""
    missed = [
        f"batch {r['batch']}: {r['speedup']:.2f}x of {r['best_peer']}, the goal is {r['goal']}x"
        for r in speeds
        if not r["speedup"] >= r["goal"]
    ]
    if not abs(quality["difference_percent"]) <= PERPLEXITY_GOAL_PERCENT:
        missed.append(
            f"perplexity differs by {quality['difference_percent']:+.3f} %, the goal is {PERPLEXITY_GOAL_PERCENT} %"
        )
    return missed


def markdown(speeds: Sequence[dict[str, Any]], quality: dict[str, Any], engine: str) -> str:
    """The tables that a person reads."""
    columns = ("batch", engine, "tokens/s", "of memory bound", *PEERS, "speed-up", "goal", "prefill speed-up")
    lines = [_markdown_row(columns), _markdown_row(["---"] * len(columns))]
    for r in speeds:
        ours = r["step"][OURS]
        cells = (
            str(r["batch"]),
            f"{ours['value']:.2f} ms",
            f"{1e3 * r['batch'] / ours['value']:.1f}",
            f"{ours['percent']:.0f} %",
            *(f"{r['step'][name]['value']:.2f} ms" for name in PEERS),
            f"{r['speedup']:.2f}x",
            f"{r['goal']}x",
            f"{r['prefill_speedup']:.2f}x",
        )
        lines.append(_markdown_row(cells))
    q = quality
    lines += [
        "",
        f"Perplexity over {q['tokens']} tokens: {q[OURS]:.4f}, {FLOAT32} {q[FLOAT32]:.4f}: "
        f"{q['difference_percent']:+.3f} % (goal: within {PERPLEXITY_GOAL_PERCENT} %).",
    ]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.decode", description=__doc__)
    parser.add_argument("--engine", type=Path, help="engine of Gemma 3 270M; built afresh when left out")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--perplexity-tokens", type=int, default=20_000)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables and JSON; returns the exit code."""
    args = _arguments(argv)
    if (load := os.getloadavg()[0]) > QUIET_LOAD:
        note(f"load average {load:.1f}: other work is running here, so these figures say little")
    torch.set_num_threads(args.threads)
    rates = measure_rates("cpu", threads=args.threads)
    gguf = fetch_model("gemma3-270m")
    with measured_engine(args.engine, gguf) as engine:
        manifest, tokenizer = engine.manifest, Tokenizer.from_files(engine.read_present(FILES), engine.path)
        assert tokenizer.bos_id is not None
        head = manifest.weights.head or manifest.base_dtype
        roof = Roof(ModelCost.from_dtypes(manifest.spec, manifest.dtype, head, manifest.kv_dtype), rates)
        text = read_tokens(tokenizer, None, args.perplexity_tokens)
        prompts = prompt_source(text, tokenizer.bos_id, args.prompt_tokens)
        models = {FLOAT32: load_transformers(gguf, torch.float32), BFLOAT16: load_transformers(gguf, torch.bfloat16)}
        with LLM(engine.path, executor__device="cpu", executor__threads=args.threads) as llm:
            info = asdict(llm.info)
            contestants = {OURS: our_generate(llm)} | {n: transformers_generate(m) for n, m in models.items()}
            times = {
                batch: time_steps(contestants, prompts, batch, args.output_tokens, args.repeats)
                for batch in SPEEDUP_GOALS
            }
        speeds = speed_results(times, roof, args.prompt_tokens, args.output_tokens)
        del models[BFLOAT16], contestants
        gc.collect()
        quality = _quality(engine, text, tokenizer.bos_id, models[FLOAT32], args.threads)
    print(markdown(speeds, quality, f"wicore {info['dtype']}, {info['kernels']} kernels"))
    missed = missed_goals(speeds, quality)
    report = make_report(
        "cpu",
        target="in process",
        model=info,
        parameters={"threads": args.threads, "repeats": args.repeats},
        rates=rates,
        results=[*speeds, {"perplexity": quality}],
    )
    print(json.dumps(report | {"missed": missed}, indent=2))
    for sentence in missed:
        note(f"goal missed: {sentence}")
    return 1 if missed else 0


def _quality(engine: EngineDir, text: Sequence[int], bos_id: int, reference: Any, threads: int) -> dict[str, Any]:
    """Perplexities of the engine and of the reference over `text`."""

    def tell(name: str) -> Callable[[int, int], None]:
        return lambda done, total: note(f"perplexity, {name}: {done} of {total} tokens")

    executor = load_scorer(engine, context=1024, threads=threads, device="cpu")
    ours = compute_perplexity(partial(score_tokens, executor), text, bos_id=bos_id, progress=tell(OURS))
    executor.close()
    theirs = compute_perplexity(transformers_scorer(reference), text, bos_id=bos_id, progress=tell(FLOAT32))
    assert ours.tokens == theirs.tokens
    return {
        "tokens": ours.tokens,
        OURS: ours.value,
        FLOAT32: theirs.value,
        "difference_percent": 100 * (ours.value / theirs.value - 1),
    }


if __name__ == "__main__":
    sys.exit(main())
