"""Attention masses of pages against transformers' attention weights in float64; measuring changes nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from parity.paged import PagedDriver, PagedSequence, random_chunks
from parity.tiny import TinyModel, cast, tiny_model

from wicore_trt.backends.torch import native
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.model.spec import GLOBAL, GROUPS
from wicore_trt.runtime.attention_mass import KEY_BLOCK, AttentionProbe
from wicore_trt.runtime.batch import SequenceSlice, StepBatch, StepResult
from wicore_trt.runtime.options import ExecutorOptions

PAGES = 200


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and native.load_library() is None:
        pytest.skip("the native kernels are not built")
    return str(request.param)


class MeasuringExecutor:
    """Passes on to an executor with `measure_attention` set, and keeps the last result."""

    def __init__(self, model: TinyModel, kernels: str, page_tokens: int, dtype: str = "float32") -> None:
        settings = ExecutorOptions(
            device="cpu", kernels=kernels, page_tokens=page_tokens, kv_pages=dict.fromkeys(GROUPS, PAGES),
            max_batch_tokens=4096,
        )  # fmt: skip
        tensors = cast(model.spec, model.tensors, torch.float8_e4m3fn) if dtype == "fp8" else model.tensors
        kv_dtype = {"fp8": "fp8", "float16": "float16"}.get(dtype)
        activations = "bfloat16" if dtype == "fp8" else dtype
        self.inner = TorchExecutor.from_tensors(model.spec, activations, tensors, settings, kv_dtype=kv_dtype)
        self.measure = True
        self.result = StepResult([])

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        # PagedDriver puts its sampler into the executor
        if name == "_sampler":
            setattr(self.inner, name, value)
        else:
            super().__setattr__(name, value)

    def execute(self, batch: StepBatch) -> StepResult:
        self.result = self.inner.execute(StepBatch(batch.slices, measure_attention=self.measure))
        return self.result


def expected_masses(model: TinyModel, token_ids: Sequence[int], page_tokens: int) -> dict[int, list[float]]:
    """By global layer: what the last token's queries give to each page, relative to an average page."""
    with torch.inference_mode():
        attentions = model.hf.double()(torch.tensor([list(token_ids)]), output_attentions=True).attentions
    masses = {}
    for layer in model.spec.layers_of(GLOBAL):
        weights = attentions[layer][0, :, -1].mean(0)
        pages = [float(part.sum()) for part in weights.split(page_tokens)]
        masses[layer] = [len(pages) * mass for mass in pages]
    return masses


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 8))])
def test_masses_are_those_of_plain_attention(seed: int, kernels: str) -> None:
    """Ragged batches of prefill and decode slices in random slots of poisoned pools; GQA; each global layer in turn."""
    model, rng = tiny_model(seed + 300, sliding_window_pattern=2), random.Random(seed)
    page_tokens = rng.choice((4, 8, 16))
    executor = MeasuringExecutor(model, kernels, page_tokens)
    driver = PagedDriver(executor, seed)  # type: ignore[arg-type]
    prompts = [[rng.randrange(model.spec.vocab_size) for _ in range(rng.randint(3, 70))] for _ in range(4)]
    work = [(driver.new_sequence(), random_chunks(rng, p, 25)) for p in prompts]
    layers = model.spec.layers_of(GLOBAL)
    steps = 0
    while any(chunks for _, chunks in work):
        chosen = [(s, chunks.pop(0)) for s, chunks in work if chunks and rng.random() < 0.7]
        if not chosen:
            continue
        driver.step(chosen)
        layer = layers[steps % len(layers)]
        steps += 1
        assert set(executor.result.attention) == {s.seq_id for s, _ in chosen}
        for sequence, _ in chosen:
            expected = expected_masses(model, sequence.token_ids, page_tokens)[layer]
            actual = executor.result.attention[sequence.seq_id]
            assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert sum(actual) == pytest.approx(len(actual), rel=1e-5)
    assert steps > len(layers)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp8"])
def test_low_precision(dtype: str, kernels: str) -> None:
    if dtype == "fp8" and kernels == "native":
        pytest.skip("the native kernels have no FP8 KV")
    model = tiny_model(310, sliding_window_pattern=1, num_hidden_layers=1)
    executor = MeasuringExecutor(model, kernels, 8, dtype)
    driver = PagedDriver(executor)  # type: ignore[arg-type]
    sequence, token_ids = driver.new_sequence(), [random.Random(1).randrange(97) for _ in range(75)]
    driver.step([(sequence, token_ids)])
    expected = expected_masses(model, token_ids, 8)[0]
    worst = {"float16": 0.02, "bfloat16": 0.15, "fp8": 0.5}[dtype]
    assert executor.result.attention[sequence.seq_id] == pytest.approx(expected, abs=worst)


def test_contexts_longer_than_a_block_of_keys(kernels: str) -> None:
    model = tiny_model(311, sliding_window_pattern=1, num_hidden_layers=1)
    executor = MeasuringExecutor(model, kernels, 16)
    driver = PagedDriver(executor)  # type: ignore[arg-type]
    sequence, token_ids = driver.new_sequence(), [random.Random(2).randrange(97) for _ in range(2 * KEY_BLOCK + 37)]
    driver.step([(sequence, token_ids)])
    expected = expected_masses(model, token_ids, 16)[0]
    assert executor.result.attention[sequence.seq_id] == pytest.approx(expected, rel=1e-3, abs=1e-5)


def run(model: TinyModel, kernels: str, *, measure: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logits of each step and the pools at the end."""
    executor = MeasuringExecutor(model, kernels, 8, "bfloat16")
    executor.measure = measure
    driver = PagedDriver(executor, 5)  # type: ignore[arg-type]
    sequences: list[PagedSequence] = [driver.new_sequence() for _ in range(3)]
    steps = [driver.step([(s, list(range(2, 40 + s.seq_id))) for s in sequences])]
    steps += [driver.step([(s, [7 + i]) for s in sequences]) for i in range(6)]
    assert bool(executor.result.attention) is measure
    return steps, executor.inner.pools


def test_measuring_changes_no_bit(kernels: str) -> None:
    model = tiny_model(312, sliding_window_pattern=2)
    (plain, plain_pools), (measured, measured_pools) = (run(model, kernels, measure=m) for m in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, measured, strict=True))
    for group, pool in plain_pools.items():
        assert torch.equal(pool.view(torch.int16), measured_pools[group].view(torch.int16))


def test_a_model_without_global_layers_measures_nothing(kernels: str) -> None:
    model = tiny_model(313, num_hidden_layers=2, sliding_window_pattern=7)
    executor = MeasuringExecutor(model, kernels, 8)
    driver = PagedDriver(executor)  # type: ignore[arg-type]
    driver.step([(driver.new_sequence(), [3, 4, 5])])
    assert executor.result.attention == {}


def test_a_sequence_that_is_not_finite_is_left_out(kernels: str) -> None:
    """One sequence reads slots that were never written; its neighbour is measured all the same."""
    executor = MeasuringExecutor(tiny_model(314, sliding_window_pattern=1), kernels, 8)
    bad = SequenceSlice(1, [5], 9, dict.fromkeys(GROUPS, [0, 1]))
    good = SequenceSlice(2, [5, 6], 0, dict.fromkeys(GROUPS, [2]))
    assert set(executor.execute(StepBatch([bad, good])).attention) == {2}


def test_the_static_scale_of_stored_keys_counts() -> None:
    """Keys stored as k / s with key_scale s give the masses of k."""
    keys, query = torch.randn(3, 2, 4, 2, 8), torch.randn(1, 4, 8)
    batch = StepBatch([SequenceSlice(9, [0], 10, {})])

    def masses(pool: torch.Tensor, key_scale: float) -> list[float]:
        inputs = _Inputs(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([10], dtype=torch.int32))
        probe = AttentionProbe(0, inputs.cu_seqlens[1:].long() - 1)  # type: ignore[arg-type]
        probe.queries, probe.key_scale = query, key_scale
        return probe.compute_masses(pool, inputs, batch, 0.3)[9]  # type: ignore[arg-type]

    assert masses(keys / 4, 4.0) == pytest.approx(masses(keys, 1.0), rel=1e-5)


class _Inputs:
    def __init__(self, cu_seqlens: torch.Tensor, positions: torch.Tensor) -> None:
        self.cu_seqlens, self.positions = cu_seqlens, positions
        self.page_tables = {GLOBAL: torch.tensor([[2, 0, 1]], dtype=torch.int32)}
