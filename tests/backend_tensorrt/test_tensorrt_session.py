"""Contexts and what they point at: memory stays, refusals are errors, uploads do not overwrite each other."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from backend_tensorrt.tensorrt_engines import executor_of, fake_engine
from backend_tensorrt.tensorrt_fakes import TORCH, FakeDevice, Misuse, fake_tensorrt
from parity.paged import PagedDriver
from parity.tiny import tiny_model

from wicore_trt.backends.tensorrt import plan_io
from wicore_trt.backends.tensorrt.plan_io import DECODE
from wicore_trt.backends.tensorrt.session import BoundContext, LoadedPlan, StepBuffer, activation_bytes, load_plans
from wicore_trt.engine.directory import EngineDir

SIZES = {plan_io.BATCH: 2, plan_io.CHUNK: 1, plan_io.ROWS: 2}


@pytest.fixture
def engine(tmp_path: Path) -> EngineDir:
    model = tiny_model(3)
    return fake_engine(tmp_path / "engine", model.spec, model.tensors)


def decode_context(engine: EngineDir, device: FakeDevice) -> tuple[LoadedPlan, BoundContext]:
    """A context of the decode plan with shapes and no memory; its activations are held by nobody else."""
    trt = fake_tensorrt(device)
    plans = load_plans(trt, engine, "sm89")
    raw = plans[DECODE].engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    context = BoundContext(plans[DECODE], raw, device.empty((activation_bytes(plans),), torch.uint8))
    context.shape(SIZES)
    return plans[DECODE], context


def bind_all(plan: LoadedPlan, context: BoundContext, device: FakeDevice) -> None:
    """Memory that nothing but the context keeps."""
    for tensor in plan.tensors.values():
        shape = tuple(d if isinstance(d, int) else SIZES[d] for d in tensor.shape)
        if tensor.kind == "cache":
            memory = device.empty(shape, TORCH[tensor.dtype]).zero_()
            context.bind(tensor.name, memory, SIZES)
            context.bind(plan_io.updated(tensor.name), memory, SIZES)
        elif tensor.kind != "output" or tensor.name == plan_io.LOGITS:
            memory = device.empty(shape, TORCH[tensor.dtype])
            memory.fill_(1) if tensor.dtype != "int32" else memory.zero_()
            if tensor.name.startswith("kv_lengths"):
                memory.fill_(1)
            context.bind(tensor.name, memory, SIZES)


def test_a_context_keeps_all_memory_that_it_points_at(engine: EngineDir) -> None:
    device = FakeDevice()
    plan, context = decode_context(engine, device)
    bind_all(plan, context, device)
    gc.collect()
    context.run(device.stream)
    context._held.pop("lm_head.weight")
    context._held["lm_head.weight"] = device.empty((1,), torch.float32)  # held, but not what was bound
    gc.collect()
    with pytest.raises(Misuse, match=r"lm_head\.weight: .* not in memory that is alive"):
        context.run(device.stream)


def test_memory_that_does_not_fit_its_tensor_is_refused(engine: EngineDir) -> None:
    device = FakeDevice()
    _, context = decode_context(engine, device)
    with pytest.raises(AssertionError, match="no memory for"):
        context.run(device.stream)
    block = device.empty((65,), torch.int32)
    for wrong in (block[:1], block[1:], block.float(), block[:4].view(2, 2).T):
        with pytest.raises(AssertionError, match="positions"):
            context.bind("positions", wrong, SIZES)


@pytest.mark.parametrize("call", ["set_input_shape", "set_tensor_address", "execute_async_v3"])
def test_a_call_that_tensorrt_refuses_is_an_error_that_names_it(engine: EngineDir, call: str) -> None:
    device = FakeDevice()
    trt = fake_tensorrt(device)
    driver = PagedDriver(executor_of(engine, device, trt))  # type: ignore[arg-type]
    trt.refuse.add(call)
    says = f"TensorRT refused {call} of .* in prefill" if call.startswith("set") else "refused to run prefill"
    with pytest.raises(RuntimeError, match=says):
        driver.step([(driver.new_sequence(), [1, 2])])
    if call == "execute_async_v3":
        with pytest.raises(RuntimeError, match="refused to run decode"):
            driver.step([(driver.new_sequence(), [1])])
    with pytest.raises(RuntimeError, match=says):
        executor_of(engine, device, trt)


def test_an_upload_is_not_overwritten_before_the_step_ends(engine: EngineDir) -> None:
    """The device copies later than the host writes, so each upload of a step has host memory of its own."""
    device = FakeDevice()
    trt = fake_tensorrt(device)
    buffer = StepBuffer(device, load_plans(trt, engine, "sm89"), slots=2)
    inputs = {name: np.full(field.shape, 7, np.int32) for name, field in buffer.fields.items()}
    assert all(field.data_ptr() % 256 == 0 for field in buffer.fields.values())
    for value in range(3):
        buffer.upload({**inputs, "positions": np.full(2, value, np.int32)})
        assert buffer.fields["positions"][:2].tolist() == [value, value] and (buffer.fields["token_ids"] == 7).all()
    blocks = [block.data_ptr() for block in buffer._staging]
    assert len(set(blocks)) == 3
    at = buffer._offsets["positions"]
    assert [int(block[at]) for block in buffer._staging] == [0, 1, 2]
    buffer.reuse()
    buffer.upload(inputs)
    assert [block.data_ptr() for block in buffer._staging] == blocks
    with pytest.raises(AssertionError, match="positions"):
        buffer.upload({k: v for k, v in inputs.items() if k != "positions"})


def test_execute_ends_only_after_the_device_is_done(engine: EngineDir) -> None:
    device = FakeDevice()
    driver = PagedDriver(executor_of(engine, device))  # type: ignore[arg-type]
    for _ in range(3):
        before = device.synchronized
        driver.step([(driver.new_sequence(), [1, 2, 3])])
        assert device.synchronized > before
        assert driver.executor._session._inputs._used == 0  # type: ignore[attr-defined]
