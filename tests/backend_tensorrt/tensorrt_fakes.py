"""A TensorRT without a GPU: module, runtime, engine and context that check every call and compute on CPU memory.

A plan is a JSON file. A context reads the addresses that it was given, as TensorRT would, runs `tensorrt_fake_network`
on what it finds there, and writes logits and caches in place. What a caller may never do raises `Misuse`; what TensorRT
would refuse returns False, and a test can order a refusal. Memory that `FakeDevice` gave is known by address, and
forgotten when the last tensor over it goes, so an address that nobody keeps is found at the next run.
"""

from __future__ import annotations

import ctypes
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from backend_tensorrt.tensorrt_fake_network import run_network

from wicore_trt.backends.tensorrt.plan_io import TensorSpec
from wicore_trt.model.spec import Gemma3Spec

VERSION = "1.7.1.116"
TORCH = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn,
    "int32": torch.int32,
}  # fmt: skip
ALIGNMENT = 256


class Misuse(Exception):
    """The runtime did what crashes or corrupts on a GPU."""


class FakeDevice:
    """Implements `CudaDevice` in host memory. `captured` counts graphs, `replayed` their runs."""

    def __init__(self, target: str = "sm89", free_bytes: int = 1 << 40) -> None:
        self.torch_device = torch.device("cpu")
        self.target, self.stream = target, 4711
        self.ranges: dict[int, int] = {}  # address: bytes
        self.captured = self.replayed = self.synchronized = 0
        self.recording: list[Callable[[], None]] | None = None
        self._free_bytes = free_bytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = np.full(size + ALIGNMENT, 0xFF, np.uint8)
        begin = -raw.ctypes.data % ALIGNMENT
        block = raw[begin : begin + size]
        address = block.ctypes.data
        self.ranges[address] = size
        weakref.finalize(block, self.ranges.pop, address)
        return torch.from_numpy(block).view(dtype).view(tuple(shape))

    def staging(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=torch.int32)

    def free_bytes(self) -> int:
        return self._free_bytes

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        self.synchronized += 1

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recording, self.captured = [], self.captured + 1
        work()
        recorded, self.recording = self.recording, None

        def replay() -> None:
            self.replayed += 1
            for run in recorded:
                run()

        return replay

    def memory(self, what: str, address: int, size: int) -> torch.Tensor:
        """uint8[size] at an address, which must lie in one live block."""
        for begin, length in self.ranges.items():
            if begin <= address and address + size <= begin + length:
                return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))
        raise Misuse(f"{what}: {size} bytes at {address:#x} are not in memory that is alive")


def fake_tensorrt(device: FakeDevice, *, rtx: bool = True, version: str = VERSION) -> Any:
    """A module like `tensorrt_rtx_bindings`, or like `tensorrt`. `module.refuse` names context calls that fail;
    `module.engines` lists what was loaded; `module.network` computes a run."""

    module: Any = SimpleNamespace(__version__=version, ILogger=type("ILogger", (), {}))
    enums = {
        "TensorIOMode": ("NONE", "INPUT", "OUTPUT"),
        "TensorLocation": ("DEVICE", "HOST"),
        "DataType": ("FLOAT", "HALF", "BF16", "FP8", "INT32", "INT64"),
        "ExecutionContextAllocationStrategy": ("STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"),
    }
    if rtx:
        enums["CudaGraphStrategy"] = ("DISABLED", "WHOLE_GRAPH_CAPTURE")
    for name, members in enums.items():
        setattr(module, name, SimpleNamespace(**{member: (name, member) for member in members}))
    module.refuse, module.engines, module.caches = set(), [], []
    module.network = run_network
    module.Runtime = lambda logger: _Runtime(module, device, logger)
    return module


class _Runtime:
    def __init__(self, module: Any, device: FakeDevice, logger: Any) -> None:
        self._module, self._device, self._logger = module, device, logger

    def deserialize_cuda_engine(self, data: bytes) -> Any:
        try:
            plan = json.loads(data)
        except ValueError:
            self._logger.log(type("Severity", (), {"name": "ERROR"}), "not a plan of this version")
            return None
        self._module.engines.append(FakeEngine(self._module, self._device, plan))
        return self._module.engines[-1]


class FakeEngine:
    """`plan`: "spec", "phase", "kv_dtype", "tensors" (TensorSpec dicts), "profile", "aliases", "hosted" (names)."""

    def __init__(self, module: Any, device: FakeDevice, plan: dict[str, Any]) -> None:
        self.module, self.device, self.plan = module, device, plan
        self.spec = Gemma3Spec.from_dict(plan["spec"])
        self.tensors = {t["name"]: msgspec.convert(t, TensorSpec) for t in plan["tensors"]}
        self.profile = {letter: tuple(bounds) for letter, bounds in plan["profile"].items()}
        self.contexts: list[FakeContext] = []
        self.num_io_tensors = len(self.tensors)
        self.device_memory_size_v2 = 1000 + len(plan["phase"])

    def get_tensor_name(self, index: int) -> str:
        return str([*self.tensors][index])

    def get_tensor_mode(self, name: str) -> Any:
        modes = self.module.TensorIOMode
        return modes.OUTPUT if self.tensors[name].kind == "output" else modes.INPUT

    def get_tensor_dtype(self, name: str) -> Any:
        names = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "fp8": "FP8", "int32": "INT32"}
        return getattr(self.module.DataType, names[self.tensors[name].dtype])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else -1 for d in self.tensors[name].shape)

    def get_tensor_location(self, name: str) -> Any:
        return getattr(self.module.TensorLocation, "HOST" if name in self.plan["hosted"] else "DEVICE")

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        assert profile == 0
        return [self.tensors[name].bound(self.profile, which) for which in range(3)]

    def get_aliased_input_tensor(self, name: str) -> str:
        return str(self.plan["aliases"].get(name, ""))

    def create_runtime_config(self) -> Any:
        return _RuntimeConfig(self.module)

    def create_execution_context(self, how: Any) -> Any:
        graphs = False
        if isinstance(how, _RuntimeConfig):
            graphs = how.cuda_graph_strategy == self.module.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            how = how.strategy
        if how != self.module.ExecutionContextAllocationStrategy.USER_MANAGED:
            raise Misuse("each context would allocate activations of its own")
        self.contexts.append(FakeContext(self, graphs))
        return self.contexts[-1]


class _RuntimeConfig:
    def __init__(self, module: Any) -> None:
        self._module = module
        self.strategy: Any = None
        self.cuda_graph_strategy: Any = None
        self.cache: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> Any:
        self._module.caches.append(FakeRuntimeCache())
        return self._module.caches[-1]

    def set_runtime_cache(self, cache: Any) -> bool:
        self.cache = cache
        return True


class FakeRuntimeCache:
    """Its content is a count of how often it was kept."""

    def __init__(self) -> None:
        self.kept = 0

    def deserialize(self, data: bytes) -> bool:
        if not data.isdigit():
            return False
        self.kept = int(data)
        return True

    def serialize(self) -> bytes:
        return str(self.kept + 1).encode()


class FakeContext:
    """Checks as TensorRT would, and what TensorRT would not."""

    def __init__(self, engine: FakeEngine, graphs: bool) -> None:
        self._engine, self.graphs, self.runs = engine, graphs, 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._activations: tuple[int, int] | None = None

    def set_device_memory(self, memory: int, size: int) -> None:
        if memory % ALIGNMENT or size < max(e.device_memory_size_v2 for e in self._engine.module.engines):
            raise Misuse(f"activation memory: {size} bytes at {memory:#x}")
        self._activations = (memory, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        tensor = self._known(name)
        if tensor.kind == "output" or len(shape) != len(tensor.shape):
            raise Misuse(f"shape {shape} of {name}")
        least, most = tensor.bound(self._engine.profile, 0), tensor.bound(self._engine.profile, 2)
        if not all(low <= d <= high for low, d, high in zip(least, shape, most, strict=True)):
            raise Misuse(f"shape {shape} of {name} is outside of {least} to {most}")
        self._shapes[name] = tuple(shape)
        return "set_input_shape" not in self._engine.module.refuse

    def infer_shapes(self) -> list[str]:
        inputs = [t for t in self._engine.tensors.values() if t.kind != "output" and -1 in self._declared(t)]
        return [t.name for t in inputs if t.name not in self._shapes]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._known(name)
        if not isinstance(memory, int) or memory % ALIGNMENT:
            raise Misuse(f"address {memory} of {name}")
        self._addresses[name] = memory
        return "set_tensor_address" not in self._engine.module.refuse

    def execute_async_v3(self, stream: int) -> bool:
        device = self._engine.device
        if stream != device.stream:
            raise Misuse(f"stream {stream}")
        if "execute_async_v3" in self._engine.module.refuse:
            return False
        if device.recording is not None:  # a graph remembers addresses and shapes, and who may change them
            shapes, addresses = dict(self._shapes), dict(self._addresses)
            device.recording.append(lambda: self._run(shapes, addresses))
        else:
            self._run(self._shapes, self._addresses)
        return True

    def _run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        self.runs += 1
        device, tensors = self._engine.device, self._engine.tensors
        if self._activations is None or self.infer_shapes() or {*addresses} != {*tensors}:
            raise Misuse(f"not ready: {sorted({*tensors} - {*addresses})}")
        device.memory("activations", *self._activations)
        sizes = self._sizes(shapes)
        memory: dict[str, torch.Tensor] = {}
        for tensor in tensors.values():
            shape = tuple(d if isinstance(d, int) else sizes[d] for d in tensor.shape)
            dtype = TORCH[tensor.dtype]
            size = torch.Size(shape).numel() * dtype.itemsize
            memory[tensor.name] = device.memory(tensor.name, addresses[tensor.name], size).view(dtype).view(shape)
        for output, source in self._engine.plan["aliases"].items():
            if addresses[output] != addresses[source]:
                raise Misuse(f"{output} is not in the memory of {source}")
        memory["logits"].fill_(torch.nan)
        self._engine.module.network(self._engine.spec, memory, self._engine.plan)

    def _sizes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
        """B, T and R, which all inputs must agree on."""
        sizes: dict[str, int] = {}
        for name, shape in shapes.items():
            for letter, size in zip(self._engine.tensors[name].shape, shape, strict=True):
                if isinstance(letter, str) and sizes.setdefault(letter, size) != size:
                    raise Misuse(f"{name} has {letter} = {size}, others {sizes[letter]}")
        return sizes

    def _known(self, name: str) -> TensorSpec:
        if name not in self._engine.tensors:
            raise Misuse(f"there is no tensor {name}")
        return self._engine.tensors[name]

    def _declared(self, tensor: TensorSpec) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else -1 for d in tensor.shape)
