"""Measure how much of repeated prompts the device's KV memory finds, beside an oracle of the future.

    python -m benchmarks.kv.device_capacity [--gib 80] [--tokens 2048,8192] [--fill 0.9,1.2,1.5] [--max-sequences 8,64]

Conversations of T tokens come one after the other, in rounds, to an engine without lower tiers whose steps compute
nothing. `fill` times what the memory holds of them, each with its global pages and one window, come in a round, in
the same order each time or in another one. Found are tokens of prompts in percent, by round from the second on. Beside
it what Belady's rule finds that keeps whole conversations: the one whose next turn is farthest away leaves. Needs no
device; `--apart` splits the memory into two pools as the engines with `kv_pages` have it.
"""

from __future__ import annotations

import argparse
import random
from types import SimpleNamespace

from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.sizing import MODELS, Geometry, builtin_spec
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import SampledTokens, StepBatch, StepResult
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.pool_sizes import pages_per_sequence, pool_sizes, shared_pages
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import GenerateRequest, SamplingParams

GIB = 1 << 30
PAGE_TOKENS = 32
LONGEST = 131_072


class Blank:
    """An executor of a layout that computes nothing."""

    kernels, slice_tokens, max_sequences, images = "blank", 256, None, None
    broken: BaseException | None = None

    def __init__(self, layout: KVLayout, window: int, max_batch_tokens: int) -> None:
        self.spec = SimpleNamespace(vocab_size=262_144, sliding_window=window)
        self.layout, self.max_batch_tokens, self.copier = layout, max_batch_tokens, self

    def execute(self, batch: StepBatch) -> StepResult:
        return StepResult([SampledTokens(s.seq_id, (7,)) for s in batch.slices if s.sample])

    def release(self, seq_id: int) -> None:
        pass

    def close(self) -> None:
        pass


def make_core(geometry: Geometry, memory: int, max_sequences: int, max_batch_tokens: int, *, apart: bool) -> EngineCore:
    """An engine with `memory` bytes for KV pages."""
    spec, longest = geometry.spec, min(LONGEST, geometry.spec.max_position_embeddings)
    budget = (spec, PAGE_TOKENS, 2, memory, longest)
    shared = None if apart else shared_pages(*budget, max_batch_tokens=max_batch_tokens)
    pages = (
        shared.num_pages
        if shared is not None
        else pool_sizes(*budget, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences)
    )
    slabs = shared.slab_pages if shared is not None else None
    layout = KVLayout(PAGE_TOKENS, "bfloat16", pages, dict(geometry.page_bytes), slabs)
    executor = Blank(layout, spec.sliding_window, max_batch_tokens)
    manager, _ = make_cache(KVSettings(), layout, spec.sliding_window, engine="e", kernels="k", copier=executor)  # type: ignore[arg-type]
    scheduler = Scheduler(manager, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences)
    return EngineCore(executor, scheduler, eos_ids=(1,), max_context=longest)  # type: ignore[arg-type]


def belady(rounds: list[list[int]], capacity: int) -> list[float]:
    """Share of each round that is found with the future known."""
    turns = [i for order in rounds for i in order]
    after: dict[int, list[int]] = {}
    for at, i in reversed(list(enumerate(turns))):
        after.setdefault(i, []).append(at)
    held: set[int] = set()
    hits = []
    for i in turns:
        after[i].pop()
        hits.append(i in held)
        held.add(i)
        while len(held) > capacity:
            held.remove(max(held, key=lambda j: after[j][-1] if after[j] else len(turns)))
    size = len(rounds[0])
    return [sum(hits[at : at + size]) / size for at in range(0, len(hits), size)]


def row(core: EngineCore, tokens: int, rounds: list[list[int]]) -> list[float]:
    """Share of the prompts' tokens that each round finds."""
    rng, rates = random.Random(1), []
    prompts = [tuple(rng.randrange(5, 200_000) for _ in range(tokens)) for _ in rounds[0]]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for turn, order in enumerate(rounds):
        before = core.stats().cached_prompt_tokens
        for i in order:
            core.add(GenerateRequest(f"{turn}/{i}", prompts[i], params))
            while core.has_work:
                core.step()
        rates.append((core.stats().cached_prompt_tokens - before) / (tokens * len(order)))
    core.scheduler.check_integrity()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gemma3-27b")
    parser.add_argument("--gib", type=float, default=80.0, help="memory for KV pages")
    parser.add_argument("--tokens", default="2048,8192,32768,131072", help="lengths of conversations")
    parser.add_argument("--fill", default="0.9,1.2,1.5", help="how much comes, as a multiple of what fits")
    parser.add_argument("--max-sequences", default="32")
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--apart", action="store_true", help="a pool for each layer group")
    args = parser.parse_args()
    geometry, memory = Geometry.from_spec(builtin_spec(args.model), PAGE_TOKENS, "bfloat16"), int(args.gib * GIB)
    print(f"{args.model}, {args.gib:g} GiB, found % in rounds 2 to {args.rounds} (Belady)")
    for tokens in map(int, args.tokens.split(",")):
        pages = {g: pages_per_sequence(geometry.spec, g, PAGE_TOKENS, tokens) for g in (GLOBAL, LOCAL)}
        fits = memory / sum(count * geometry.page_bytes[g] for g, count in pages.items())
        for fill in map(float, args.fill.split(",")):
            count = int(fill * fits)
            for order in ("round robin", "random"):
                for limit in map(int, args.max_sequences.split(",")):
                    rng = random.Random(tokens)
                    rounds = [list(range(count)) for _ in range(args.rounds)]
                    for numbers in rounds if order == "random" else ():
                        rng.shuffle(numbers)
                    core = make_core(geometry, memory, limit, args.max_batch_tokens, apart=args.apart)
                    found, best = row(core, tokens, rounds)[1:], belady(rounds, int(fits))[1:]
                    cells = "  ".join(f"{100 * x:3.0f} ({100 * y:3.0f})" for x, y in zip(found, best, strict=True))
                    print(
                        f"{tokens:7,} x {count:4} = {fill:.1f} of what fits, {order:11}, {limit:2} at once: {cells}",
                        flush=True,
                    )
                    core.close()


if __name__ == "__main__":
    main()
