"""TritonExecutor in Triton's interpreter: logits against TorchExecutor, padding, pages, sampling, failures."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from parity.paged import GREEDY, relative_error  # noqa: E402
from parity.tiny import overflowing_model  # noqa: E402
from runtime.triton_cpu import CpuDevice, Driver, executor_of, oracle_of, rounded, small_model, specs_of  # noqa: E402

from wicore_trt.backends.triton import executor as triton_executor  # noqa: E402
from wicore_trt.backends.triton import table as triton_table  # noqa: E402
from wicore_trt.checkpoint.names import kv_scale_name, weight_scale_name  # noqa: E402
from wicore_trt.errors import ConfigError, EngineFormatError  # noqa: E402
from wicore_trt.model.spec import GROUPS  # noqa: E402
from wicore_trt.runtime.batch import SequenceSlice, StepBatch  # noqa: E402
from wicore_trt.runtime.dtypes import E4M3  # noqa: E402
from wicore_trt.runtime.options import ExecutorOptions  # noqa: E402
from wicore_trt.runtime.sampler import Sampler  # noqa: E402
from wicore_trt.types import SamplingParams  # noqa: E402

# Per step the new tokens of each sequence: chunks, decoding beside chunks in any order, decoding alone; by the end the
# window of 5 tokens has left a page of 4 tokens behind.
MIXED = ([9, 3], [1, 4], [1, 1, 1])
LARGE = 65
"""More rows than any crossover of 16-bit weights."""
TOLERANCE = {"bfloat16": 0.02, "float16": 0.003}


def run(drivers: list[Driver], steps: Any, vocab: int, tolerance: float) -> None:
    """The same random tokens through all drivers; logits after every step agree with those of the last one."""
    sequences: list[list[Any]] = [[] for _ in drivers]
    for lengths in steps:
        tokens = [[random.randrange(vocab) for _ in range(n)] for n in lengths]
        logits = []
        for driver, own in zip(drivers, sequences, strict=True):
            while len(own) < len(lengths):
                own.append(driver.new_sequence())
            logits.append(driver.step(list(zip(own, tokens, strict=False))))
        for actual in logits[:-1]:
            assert relative_error(actual, logits[-1]) < tolerance, lengths


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_prompts_in_chunks_and_decoding(dtype: str) -> None:
    model = small_model(random.randrange(1000))
    run([Driver(executor_of(model, dtype), 1), Driver(oracle_of(model, dtype), 2)], MIXED, 48, TOLERANCE[dtype])


def test_large_steps_go_through_cublas() -> None:
    """And one kernel for all sizes does without. A soft cap on the logits, as Gemma 2 had it."""
    model = small_model(4, final_logit_softcapping=20.0)
    mine, fixed = (executor_of(model, batch_invariant=i, max_batch_tokens=LARGE + 1) for i in (False, True))
    steps = ([LARGE, 1], [1, 1])
    run([Driver(mine, 1), Driver(fixed, 3), Driver(oracle_of(model, "bfloat16"), 2)], steps, 48, 0.02)
    assert any(n.startswith("geglu") for n in mine.model.launcher.launched)
    assert not any(n.startswith("geglu") for n in fixed.model.launcher.launched)


@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [
        ("bfloat16", True),
        ("float16", False),
        *(pytest.param(*given, marks=pytest.mark.long) for given in [("bfloat16", False), ("float16", True)]),
    ],
)
def test_behind_the_last_attention_large_steps_go_on_with_sampled_rows(
    dtype: str, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever they are and however many, so by every kind of product; what the others leave in the pages is seen by
    the decoding after it."""
    monkeypatch.setitem(triton_table.CROSSOVER, "sm90", {"16-bit": 2, "fp8": 2, "fp8 rows": 4})
    specs_of.cache_clear()
    model, settings = small_model(random.randrange(1000)), {"fp8": fp8, "kv_pages": {"global": 100, "local": 100}}
    mine = executor_of(model, dtype, max_sequences=8, **settings)
    if dtype == "float16":
        for name in mine.model.exponents:
            mine.model.exponents[name] = 3  # type: ignore[index]
    drivers = [Driver(mine, 1), Driver(oracle_of(model, dtype, **settings), 2)]
    sequences = [[d.new_sequence() for _ in range(7)] for d in drivers]
    errors, every = [], list(range(7))
    for count in (0, random.choice((1, 3, 6))):
        sampled = random.sample(every, count)
        for chosen, lengths in ((sampled, [random.choice((1, 2, 3)) for _ in every]), (every, [1] * 7)):
            tokens = [[random.randrange(48) for _ in range(n)] for n in lengths]
            for name in ("residual", "x", "q", "act", "head_in", "scales", "bytes8", "sampled_residual"):
                getattr(mine.memory, name).view(torch.uint8).fill_(0xFF)
            logits = [sampled_step(d, own, tokens, chosen) for d, own in zip(drivers, sequences, strict=True)]
            errors += [relative_error(*logits)] if chosen else []
    if fp8:  # a value between two of E4M3 may be rounded the other way
        assert sorted(errors)[len(errors) // 2] < 0.05 and max(errors) < 0.25, errors
    else:
        assert max(errors) < TOLERANCE[dtype]
    specs_of.cache_clear()


def sampled_step(driver: Driver, sequences: Any, tokens: list[list[int]], sampled: list[int]) -> torch.Tensor:
    """A step of all sequences that samples some of them; their logits."""
    slices = [driver._slice(s, t) for s, t in zip(sequences, tokens, strict=True)]
    for n, piece in enumerate(slices):
        piece.sample = n in sampled
    driver.executor.execute(StepBatch(slices))
    for sequence, new in zip(sequences, tokens, strict=True):
        sequence.token_ids += new
    return driver.sampler.logits


def dequantized(model: Any) -> dict[str, torch.Tensor]:
    """Tensors whose linears are float32: what the E4M3 bytes and scales mean."""
    found = rounded(model, "bfloat16", True)
    scales = {n: found.pop(weight_scale_name(n)) for n in [n for n, t in found.items() if t.dtype == E4M3]}
    return found | {n: found[n].float() * s[:, None] for n, s in scales.items()}


@pytest.mark.parametrize(("target", "kv_dtype"), [("sm90", "bfloat16"), ("sm80", "fp8")])
def test_fp8_weights_meet_16_bit_rows_in_small_steps(
    target: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(triton_table.CROSSOVER, "sm90", triton_table.CROSSOVER["sm90"] | {"fp8": 16})
    specs_of.cache_clear()
    model = small_model(5)
    scales = {kv_scale_name(i): torch.tensor([0.07 + 0.05 * i]) for i in range(2)} if kv_dtype == "fp8" else {}
    tensors = rounded(model, "bfloat16", True) | scales
    mine = executor_of(model, fp8=True, kv_dtype=kv_dtype, target=target, tensors=tensors)
    oracle = oracle_of(model, "bfloat16", kv_dtype=kv_dtype, tensors=dequantized(model) | scales)
    run([Driver(mine, 1), Driver(oracle, 2)], MIXED, 48, 0.04)
    assert not any("_x8" in n for n in mine.model.launcher.launched)
    specs_of.cache_clear()


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.long)])
def test_fp8_weights_meet_fp8_rows_in_large_steps(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By cuBLAS, and by Triton's kernels where those are faster. A value between two of E4M3 may be rounded the other
    way, which in a tiny model moves logits by a twentieth or less; so half of the prompts must agree closely."""
    limits = {"16-bit": 8, "fp8": 8, "fp8 rows": 128 if own else 0}
    monkeypatch.setitem(triton_table.CROSSOVER, "sm90", limits)
    specs_of.cache_clear()
    model, pages, dtype = small_model(6), {"global": 40, "local": 40}, random.choice(["float16", "bfloat16"])
    mine = executor_of(model, dtype, fp8=True, max_batch_tokens=70, kv_pages=pages)
    oracle = oracle_of(model, dtype, fp8=True, kv_pages=pages)
    errors, drivers = [], [Driver(mine, 1), Driver(oracle, 2)]
    for _ in range(3):
        tokens = [random.randrange(48) for _ in range(19)]
        got, want = (driver.step([(driver.new_sequence(), tokens)]) for driver in drivers)
        errors.append(relative_error(got, want))
    assert sorted(errors)[1] < 0.035 and max(errors) < 0.15, errors
    assert any("_x8" in n for n in mine.model.launcher.launched) == own
    assert bool((mine.memory.largest[:19] > 0).all()) == own, "gate_up found the largest values of its rows"
    specs_of.cache_clear()


def test_float16_scales_what_would_overflow() -> None:
    """gate * up beyond 65,504, in small steps and in large ones."""
    model = overflowing_model("mlp")
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48}
    tiny = small_model(7, **sizes)
    tensors = {n: t * 900 if "pre_feedforward" in n else t for n, t in tiny.tensors.items()}
    big = type(model)(tiny.hf, tiny.spec, tensors)
    mine = executor_of(big, "float16", max_batch_tokens=LARGE)
    assert max(mine.model.exponents.values()) > 0
    run([Driver(mine, 1), Driver(oracle_of(big, "float16"), 2)], ([3], [LARGE]), 48, 0.005)
    tame = small_model(7, rms_norm_eps=1.0)  # next to which the size of what is normed matters
    mine = executor_of(tame, "float16", max_batch_tokens=LARGE)
    for name in mine.model.exponents:
        mine.model.exponents[name] = 3  # type: ignore[index]
    run([Driver(mine, 1), Driver(oracle_of(tame, "float16"), 2)], ([1], [LARGE]), 48, 0.005)
    with pytest.raises(EngineFormatError, match="bfloat16"):
        executor_of(type(model)(tiny.hf, tiny.spec, {n: t * 1e5 for n, t in tensors.items()}), "float16")


def greedy(seq_id: int, token_ids: list[int], start: int, pages: list[int], **more: Any) -> SequenceSlice:
    given = {"sample": True, "params": GREEDY, **more}
    return SequenceSlice(seq_id, token_ids, start, dict.fromkeys(GROUPS, pages), **given)


@pytest.mark.parametrize("invariant", [pytest.param(True, marks=pytest.mark.long), False])
def test_padded_decode_steps_compute_the_same(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs: rows of nobody fill the bucket; tokens are the largest logits; a page of NaN fails its sequence alone.
    Other rows in a step leave the bits alone in batch-invariant engines, and in others what is computed."""
    model = small_model(8)
    monkeypatch.setattr(triton_executor, "DECODE_BUCKETS", (4,))
    limits = {"max_sequences": 3, "max_batch_tokens": 6, "batch_invariant": invariant}
    mine, plain = executor_of(model, graphs=True, prepares=True, **limits), executor_of(model, **limits)
    assert all(p.isnan().all() for p in mine.pools.values()), "preparing wrote to a page"
    prompts = [greedy(i, [5 + i, 6, 7], 0, [3 * i, 3 * i + 1]) for i in range(2)]
    assert all(e.execute(StepBatch(prompts)).sampled for e in (mine, plain))
    decode = [greedy(1, [9], 3, [3, 4]), greedy(0, [8], 3, [0, 1]), greedy(7, [8], 5, [20, 21])]
    result, other = (e.execute(StepBatch(decode)) for e in (mine, plain))
    assert [t.seq_id for t in result.sampled] == [t.seq_id for t in other.sampled] == [1, 0]
    assert set(result.failed) == set(other.failed) == {7}
    tokens = mine.memory.logits[:2].argmax(1).tolist()
    assert [t.token_ids[0] for t in result.sampled] == tokens
    tolerance = 0.0 if invariant else TOLERANCE["bfloat16"]
    assert relative_error(mine.memory.logits[:2], plain.memory.logits[:2]) <= tolerance
    for group, pool in mine.pools.items():
        written = {0, 3, 21}  # positions 0 to 3 of both, position 5 of the third
        kept = [p for p in range(len(pool)) if p not in written]
        assert pool[kept].isnan().all(), group
        assert relative_error(pool[[0, 3]], plain.pools[group][[0, 3]]) <= tolerance


def test_results_come_in_the_order_of_the_batch() -> None:
    """Whatever the executor sorts; slices that do not sample are left out; other parameters take the sampler."""
    model = small_model(9)
    executor, oracle = executor_of(model), oracle_of(model, "bfloat16")
    bias = SamplingParams(temperature=0.0, logit_bias={11: 100.0})
    batch = [
        greedy(4, [5, 6, 7], 0, [0]),
        greedy(2, [9], 0, [1]),
        greedy(9, [1, 2], 0, [2], sample=False),
        greedy(3, [8], 0, [3]),
    ]
    result = executor.execute(StepBatch(batch))
    assert [t.seq_id for t in result.sampled] == [4, 2, 3]
    assert result.sampled == oracle.execute(StepBatch(batch)).sampled
    assert executor.execute(StepBatch([greedy(9, [4], 2, [2], sample=False)])).sampled == []
    batch[3].params = bias
    tokens = executor.execute(StepBatch(batch)).sampled
    assert tokens[:2] == result.sampled[:2] and tokens[2].token_ids == (11,)
    assert isinstance(executor.sampler.host, Sampler)
    executor.release(4)


def test_attention_is_measured_like_the_oracle() -> None:
    model = small_model(10)
    executor, oracle = executor_of(model), oracle_of(model, "bfloat16")
    for batch in ([greedy(1, [5, 6, 7, 8, 9, 1], 0, [4, 5])], [greedy(1, [3], 6, [4, 5])]):
        mine, theirs = (e.execute(StepBatch(batch, measure_attention=True)) for e in (executor, oracle))
        assert mine.attention.keys() == theirs.attention.keys() == {1}
        assert mine.attention[1] == pytest.approx(theirs.attention[1], rel=0.05)


def test_pools_take_what_the_largest_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is prepared before it is measured, the host's sampler included, and once more for the pools."""
    monkeypatch.setattr(triton_executor, "DECODE_BUCKETS", (2,))
    given: dict[str, Any] = {"graphs": True, "max_sequences": 2, "max_batch_tokens": 2}
    seen: list[Any] = []
    sample = Sampler.sample

    def sampled(self: Sampler, logits: torch.Tensor, slices: Any) -> Any:
        seen.append(logits.shape[0])
        return sample(self, logits, slices)

    def unclaimed(device: CpuDevice) -> int:
        seen.append(device)
        return (512 << 20) + 90_000 - 1

    monkeypatch.setattr(Sampler, "sample", sampled)
    monkeypatch.setattr(CpuDevice, "unclaimed_bytes", unclaimed)
    model = small_model(12)
    mine = executor_of(model, prepares=True, kv_pages=None, kv_bytes=None, **given)
    assert seen[0] == 2 and isinstance(seen[1], CpuDevice) and seen.count(2) == 1
    slab = mine.layout.memory_bytes // (mine.layout.num_pages["local"] // mine.layout.slab_pages["local"])
    assert 90_000 - slab < mine.layout.memory_bytes <= 90_000
    assert {g: len(p) for g, p in mine.pools.items()} == mine.layout.num_pages
    assert all(p.isnan().all() for p in mine.pools.values()) and mine.graphs.keys() == {2}
    plain = executor_of(model, **{**given, "graphs": False})
    slots = {group: apart[0] for group, apart in mine.layout.separate_slots().items()}
    piece = greedy(1, [5], 0, [])
    piece.pages = {group: [slot] for group, slot in slots.items()}
    tokens = mine.execute(StepBatch([piece])).sampled
    piece.pages = dict.fromkeys(GROUPS, [4])
    assert tokens == plain.execute(StepBatch([piece])).sampled
    assert torch.equal(mine.pools["local"][slots["local"], :, :, 0], plain.pools["local"][4, :, :, 0])


def test_memory_is_checked_and_closing_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda self: 600 << 20)
    executor = executor_of(small_model(11))
    assert executor.kernels.startswith("triton-sm90-") and executor.max_sequences == 4
    assert executor_of(small_model(11), batch_invariant=True).kernels.endswith("-invariant")
    shape = executor.model.shape
    made_up = triton_executor.Loading(shape, executor.model.table, 64, lambda positions: None, dummy=True)  # type: ignore
    assert triton_executor._name_kernels(made_up, ExecutorOptions()).endswith("-dummy-weights")
    entry = executor.model.table.all_entries()[0]
    cured = replace(entry, kernel=replace(entry.kernel, cubin=entry.kernel.cubin + b"\0"))
    table = triton_table.KernelTable(executor.model.table.target, [cured, *executor.model.table.all_entries()[1:]])
    assert triton_executor._name_kernels(
        replace(made_up, table=table), ExecutorOptions()
    ) != triton_executor._name_kernels(made_up, ExecutorOptions())
    executor.close()
    executor.close()
    with pytest.raises(AssertionError, match="close"):
        executor.execute(StepBatch([greedy(1, [5], 0, [0])]))
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda self: 512 << 20)
    with pytest.raises(ConfigError, match=r"kv\.device_bytes"):
        executor_of(small_model(11))
