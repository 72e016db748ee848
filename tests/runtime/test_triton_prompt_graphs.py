"""Steps with prompts in graphs of a few sizes: padding changes no bit of what the steps compute, wherever it lies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from parity.paged import GREEDY, PagedSequence, relative_error  # noqa: E402
from runtime.triton_cpu import Driver, executor_of, oracle_of, small_model  # noqa: E402

from wicore_trt.backends.triton import executor as triton_executor  # noqa: E402
from wicore_trt.backends.triton import memory as triton_memory  # noqa: E402
from wicore_trt.backends.triton import rows as triton_rows  # noqa: E402
from wicore_trt.backends.triton.executor import TritonExecutor  # noqa: E402
from wicore_trt.backends.triton.rows import PROMPT_BUCKETS, make_plan, plan_rows, prompt_plans  # noqa: E402
from wicore_trt.plugins.decode_layout import Segments  # noqa: E402
from wicore_trt.runtime.batch import UNREAD, SequenceSlice, StepBatch  # noqa: E402
from wicore_trt.types import SamplingParams  # noqa: E402

SETTINGS: dict[str, Any] = {"kv_pages": {"global": 90, "local": 90}, "max_batch_tokens": 40, "max_sequences": 8}
WORKING = ("residual", "x", "q", "attended", "act", "head_in", "logits", "results", "sampled_residual")
MEASURED = ("queries", "masses")


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_executor, "DECODE_BUCKETS", (2, 4, 8))
    monkeypatch.setattr(triton_rows, "PROMPT_BUCKETS", dict.fromkeys((0, 4), (9, 24)))
    monkeypatch.setattr(triton_rows, "PROMPT_CHUNKS", 2)


def counted(executor: TritonExecutor) -> Counter[str]:
    """How often what ran: a graph of prompts, or of decoding, or kernel after kernel."""
    ran: Counter[str] = Counter()

    def seen(name: str, call: Any) -> Any:
        def run(*args: Any) -> None:
            ran[name] += 1
            call(*args)
            if name != "kernels":
                ran["kernels"] -= 1  # what the graph launched

        return run

    for size, graph in [*executor.prompt_graphs.items()]:
        executor.prompt_graphs[size] = seen(f"{size.tokens}, {size.decode.sequences}", graph)
    for rows, graph in [*executor.graphs.items()]:
        executor.graphs[rows] = seen("decode", graph)
    executor.run = seen("kernels", executor.run)  # type: ignore[method-assign]
    return ran


def poison(executor: TritonExecutor) -> None:
    """What no step may read before it wrote it: NaN, and pages far away."""
    for name in (*WORKING, *MEASURED):
        getattr(executor.memory, name).view(torch.uint8).fill_(0xFF)
    executor.block._block.fill_(1 << 20)


@pytest.mark.parametrize("buckets", [{0: (9, 24), 4: (9, 24)}, PROMPT_BUCKETS], ids=["few", "real"])
def test_the_sizes_told_are_those_that_graphs_hold(buckets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens of a prompt that fill a graph, beside as many sequences that decode as are told, and not one more."""
    monkeypatch.setattr(triton_executor, "DECODE_BUCKETS", (2, 4, 64))
    monkeypatch.setattr(triton_rows, "PROMPT_BUCKETS", buckets)
    given = {**SETTINGS, "max_batch_tokens": 700, "max_sequences": 40}
    executor = executor_of(small_model(1), graphs=True, **given)
    sizes, told = [*executor.prompt_graphs], executor.graph_sizes
    assert [*told] == sorted(told) == [rows for rows in buckets if rows <= 64]
    for rows, found in told.items():
        assert list(found) == sorted(set(found))
        for tokens in found:
            assert any(size.holds(make_plan(tokens + rows, rows, 1, rows + 1)) for size in sizes)
            larger = [size for size in sizes if size.holds(make_plan(tokens + 1 + rows, rows, 1, rows + 1))]
            assert bool(larger) == (tokens != found[-1])
    assert max(size.tokens for size in sizes) <= 700


def test_a_graph_of_more_tokens_than_have_queries_takes_no_step_that_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither one that is measured, nor one with keys that cuDNN would take."""
    monkeypatch.setattr(triton_memory, "KEPT_TOKENS", 9)
    executor = executor_of(small_model(1), graphs=True, **SETTINGS)
    segments: Any = SimpleNamespace(segments=Segments(32, 16, 16, 2))

    def runs(tokens: int, start: int, measured: int | None) -> bool:
        pages, plan = dict.fromkeys(executor.pools, list(range(20))), plan_rows([tokens])
        found = executor._find_graph([SequenceSlice(1, [1] * tokens, start, pages, params=GREEDY)], plan, measured)
        assert found is None or found[0].holds(plan)
        return found is not None

    assert runs(9, 0, None) and runs(9, 0, 1) and runs(20, 40, None)
    assert not runs(20, 0, 1) and not runs(25, 0, None)
    executor.model = replace(executor.model, segments=segments)
    assert runs(20, 31, None) and not runs(20, 32, None) and runs(9, 32, 1)


def lengths_of(rng: random.Random, count: int) -> Iterator[list[int]]:
    """New tokens of each sequence: of prompts in chunks, and beside them of some that decode."""
    for _ in range(count):
        singles, chunks = rng.randint(0, 5), rng.choice((1, 1, 1, 1, 2, 2, 3))
        found = [1] * singles + [rng.choice((2, 3, 5, 9)) for _ in range(min(chunks, 8 - singles))]
        rng.shuffle(found)
        yield found


@pytest.mark.parametrize(
    ("kv_dtype", "kept", "prepares"),
    [
        pytest.param("fp8", 768, True, marks=pytest.mark.long),
        pytest.param("fp8", 768, False, marks=pytest.mark.long),
        ("bfloat16", 9, True),  # fewer steps, so that there is time for those that prepare
    ],
)
def test_padding_changes_no_bit(kv_dtype: str, kept: int, prepares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, logits, masses and pages are those of the same step launched as it is, by kernels that do not depend on
    its size; whatever lay in the memory between, and whichever sequences sample."""
    monkeypatch.setattr(triton_memory, "KEPT_TOKENS", kept)
    model, rng = small_model(random.randrange(1000), num_hidden_layers=2), random.Random()
    given = {**SETTINGS, "batch_invariant": True, "kv_dtype": kv_dtype}
    padded, plain = executor_of(model, graphs=True, prepares=prepares, **given), executor_of(model, **given)
    assert all(p.float().isnan().all() for p in padded.pools.values()), "preparing wrote to a page"
    drivers, ran = [Driver(e, 1) for e in (padded, plain)], counted(padded)
    sequences: list[list[PagedSequence]] = [[d.new_sequence() for _ in range(8)] for d in drivers]
    steps = 6 if kept > 24 else 3
    for lengths in lengths_of(rng, steps):
        chosen, sampled = rng.sample(range(8), len(lengths)), [rng.random() < 0.7 for _ in lengths]
        tokens = [[rng.randrange(48) for _ in range(n)] for n in lengths]
        poison(padded)
        results, logits, masses = [], [], []
        measure = rng.random() < 0.6
        for driver, own in zip(drivers, sequences, strict=True):
            slices = [driver._slice(own[n], t) for n, t in zip(chosen, tokens, strict=True)]
            for piece, sample in zip(slices, sampled, strict=True):
                piece.sample = sample
            found = driver.executor.execute(StepBatch(slices, measure_attention=measure))
            results.append(found.sampled)
            masses.append(found.attention)
            logits.append(driver.sampler.logits if any(sampled) else torch.zeros(0))
            for n, new in zip(chosen, tokens, strict=True):
                own[n].token_ids += new
                driver._slide(own[n])
        assert results[0] == results[1] and torch.equal(*(found.view(torch.int32) for found in logits))
        assert masses[0] == masses[1] and len(masses[0]) == measure * len(lengths)
        for group, pool in padded.pools.items():
            assert torch.equal(pool.view(torch.uint8), plain.pools[group].view(torch.uint8)), group
    assert sum(ran.values()) == steps, ran
    if kept > 24:  # else those that are measured are launched
        assert len(ran) > 1 and ran["kernels"] < steps, ran


@pytest.mark.parametrize("fp8", [pytest.param(False, marks=pytest.mark.long), True])
def test_padded_steps_compute_what_the_oracle_does(fp8: bool) -> None:
    """By the kernels of their sizes, that of the padding included."""
    model, rng = small_model(random.randrange(1000)), random.Random()
    given = {**SETTINGS, "fp8": fp8}
    mine, oracle = Driver(executor_of(model, graphs=True, **given), 1), Driver(oracle_of(model, "bfloat16", **given), 2)
    ran, errors = counted(mine.executor), []
    sequences = [[d.new_sequence() for _ in range(8)] for d in (mine, oracle)]
    for lengths in lengths_of(rng, 5):
        chosen, tokens = rng.sample(range(8), len(lengths)), [[rng.randrange(48) for _ in range(n)] for n in lengths]
        poison(mine.executor)
        work = [list(zip([own[n] for n in chosen], tokens, strict=True)) for own in sequences]
        errors.append(relative_error(mine.step(work[0]), oracle.step(work[1])))
    assert sorted(errors)[2] < (0.15 if fp8 else 0.05) and max(errors) < (0.3 if fp8 else 0.05), errors
    assert ran["kernels"] < 5


def test_steps_without_a_graph_and_steps_that_follow_unread() -> None:
    """Too many prompts, tokens that are scored, many tokens: kernel after kernel. Tokens that a graph of prompts
    sampled, drawn ones too, are where the next step takes its own from."""
    model, rng = small_model(random.randrange(1000)), random.Random()
    mine, plain = (executor_of(model, graphs=g, batch_invariant=True, **SETTINGS) for g in (True, False))
    ran = counted(mine)
    drawn = SamplingParams(temperature=0.8, top_k=9)

    def prompt(seq_id: int, count: int, **more: Any) -> SequenceSlice:
        tokens = [rng.randrange(48) for _ in range(count)]
        pages = {group: list(range(9 * seq_id, 9 * seq_id + 9)) for group in mine.pools}
        given = {"params": GREEDY if seq_id % 2 else drawn, "seed": seq_id, "prompt_len": count}
        return SequenceSlice(seq_id, tokens, 0, pages, True, **given | more)

    slices = [prompt(0, 3), prompt(1, 1), prompt(2, 2), prompt(3, 1)]
    follow = [
        SequenceSlice(
            s.seq_id, [UNREAD], len(s.token_ids), s.pages, True, s.params, prompt_len=s.prompt_len,
            seed=s.seed,
        )
        for s in slices
    ]  # fmt: skip
    poison(mine)
    found = []
    for executor in (mine, plain):
        executor.submit(StepBatch(slices))
        assert executor.leads(StepBatch(follow))
        executor.submit(StepBatch(follow))
        found.append([executor.collect().sampled, executor.collect().sampled])
    assert found[0] == found[1] and len(found[0][1]) == 4
    assert +ran == {"9, 4": 1, "decode": 1}
    alone = [
        StepBatch([prompt(4 + i, 2) for i in range(3)]),
        StepBatch([prompt(4, 3, targets=[1, 2])]),
        StepBatch([prompt(4, 25)]),
    ]
    for count, batch in enumerate(alone, 1):
        assert mine.execute(batch).sampled == plain.execute(batch).sampled
        assert ran["kernels"] == count


@pytest.mark.parametrize("sequences", [2, 8, 12, 128])
def test_a_prompt_beside_all_other_sequences_has_a_graph(sequences, monkeypatch):
    monkeypatch.setattr(triton_rows, "PROMPT_BUCKETS", PROMPT_BUCKETS)
    step = plan_rows([1] * (sequences - 1) + [100])
    assert any(plan.holds(step) and plan.decode.sequences <= sequences for plan in prompt_plans(8192, sequences))
