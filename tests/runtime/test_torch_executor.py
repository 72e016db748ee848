"""TorchExecutor as the engine loop sees it: engines from disk, kernels chosen, sequences that fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from parity.paged import GREEDY, PagedDriver, relative_error
from parity.tiny import TinyModel, tiny_model
from tiny_source import write_tiny_tokenizer

from wicore_trt.backends.torch.executor import TorchExecutor, torch_kernels
from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.core.engine import EngineCore
from wicore_trt.engine.build import build_engine
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.kv.memory import SharedMemory
from wicore_trt.model.spec import GROUPS
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import GenerateRequest, SamplingParams

PAGES = {"global": 20, "local": 20}


def executor_of(model: TinyModel, **settings: object) -> TorchExecutor:
    values = {"device": "cpu", "kernels": "torch", "page_tokens": 8, "kv_pages": PAGES, **settings}
    return TorchExecutor.from_tensors(model.spec, "float32", model.tensors, ExecutorOptions(**values))  # type: ignore


def piece(seq_id: int, token_ids: list[int], first_page: int, *, start: int = 0, sample: bool = True) -> SequenceSlice:
    pages = list(range(first_page, first_page + 5))
    return SequenceSlice(seq_id, token_ids, start, dict.fromkeys(GROUPS, pages), sample, GREEDY)


def test_samples_in_the_order_of_the_slices_that_ask() -> None:
    model = tiny_model(21)
    prompts = {7: [5, 6, 7, 8], 3: [9, 10], 5: [11, 12, 13]}
    executor = executor_of(model)
    result = executor.execute(
        StepBatch([piece(7, prompts[7], 0), piece(3, prompts[3], 5, sample=False), piece(5, prompts[5], 10)])
    )
    expected = [(i, int(model.hf_logits(prompts[i])[-1].argmax())) for i in (7, 5)]
    assert [(t.seq_id, t.token_ids[0]) for t in result.sampled] == expected
    assert executor.execute(StepBatch([piece(3, [1], 5, start=2, sample=False)])).sampled == []
    executor.release(7)
    executor.release(1234)


def test_a_sequence_that_reads_unwritten_slots_fails_alone() -> None:
    """Pools begin as NaN: a scheduler's mistake is a failed sequence and never text."""
    executor = executor_of(tiny_model(21))
    result = executor.execute(StepBatch([piece(1, [5, 6], 0, start=9), piece(2, [5, 6], 10)]))
    assert set(result.failed) == {1} and "finite" in result.failed[1]
    assert [t.seq_id for t in result.sampled] == [2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8"])
def test_runs_engine_directories(dtype: str, tmp_path: Path) -> None:
    model = tiny_model(22, vocab_size=256)
    model.hf.save_pretrained(tmp_path / "hf")
    write_tiny_tokenizer(tmp_path / "hf")
    engine = build_engine(tmp_path / "hf", tmp_path / "engine", dtype=dtype, page_tokens=8)
    executor = TorchExecutor(engine, ExecutorOptions(device="cpu", kernels="torch", kv_bytes=1 << 24, max_context=200))
    assert executor.layout.kv_dtype == engine.manifest.kv_dtype and executor.layout.page_tokens == 8
    driver, token_ids = PagedDriver(executor), list(range(3, 70))
    logits = driver.step([(driver.new_sequence(), token_ids)])
    bound = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01, "fp8": 0.3}[dtype]
    assert relative_error(logits[0], model.hf_logits(token_ids)[-1]) < bound


def test_kv_budget_is_divided_and_kept() -> None:
    model = tiny_model(21)
    executor = executor_of(model, kv_pages=None, kv_bytes=1 << 22, max_context=300)
    layout = executor.layout
    assert layout.memory_bytes <= 1 << 22
    for group, pool in executor.pools.items():
        assert pool.shape[0] == layout.num_pages[group] and pool[0].nbytes == layout.page_bytes[group]
        assert pool.isnan().all()
    with pytest.raises(ConfigError, match="kv.device_bytes"):
        executor_of(model, kv_pages=None, kv_bytes=1 << 10)


def test_native_kernels_are_refused_with_the_reason_and_auto_falls_back() -> None:
    model = tiny_model(21, head_dim=20)
    with pytest.raises(EnvironmentUnfitError, match="head_dim 20"):
        executor_of(model, kernels="native")
    assert executor_of(model, kernels="auto").kernels.startswith(f"torch-{torch.__version__}-cpu-")
    with pytest.raises(ConfigError, match="batch_invariant: the torch operators"):
        executor_of(model, kernels="auto", batch_invariant=True)


def test_torch_operators_on_another_device_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their KV values differ in the last bits, and `kernels` is what keeps caches apart."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    names = {torch_kernels(torch.device(name)) for name in ("cpu", "cuda:0", "cuda:1", "meta")}
    assert len(names) == 4 and f"torch-{torch.__version__}-cuda-GPU 1" in names


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(EnvironmentUnfitError, match=r"executor\.device to cpu"):
        executor_of(tiny_model(21), device="cuda")


def test_closing_frees_the_pages() -> None:
    executor = executor_of(tiny_model(21))
    executor.close()
    executor.close()
    assert not executor.pools
    with pytest.raises(AssertionError, match="close"):
        executor.execute(StepBatch([piece(1, [5], 0)]))


def test_tokens_are_right_where_slabs_change_hands() -> None:
    """A real model in memory that holds little more than one sequence, beside one with room for all."""
    model = tiny_model(24, head_dim=16, sliding_window=16, sliding_window_pattern=3, num_hidden_layers=6)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 90) for _ in range(rng.choice((5, 40, 120)))] for _ in range(12)]
    answers, changes = {}, 0
    for kv_bytes in (1 << 24, None):
        pages = sum(model.spec.page_bytes(group, 8, 4) for group in GROUPS)
        budget = kv_bytes or 40 * pages
        settings = {"kv_pages": None, "kv_bytes": budget, "max_context": 200, "max_batch_tokens": 48}
        executor = executor_of(model, kernels="auto", **settings)
        cache, _ = make_cache(KVSettings(), executor.layout, 16, engine="e", kernels="k", copier=executor.copier)
        assert cache.can_run(200, 48) and isinstance(cache.memory, SharedMemory)
        scheduler = Scheduler(cache, max_batch_tokens=48, max_sequences=4)
        core = EngineCore(executor, scheduler, eos_ids=(1,), max_context=200)
        found = answers[kv_bytes] = {str(i): list[int]() for i in range(36)}
        for i in range(36):
            params = SamplingParams(max_tokens=1 + 7 * (i % 6), temperature=0.0, ignore_eos=True)
            core.add(GenerateRequest(str(i), tuple(prompts[i % 12]), params))
            while core.has_work and i % 3 == 2:
                for output in core.step():
                    assert output.error is None
                    found[output.request_key] += output.token_ids
        scheduler.check_integrity()
        changes = cache.memory.slabs.changes
        core.close()
    assert answers[None] == answers[1 << 24] and changes > 20
