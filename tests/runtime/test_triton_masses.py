"""Steps of TritonExecutor that measure attention, in Triton's interpreter: in graphs, ahead, and without any effect."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from parity.paged import GREEDY  # noqa: E402
from runtime import triton_cpu  # noqa: E402
from runtime.test_triton_ahead import core_of  # noqa: E402
from runtime.triton_cpu import executor_of, oracle_of, small_model  # noqa: E402

from wicore_trt.backends.triton import executor as triton_executor  # noqa: E402
from wicore_trt.backends.triton.executor import TritonExecutor  # noqa: E402
from wicore_trt.backends.triton.roles import PAGE_MASSES  # noqa: E402
from wicore_trt.backends.triton.table import KernelTable  # noqa: E402
from wicore_trt.core import engine as core_engine  # noqa: E402
from wicore_trt.kv.policy.a2cr import AttentionSignals  # noqa: E402
from wicore_trt.model.spec import GROUPS  # noqa: E402
from wicore_trt.runtime.batch import UNREAD, SequenceSlice, StepBatch, StepResult  # noqa: E402
from wicore_trt.types import GenerateRequest, SamplingParams  # noqa: E402

LIMITS = {"max_sequences": 3, "max_batch_tokens": 12}


@pytest.fixture(autouse=True)
def one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_executor, "DECODE_BUCKETS", (4,))


def piece(seq_id: int, token_ids: list[int], start: int, pages: list[int]) -> SequenceSlice:
    return SequenceSlice(seq_id, token_ids, start, dict.fromkeys(GROUPS, pages), True, GREEDY)


def steps_of(rng: random.Random) -> Iterator[list[SequenceSlice]]:
    """Prompts in slices, one of them of one token, then decoding; two sequences share their first page; a fourth one
    reads pages that nobody wrote."""
    pages = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    ends = [rng.randint(4, 7), rng.randint(1, 3), 1]
    yield [piece(i, [rng.randrange(48) for _ in range(n)], 0, pages[i]) for i, n in enumerate(ends)]
    pages[2] = [0, *pages[2][1:]]
    ends[2] = 4
    for count in (3, 1, 2):
        batch = [piece(i, [rng.randrange(48)], ends[i], pages[i]) for i in rng.sample(range(3), count)]
        for s in batch:
            ends[s.seq_id] += 1
        yield batch
    yield [piece(1, [5], ends[1], pages[1]), piece(7, [3], 6, [20, 21])]


def graphs_run(executor: TritonExecutor) -> list[int]:
    """The buckets of the graphs that run from now on."""
    run: list[int] = []
    for bucket, graph in list(executor.graphs.items()):
        executor.graphs[bucket] = lambda bucket=bucket, graph=graph: (run.append(bucket), graph())[1]
    return run


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_a_measured_step_runs_in_its_graph_and_changes_no_bit(kv_dtype: str) -> None:
    model, rng = small_model(random.randrange(1000), num_hidden_layers=4), random.Random()
    given = {**LIMITS, "batch_invariant": rng.random() < 0.5}
    measured, plain = (executor_of(model, kv_dtype=kv_dtype, graphs=True, prepares=p, **given) for p in (True, False))
    oracle = oracle_of(model, "bfloat16", kv_dtype=kv_dtype)
    assert all(p.float().isnan().all() for p in measured.pools.values()), "preparing wrote to a page"
    run, seen = graphs_run(measured), 0
    assert len(measured.spec.layers_of("global")) == 2
    for batch in steps_of(rng):
        measured.memory.masses.fill_(torch.nan)
        for executor in (measured, plain):
            executor.memory.logits.fill_(torch.nan)
        mine, theirs = (e.execute(StepBatch(batch, measure_attention=True)) for e in (measured, oracle))
        other = plain.execute(StepBatch(batch))
        assert mine.sampled == other.sampled and mine.failed == other.failed and not other.attention
        assert torch.equal(measured.memory.logits.view(torch.int32), plain.memory.logits.view(torch.int32))
        for group, pool in measured.pools.items():
            assert torch.equal(pool.view(torch.uint8), plain.pools[group].view(torch.uint8))
        assert theirs.attention.keys() == {s.seq_id for s in batch} - {7}
        if kv_dtype == "fp8":
            mine.attention.pop(7, None)  # E4M3's NaN is 480 to Triton's interpreter
        assert mine.attention.keys() == theirs.attention.keys()
        for seq_id, masses in mine.attention.items():
            assert masses == pytest.approx(theirs.attention[seq_id], rel=0.05, abs=0.02)
            assert sum(masses) == pytest.approx(len(masses), rel=1e-4)
            seen += len(masses) > 1
    assert run == [4] * 4 and seen >= 3  # two of the first decode, one of the third: any draw of the others


def test_two_measured_steps_under_way_keep_their_masses_apart() -> None:
    model = small_model(random.randrange(1000))
    ahead, after = (executor_of(model, graphs=True, max_sequences=2, max_batch_tokens=6) for _ in range(2))
    prompt = [piece(i, [7 + i, 3, 9], 0, [3 * i, 3 * i + 1, 3 * i + 2]) for i in range(2)]
    assert all(e.execute(StepBatch(prompt)).sampled for e in (ahead, after))
    results: list[list[StepResult]] = [[], []]
    first = [piece(i, [5 + i], 3, [3 * i, 3 * i + 1, 3 * i + 2]) for i in range(2)]
    batch = StepBatch(first, measure_attention=True)
    ahead.submit(batch)
    assert ahead.leads(batch)
    for start in range(4, 8):
        result = after.execute(batch)
        results[1].append(result)
        tokens = [t.token_ids[0] for t in result.sampled]
        batch, unread = (
            StepBatch(
                [piece(i, [token], start, [3 * i, 3 * i + 1, 3 * i + 2]) for i, token in enumerate(given)],
                measure_attention=True,
            )
            for given in (tokens, [UNREAD] * 2)
        )
        ahead.submit(unread)
        for s in unread.slices:
            s.token_ids.append(0)  # whoever made a batch may go on with its lists
        results[0].append(ahead.collect())
    assert results[0] == results[1] and all(r.attention.keys() == {0, 1} for r in results[0])
    assert len({str(r.attention) for r in results[0]}) == 4


@pytest.mark.long
def test_the_engine_runs_ahead_of_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those of an engine that does not measure; every measured mass reaches the signals."""
    model, rng = small_model(random.randrange(1000)), random.Random()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requests = [GenerateRequest(str(i), tuple(rng.randrange(47) for _ in range(6)), params) for i in range(2)]
    found: list[dict[str, list[int]]] = []
    taken: list[tuple[int, int]] = []
    executor = executor_of(model, graphs=True, **LIMITS)
    submit = executor.submit
    for interval in (0, 2):
        core, led = core_of(executor, 47), []
        if interval:
            core.scheduler.manager.attention = signals = AttentionSignals()
            monkeypatch.setattr(core_engine, "ATTENTION_STEPS", interval)
            take = signals.add_measurement
            signals.add_measurement = lambda k, m, take=take: (taken.append((len(k), len(m))), take(k, m))[1]  # type: ignore

        def submitted(batch: StepBatch, led: list[Any] = led) -> None:
            led.append((batch.measure_attention, batch.slices[0].token_ids == [UNREAD]))
            submit(batch)

        executor.submit = submitted  # type: ignore[method-assign]
        tokens: dict[str, list[int]] = {r.request_key: [] for r in requests}
        for request in requests:
            core.add(request)
        while core.has_work:
            for output in core.step():
                tokens[output.request_key] += output.token_ids
        found.append(tokens)
        assert sum(unread for _, unread in led) > 4, "nothing ran ahead"
        assert sum(m for m, _ in led) == (len(range(0, len(led), interval)) if interval else 0)
        assert not interval or any(m and unread for m, unread in led), "no measured step ran ahead"
        assert not interval or sum(keys <= pages for keys, pages in taken) > 6
    executor.close()
    assert found[0] == found[1]


def test_an_engine_that_was_built_without_the_kernels_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = triton_cpu.specs_of

    def without(*args: Any) -> tuple[KernelTable, dict[str, Any]]:
        table, specs = made(*args)
        return KernelTable(table.target, [e for e in table.all_entries() if e.role != PAGE_MASSES]), specs

    monkeypatch.setattr(triton_cpu, "specs_of", without)
    result = executor_of(small_model(1)).execute(StepBatch([piece(1, [5], 0, [2])], measure_attention=True))
    assert result.sampled and result.attention == {}
