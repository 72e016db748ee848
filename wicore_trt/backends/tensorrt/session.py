"""Plans of an engine directory, loaded into TensorRT and run: memory bound once, step inputs uploaded, one stream.

Knows the files of `backends.tensorrt.build`, TensorRT's engine and context, and a `CudaDevice`; neither sequences nor
pages. Invariants: a `LoadedPlan` has the inputs and outputs that the index lists, and this version binds exactly those;
each address in a context belongs to a tensor that the context's wrapper keeps; a call that TensorRT refuses raises and
names itself; all contexts share one block of activation memory, which one stream makes safe.

Prefill has one context, whose shape and slot change. Decode has one per number of slots, whose shape and addresses
stay, so its run can be a CUDA graph: TensorRT-RTX captures by itself, full TensorRT is captured here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from wicore_trt.arithmetic import div_ceil
from wicore_trt.backends.tensorrt import plan_io
from wicore_trt.backends.tensorrt.api import TRT_TYPES
from wicore_trt.backends.tensorrt.plan_build import BuildLog, make_logger
from wicore_trt.backends.tensorrt.plan_io import DECODE, INDEX, LOGITS, PHASES, PREFILL, PlanLimits, TensorSpec
from wicore_trt.engine.directory import EngineDir
from wicore_trt.engine.manifest import rebuild_engine
from wicore_trt.errors import EngineFormatError, EnvironmentUnfitError
from wicore_trt.files import write_whole
from wicore_trt.runtime.cuda_device import ALIGNMENT, CudaDevice
from wicore_trt.runtime.dtypes import TORCH_DTYPES

DTYPES = {**TORCH_DTYPES, "int32": torch.int32}
FIELD_INTS = ALIGNMENT // 4
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """Plan in TensorRT's `engine`; `tensors` are inputs and outputs by name, B, T and R as in `profile`. `digest` names
    the plan's content."""

    phase: str
    engine: Any
    tensors: Mapping[str, TensorSpec]
    profile: Mapping[str, tuple[int, int, int]]
    digest: str


def plan_limits(engine: EngineDir) -> PlanLimits:
    """Read the limits that the plans were built for. Raises EngineFormatError when the manifest lacks them."""
    manifest = engine.manifest
    try:
        return PlanLimits(
            int(manifest.compiled["max_batch"]), int(manifest.compiled["max_chunk"]), manifest.max_context
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _make_damaged(engine, f"engine.json says {manifest.compiled!r} of its plans ({error!r})") from None


def rebuild_plans(engine: EngineDir, *more: str) -> str:
    return rebuild_engine(engine.path, engine.manifest, more)


def read_index(engine: EngineDir) -> dict[str, list[TensorSpec]]:
    """Read inputs and outputs of each phase's plans. Raises EngineFormatError for an index that cannot be read, or that
    does not list what this version binds."""
    try:
        data = engine.read_json(INDEX)["tensors"]
        index = {phase: msgspec.convert(data[phase], list[TensorSpec]) for phase in PHASES}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _make_damaged(engine, f"{INDEX} cannot be read ({error!r})") from None
    spec, limits, dtype = engine.manifest.spec, plan_limits(engine), engine.manifest.base_dtype
    caches = plan_io.cache_tensors(spec, limits, dtype)
    bound = [*plan_io.step_tensors(spec, limits), *caches, *plan_io.output_tensors(spec, caches)]
    for phase, tensors in index.items():
        expected = {t.name: t.fixed(limits.profile(phase)) for t in bound}
        listed = {t.name: t for t in tensors if t.kind != "weight"}
        for name in sorted({*expected, *listed}):
            if expected.get(name) != listed.get(name):
                raise _make_damaged(
                    engine, f"{INDEX}, {phase}: {name} is {listed.get(name)}, and this version has {expected.get(name)}"
                )
    weights = [[t for t in index[phase] if t.kind == "weight"] for phase in PHASES]
    if weights[0] != weights[1]:
        raise _make_damaged(engine, f"{INDEX}: the phases take different weights")
    return index


def load_plans(trt: Any, engine: EngineDir, target: str, runtime: Any = None) -> dict[str, LoadedPlan]:
    """Load the plans of both phases for `target`. Raises EngineFormatError for a plan that differs from the index,
    EnvironmentUnfitError with TensorRT's words for one that it refuses."""
    index, limits, book = read_index(engine), plan_limits(engine), BuildLog()
    runtime = runtime or trt.Runtime(make_logger(trt, book))
    plans = {}
    for phase in PHASES:
        name = plan_io.plan_file(target, phase)
        loaded = runtime.deserialize_cuda_engine(engine.read(name))
        if loaded is None:
            fix = rebuild_plans(engine)
            raise EnvironmentUnfitError(f"TensorRT {trt.__version__} does not load {name}: {book.reason()}.", fix=fix)
        profile, tensors = limits.profile(phase), {t.name: t for t in index[phase]}
        names = {loaded.get_tensor_name(i) for i in range(loaded.num_io_tensors)}
        problems = [f"it lacks {tensor}" for tensor in sorted({*tensors} - names)]
        problems += [f"it has {tensor}" for tensor in sorted(names - {*tensors})]
        for tensor in sorted(names & {*tensors}):
            found = _list_problems(trt, loaded, tensors[tensor], profile)
            problems += [f"{tensor}: {problem}" for problem in found]
        if problems:
            raise _make_damaged(engine, f"{name} is not as {INDEX} says: {'; '.join(problems[:3])}")
        plans[phase] = LoadedPlan(phase, loaded, tensors, profile, engine.manifest.files[name].blake2b)
    return plans


def _list_problems(trt: Any, engine: Any, tensor: TensorSpec, profile: Mapping[str, tuple[int, int, int]]) -> list[str]:
    """List differences between a tensor of TensorRT's `engine` and `tensor`."""
    name, is_output = tensor.name, tensor.kind == "output"
    shape = tuple(d if isinstance(d, int) else -1 for d in tensor.shape)
    compared = [
        ("mode", engine.get_tensor_mode(name), trt.TensorIOMode.OUTPUT if is_output else trt.TensorIOMode.INPUT),
        ("dtype", engine.get_tensor_dtype(name), getattr(trt.DataType, TRT_TYPES[tensor.dtype])),
        ("shape", tuple(engine.get_tensor_shape(name)), shape),
        ("location", engine.get_tensor_location(name), trt.TensorLocation.DEVICE),
    ]
    if not is_output and -1 in shape:
        bounds = [tuple(bound) for bound in engine.get_tensor_profile_shape(name, 0)]
        compared.append(("profile", bounds, [tensor.bound(profile, which) for which in range(3)]))
    if is_output and hasattr(engine, "get_aliased_input_tensor"):
        aliased = name.removesuffix(plan_io.updated("")) if name != plan_io.LOGITS else None
        compared.append(("alias", engine.get_aliased_input_tensor(name) or None, aliased))
    return [f"its {what} is {got}, expected {want}" for what, got, want in compared if got != want]


def _make_damaged(engine: EngineDir, what: str) -> EngineFormatError:
    return EngineFormatError(f"engine {engine.path}: {what}.", fix=rebuild_plans(engine))


class BoundContext:
    """Execution context and the tensors whose memory it uses. Raises RuntimeError for what TensorRT refuses."""

    def __init__(self, plan: LoadedPlan, context: Any, activations: torch.Tensor) -> None:
        self._plan, self._context = plan, context
        self._held: dict[str, torch.Tensor] = {}
        self._activations = activations
        context.set_device_memory(activations.data_ptr(), activations.nbytes)

    def shape(self, sizes: Mapping[str, int]) -> None:
        for tensor in self._plan.tensors.values():
            if tensor.kind != "output" and any(isinstance(d, str) for d in tensor.shape):
                self._check_call(
                    self._context.set_input_shape(tensor.name, _size_shape(tensor, sizes)), "set_input_shape", tensor
                )
        missing = self._context.infer_shapes()
        if missing:
            raise RuntimeError(f"TensorRT lacks shapes of {', '.join(missing)}.")

    def bind(self, name: str, memory: torch.Tensor, sizes: Mapping[str, int]) -> None:
        """Bind tensor `name` of the plan to the beginning of `memory`, which is kept."""
        tensor = self._plan.tensors[name]
        items = int(np.prod(_size_shape(tensor, sizes)))
        assert memory.dtype == DTYPES[tensor.dtype] and memory.is_contiguous(), f"{name}: {memory.dtype}"
        assert memory.numel() >= items and memory.data_ptr() % ALIGNMENT == 0, f"{name}: {memory.shape}"
        self._check_call(self._context.set_tensor_address(name, memory.data_ptr()), "set_tensor_address", tensor)
        self._held[name] = memory

    def run(self, stream: int) -> None:
        unbound = {*self._plan.tensors} - {*self._held}
        assert not unbound, f"{self._plan.phase}: no memory for {sorted(unbound)}"
        if not self._context.execute_async_v3(stream):
            raise RuntimeError(f"TensorRT refused to run {self._plan.phase}.")

    def _check_call(self, ok: bool, call: str, tensor: TensorSpec) -> None:
        if not ok:
            raise RuntimeError(f"TensorRT refused {call} of {tensor.name} in {self._plan.phase}.")


class PlanSession:
    """Contexts of both phases of an engine on `device`. `constants` are weights, rope tables and the like by input
    name; `caches` the cache inputs [slots, kv_heads, entries, head_dim]. `logits` float32 [slots, vocab] is valid until
    the next run."""

    def __init__(
        self,
        trt: Any,
        device: CudaDevice,
        plans: Mapping[str, LoadedPlan],
        constants: Mapping[str, torch.Tensor],
        caches: Mapping[str, torch.Tensor],
        activations: torch.Tensor,
        runtime_caches: Mapping[str, RuntimeCache],
    ) -> None:
        self._trt, self._device, self._plans = trt, device, plans
        self._constants, self._caches, self._activations = constants, caches, activations
        self._runtime_caches = runtime_caches
        self.slots = next(iter(caches.values())).shape[0]
        self._inputs = StepBuffer(device, plans, self.slots)
        vocab = plans[DECODE].tensors[LOGITS].shape[1]
        assert isinstance(vocab, int)
        self.logits = device.empty((self.slots, vocab), torch.float32)
        self._prefill = self._context(plans[PREFILL], graph=False)
        self._prefill_shape: tuple[int, int] = (0, -1)  # tokens and slot of the run before
        self._decode: dict[int, Callable[[], None]] = {}
        self._captured: list[BoundContext] = []  # kept, because graphs use what they point at

    def prefill(self, inputs: Mapping[str, np.ndarray], slot: int) -> None:
        """Run one chunk in `slot`; its logits are row 0."""
        tokens = inputs[plan_io.TOKEN_IDS].shape[1]
        sizes = {plan_io.BATCH: 1, plan_io.CHUNK: tokens, plan_io.ROWS: 1}
        if self._prefill_shape != (tokens, slot):
            self._prefill.shape(sizes)
            self._bind_slots(self._prefill, PREFILL, sizes, slot)
            self._prefill_shape = (tokens, slot)
        self._inputs.upload(inputs)
        self._prefill.run(self._device.stream)

    def decode(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Run one token in each of the first B slots; B should take few values. Row b of the logits is slot b's."""
        batch = inputs[plan_io.TOKEN_IDS].shape[0]
        self._inputs.upload(inputs)
        if batch in self._decode:
            self._decode[batch]()
            return
        context = self._context(self._plans[DECODE], graph=True)
        sizes = {plan_io.BATCH: batch, plan_io.CHUNK: 1, plan_io.ROWS: batch}
        context.shape(sizes)
        self._bind_slots(context, DECODE, sizes, 0)

        run: Callable[[], None] = partial(context.run, self._device.stream)
        run()  # what a context prepares in its first run must not be part of a graph
        if not is_rtx(self._trt):
            self._device.synchronize()
            self._captured.append(context)
            run = self._device.capture(run)
        self._decode[batch] = run

    def end_step(self) -> None:
        """Wait for all runs; the host memory of their inputs is then free again."""
        self._device.synchronize()
        self._inputs.reuse()

    def _bind_slots(self, context: BoundContext, phase: str, sizes: Mapping[str, int], slot: int) -> None:
        for tensor in self._plans[phase].tensors.values():
            if tensor.kind == "step":
                context.bind(tensor.name, self._inputs.fields[tensor.name], sizes)
            elif tensor.kind == "cache":
                memory = self._caches[tensor.name][slot:]
                context.bind(tensor.name, memory, sizes)
                context.bind(plan_io.updated(tensor.name), memory, sizes)
            elif tensor.kind != "output":
                context.bind(tensor.name, self._constants[tensor.name], sizes)
        context.bind(LOGITS, self.logits, sizes)

    def _context(self, plan: LoadedPlan, *, graph: bool) -> BoundContext:
        """Make a context of `plan` without memory. `graph`: TensorRT-RTX captures its runs."""
        trt, strategy = self._trt, self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not is_rtx(trt):
            context = plan.engine.create_execution_context(strategy)
        else:
            config = plan.engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            strategies = trt.CudaGraphStrategy
            config.cuda_graph_strategy = strategies.WHOLE_GRAPH_CAPTURE if graph else strategies.DISABLED
            self._runtime_caches[plan.phase].attach(config)
            context = plan.engine.create_execution_context(config)
        if context is None:
            raise RuntimeError(f"TensorRT gave no execution context for {plan.phase}.")
        return BoundContext(plan, context, self._activations)


class StepBuffer:
    """Device memory of the step inputs, the same for all contexts, and host memory to upload it from. `fields[name]` is
    the input's memory. An upload copies the whole block, a few KB, from a host block that no other upload uses until
    `reuse`, because copies are asynchronous."""

    def __init__(self, device: CudaDevice, plans: Mapping[str, LoadedPlan], slots: int) -> None:
        sizes: dict[str, int] = {}
        for plan in plans.values():
            profile = {**plan.profile, plan_io.BATCH: (1, 1, slots), plan_io.ROWS: (1, 1, slots)}
            for tensor in plan.tensors.values():
                if tensor.kind == "step":
                    items = int(np.prod(tensor.bound(profile, 2)))
                    sizes[tensor.name] = max(sizes.get(tensor.name, 0), items)
        self._offsets, end = {}, 0
        for name, size in sizes.items():
            self._offsets[name] = end
            end += div_ceil(size, FIELD_INTS) * FIELD_INTS
        self._device, self._size = device, end
        self._block = device.empty((end,), torch.int32)
        self.fields = {name: self._block[at : at + sizes[name]] for name, at in self._offsets.items()}
        self._staging: list[torch.Tensor] = []
        self._used = 0

    def upload(self, inputs: Mapping[str, np.ndarray]) -> None:
        assert {*inputs} == {*self.fields}, sorted({*inputs} ^ {*self.fields})
        if self._used == len(self._staging):
            self._staging.append(self._device.staging((self._size,)))
        block = self._staging[self._used]
        self._used += 1
        host = block.numpy()
        for name, values in inputs.items():
            at = self._offsets[name]
            host[at : at + values.size] = values.ravel()
        self._block.copy_(block, non_blocking=True)

    def reuse(self) -> None:
        self._used = 0


def is_rtx(trt: Any) -> bool:
    """Tell whether `trt` is TensorRT-RTX, which compiles kernels when a plan is loaded and captures graphs by
    itself."""
    return hasattr(trt, "CudaGraphStrategy")


def activation_bytes(plans: Mapping[str, LoadedPlan]) -> int:
    """Memory that any context of the plans needs beside its tensors."""
    return max(1, *(int(plan.engine.device_memory_size_v2) for plan in plans.values()))


def _size_shape(tensor: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else sizes[d] for d in tensor.shape)


class RuntimeCache:
    """TensorRT-RTX's cache on disk of the kernels that it compiled for one plan on one kind of GPU, shared by the
    plan's contexts and loaded by the first. Without the file, or with a damaged one, starting is slower. A file is
    either whole or absent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cache: Any = None

    def attach(self, config: Any) -> None:
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            try:
                data = self._path.read_bytes()
            except OSError:
                data = b""
            if data and not self._cache.deserialize(data):
                log.info("TensorRT did not take the runtime cache %s", self._path)
        if not config.set_runtime_cache(self._cache):
            log.info("TensorRT refused a runtime cache; it compiles again at each start")

    def save(self) -> None:
        """Save what was compiled. A directory that cannot be written only makes the next start slower."""
        if self._cache is None:
            return
        try:
            write_whole(self._path, bytes(self._cache.serialize()))
        except OSError as error:
            log.info("the runtime cache %s was not kept: %s", self._path, error)
