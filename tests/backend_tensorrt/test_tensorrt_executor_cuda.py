"""TensorRTExecutor on a GPU: with the fake TensorRT on GPU memory on any GPU, and with the real one where it runs.

The fake checks streams, staging, memory and the copy kernels. The real one checks everything; no other test does.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_tensorrt.tensorrt_engines import fake_engine
from backend_tensorrt.tensorrt_fakes import fake_tensorrt
from parity.paged import PagedDriver, relative_error
from parity.tiny import TinyModel, cast, tiny_model
from tiny_source import write_tiny_tokenizer

from wicore_trt.backends.tensorrt.api import find_tensorrt
from wicore_trt.backends.tensorrt.executor import TensorRTExecutor, open_executor
from wicore_trt.backends.tensorrt.plan_io import PlanLimits
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import EngineDir
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.options import ExecutorOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
PAGES = {"global": 80, "local": 80}
SETTINGS = ExecutorOptions(page_tokens=8, kv_pages=PAGES)


class GpuMemory:
    """Bytes at an address, for torch.as_tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class WatchedGpu(CudaDevice):
    """A GPU as `tensorrt_fakes` reads it. Memory that was freed cannot be noticed here."""

    recording = None

    def memory(self, what: str, address: int, size: int) -> torch.Tensor:
        return torch.as_tensor(GpuMemory(address, size), device=self.torch_device)


def model_of(seed: int) -> TinyModel:
    # row lengths and widths in multiples of 16, as every real model has them
    return tiny_model(
        seed, hidden_size=96, intermediate_size=160, vocab_size=256, head_dim=32, sliding_window=16,
        num_hidden_layers=3, sliding_window_pattern=3,
    )  # fmt: skip


def errors_of(trt: TensorRTExecutor, oracle: TorchExecutor, steps: int, seed: int) -> list[float]:
    """Relative errors of logits over a random schedule of more sequences than slots."""
    rng = random.Random(seed)
    drivers = [PagedDriver(trt, 1), PagedDriver(oracle, 2)]  # type: ignore[arg-type]
    sequences = [[driver.new_sequence() for driver in drivers] for _ in range(5)]
    errors = []
    for _ in range(steps):
        work = [
            (pair, [rng.randrange(256) for _ in range(rng.choice((1, 1, rng.randint(1, 30))))])
            for pair in rng.sample(sequences, rng.randint(1, 5))
            if len(pair[0].token_ids) < 80
        ]
        if rng.random() < 0.1:
            drivers[0].executor.release(rng.choice(sequences)[0].seq_id)  # its slot is filled from pages again
        if work:
            got, want = (d.step([(pair[i], ids) for pair, ids in work]) for i, d in enumerate(drivers))
            errors += [relative_error(g, w) for g, w in zip(got, want, strict=True)]
    return errors


def oracle_of(model: TinyModel, tensors: dict[str, torch.Tensor], dtype: str, kv_dtype: str) -> TorchExecutor:
    settings = ExecutorOptions(device="cpu", kernels="torch", page_tokens=8, kv_pages=PAGES)
    return TorchExecutor.from_tensors(model.spec, dtype, tensors, settings, kv_dtype=kv_dtype)


@pytest.mark.parametrize(("dtype", "kv_dtype", "bound"), [("float32", "float32", 1e-4), ("bfloat16", "fp8", 0.05)])
def test_streams_staging_and_copy_kernels(dtype: str, kv_dtype: str, bound: float, tmp_path: Path) -> None:
    model, device = model_of(4), WatchedGpu()
    tensors = cast(model.spec, model.tensors, {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
    engine = fake_engine(
        tmp_path / "e", model.spec, tensors, dtype=dtype, kv_dtype=kv_dtype, targets=[device.target],
        limits=PlanLimits(3, 11, 128),
    )  # fmt: skip
    executor = TensorRTExecutor(engine, SETTINGS, fake_tensorrt(device), device)  # type: ignore[arg-type]
    print(type(executor._copies).__name__)
    errors = errors_of(executor, oracle_of(model, tensors, dtype, kv_dtype), 60, 1)
    assert sorted(errors)[len(errors) // 2] < bound and max(errors) < 10 * bound
    executor.close()


def test_a_captured_graph_reads_what_is_in_memory_when_it_runs() -> None:
    device = CudaDevice()
    with device.active():
        a, b = device.empty((64,), torch.int32).fill_(1), device.empty((64,), torch.int32).zero_()
        assert a.data_ptr() % 256 == 0
        run = device.capture(lambda: b.add_(a))  # type: ignore[arg-type, return-value]
        host = device.staging((64,)).fill_(5)
        a.copy_(host, non_blocking=True)
        run()
        run()
    device.synchronize()
    assert (b.cpu() == 10).all()


def real_engine(tmp_path: Path, model: TinyModel, **options: Any) -> EngineDir:
    """Built here for this GPU; skips where TensorRT does not run on it."""
    try:
        api, target = find_tensorrt(), CudaDevice().target
    except EnvironmentUnfitError as error:
        pytest.skip(str(error))
    if target not in api.targets:
        pytest.skip(f"{api.flavour} does not run on {target}")
    model.hf.save_pretrained(tmp_path / "hf")
    write_tiny_tokenizer(tmp_path / "hf")
    return build_engine(
        tmp_path / "hf", tmp_path / "engine", backend="tensorrt", targets=(target,), page_tokens=8, max_batch=3,
        max_chunk=11, max_context=128, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "bound"),
    [
        ("float32", "float32", 1e-3),
        ("bfloat16", "bfloat16", 0.03),
        ("float16", "float16", 0.01),
        ("bfloat16", "fp8", 0.1),
    ],
)
def test_plans_on_this_gpu_agree_with_torch_on_the_cpu(dtype: str, kv_dtype: str, bound: float, tmp_path: Path) -> None:
    model = model_of(4)
    engine = real_engine(tmp_path, model, dtype=dtype, kv_dtype=kv_dtype)
    oracle = TorchExecutor(engine, ExecutorOptions(device="cpu", kernels="torch", page_tokens=8, kv_pages=PAGES))
    for run in range(2):  # the second run starts from the runtime cache
        executor = open_executor(engine, SETTINGS)
        errors = errors_of(executor, oracle, 60, run)
        executor.close()
        assert sorted(errors)[len(errors) // 2] < bound and max(errors) < 0.5
