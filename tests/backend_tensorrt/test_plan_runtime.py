"""The runtime on the networks that are really built: plans are evaluated layer by layer on the memory that the executor
bound. Lowering and runtime are each tested against references of their own; here they must agree with each other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_tensorrt.tensorrt_engines import executor_of, fake_engine
from backend_tensorrt.tensorrt_fakes import FakeDevice, fake_tensorrt
from network_evaluator import Evaluator
from parity.paged import PagedDriver, relative_error
from parity.tiny import cast, tiny_model

from wicore_trt.backends.tensorrt import plan_io
from wicore_trt.backends.tensorrt.plan_build import make_network
from wicore_trt.backends.tensorrt.plan_io import PHASES, PlanLimits, PlanRequest, weight_tensors
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.options import ExecutorOptions

trt: Any = pytest.importorskip("tensorrt_rtx_bindings")
LIMITS = PlanLimits(max_batch=2, max_chunk=9, max_context=160)
PAGES = {"global": 60, "local": 60}


class RealNetworks:
    """Computes a run of the fake TensorRT by evaluating the network of its phase."""

    def __init__(self, spec: Gemma3Spec, weights: list[plan_io.TensorSpec], dtype: str, kv_dtype: str) -> None:
        self._builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        self._networks = {
            phase: make_network(trt, self._builder, PlanRequest(spec, LIMITS, weights, dtype, kv_dtype, "sm89", phase))[
                0
            ]
            for phase in PHASES
        }
        self._evaluators = {phase: Evaluator(network) for phase, network in self._networks.items()}

    def __call__(self, spec: Gemma3Spec, memory: dict[str, torch.Tensor], plan: Mapping[str, Any]) -> None:
        kinds = {t["name"]: t["kind"] for t in plan["tensors"]}
        feeds = {name: tensor.clone() for name, tensor in memory.items() if kinds[name] != "output"}
        for name, value in self._evaluators[plan["phase"]].evaluate(feeds).items():
            memory[name].view(torch.uint8).copy_(value.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "bound"),
    [pytest.param("float32", "float32", 2e-5, marks=pytest.mark.long), ("bfloat16", "fp8", 0.1)],
)
def test_built_networks_and_runtime_agree_with_the_torch_executor(
    dtype: str, kv_dtype: str, bound: float, tmp_path: Path
) -> None:
    rng = random.Random(dtype)
    model = tiny_model(5, sliding_window=7, num_hidden_layers=2, sliding_window_pattern=2, vocab_size=96)
    tensors = cast(model.spec, model.tensors, {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
    engine = fake_engine(tmp_path / "e", model.spec, tensors, dtype=dtype, kv_dtype=kv_dtype, limits=LIMITS)
    device = FakeDevice()
    module = fake_tensorrt(device)
    module.network = RealNetworks(
        model.spec, weight_tensors(engine.rank_files[0], model.spec, kv_dtype), dtype, kv_dtype
    )
    settings = ExecutorOptions(device="cpu", kernels="torch", page_tokens=8, kv_pages=PAGES)
    drivers = [
        PagedDriver(executor_of(engine, device, module, kv_pages=PAGES), 1),  # type: ignore[arg-type]
        PagedDriver(TorchExecutor.from_tensors(model.spec, dtype, tensors, settings, kv_dtype=kv_dtype), 2),
    ]
    sequences = [[driver.new_sequence() for driver in drivers] for _ in range(3)]
    errors = []
    for step in range(45):
        members = rng.sample(sequences, rng.randint(1, 3))
        sizes = [rng.choice((1, 1, 1, rng.randint(1, 13))) if step > 3 else 1 + step for _ in members]
        work = [
            (pair, [rng.randrange(96) for _ in range(n)])
            for pair, n in zip(members, sizes, strict=True)
            if len(pair[0].token_ids) + n < 160
        ]
        if work:
            got, want = (d.step([(pair[i], ids) for pair, ids in work]) for i, d in enumerate(drivers))
            errors += [relative_error(g, w) for g, w in zip(got, want, strict=True)]
    assert max(len(pair[0].token_ids) for pair in sequences) > 70, "no local cache was moved"
    assert sorted(errors)[len(errors) // 2] < bound and max(errors) < max(bound, 0.5 * (dtype != "float32"))
