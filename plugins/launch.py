"""Loads cubins into the current CUDA context and launches them on a stream, by raw pointers.

Needs `cuda-bindings` (imported at the first launch) and an NVIDIA driver; neither Triton nor torch. Knows no kernel by
name. Invariant: a kernel's assumptions about its arguments (names, integer ranges, alignment) are checked before the
launch, because the device would not report them.

Kernels made for it are launched before the one in front has ended (programmatic dependent launch), also as edges of a
captured graph. `plugins.dependent` explains why results stay the same.

Parameters of a Triton 3.6 kernel: its arguments without the constants, then a global and a profile scratch pointer,
which are null because `aot.compile_kernel` takes no kernel that uses them (triton/backends/nvidia/driver.py). A tensor
map is a parameter of 128 bytes, followed by its extents and strides, which no kernel reads.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.plugins.aot import CompiledKernel
from wicore_trt.plugins.layout import Launch, TensorMap

WARP = 32
DEFAULT_SHARED = 48 * 1024  # dynamic shared memory of a block that needs no opt-in
C_CODES = {"i32": "i", "i64": "q", "fp32": "f"}
"""Codes of `struct` by type; other types are pointers or MAP_TYPE."""
MAP_TYPE = re.compile(r"tensordesc<(?P<item>\w+)\[(?P<box>[\d, ]+)\],.*swizzle_byte_width=(?P<swizzle>\d+)")
ITEM_TYPES, SWIZZLES = {"i32": 3, "fp16": 6, "bf16": 9}, {"0": 0, "32": 1, "64": 2, "128": 3}
"""CUtensorMapDataType and CUtensorMapSwizzle by Triton's names."""


class Launcher(Protocol):
    """Starts a kernel and returns at once; arrays stay the caller's until the stream has passed the kernel."""

    def launch(self, kernel: CompiledKernel, call: Launch, stream: int) -> None: ...


class ParameterBlock:
    """Parameters of a kernel's launches in C types, and the array of their addresses that cuLaunchKernel reads. All
    launches fill the same memory, which the driver copies. `encode` finds a tensor map's address by its type."""

    def __init__(self, kernel: CompiledKernel, encode: Callable[[str, TensorMap], int] = lambda *_: 0) -> None:
        self._kernel, self._encode = kernel, encode
        plain = [(name, type_) for name, type_ in kernel.arguments if not MAP_TYPE.match(type_)]
        self._names = [name for name, _ in plain]
        self._aligned = [name for name in self._names if name in kernel.aligned]
        codes = [C_CODES.get(type_, "Q") for _, type_ in plain] + ["Q", "Q"]
        self._layout = struct.Struct("@" + "".join(codes))
        self._memory = ctypes.create_string_buffer(self._layout.size)
        ends = [struct.calcsize("@" + "".join(codes[: n + 1])) for n in range(len(codes))]
        base = ctypes.addressof(self._memory)
        places = [base + end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        self._maps, addresses, rest = list[tuple[int, str, str]](), list[int](), iter(places)
        for name, type_ in kernel.arguments:
            if found := MAP_TYPE.match(type_):
                self._maps.append((len(addresses), name, type_))
                addresses += [places[-1]] * (1 + 2 * len(found["box"].split(",")))
            else:
                addresses.append(next(rest))
        addresses += rest
        self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self.address = ctypes.addressof(self._addresses)

    def fill_parameters(self, arguments: Mapping[str, Any]) -> None:
        """Raises ValueError for a missing or extra name, a value out of its type's range, or one that is not the
        multiple of 16 that the kernel was compiled for."""
        try:
            values, bits = [arguments[name] for name in self._names], 0
            for name in self._aligned:
                bits |= arguments[name]
            if len(values) + len(self._maps) == len(arguments) and not bits & 15:
                self._layout.pack_into(self._memory, 0, *values, 0, 0)
                for place, name, type_ in self._maps:
                    self._addresses[place] = self._encode(type_, arguments[name])
                return
        except (KeyError, struct.error, OverflowError):
            pass
        raise ValueError(_describe_misfit(self._kernel, arguments))


def _describe_misfit(kernel: CompiledKernel, arguments: Mapping[str, Any]) -> str:
    names = {name for name, _ in kernel.arguments}
    if names != {*arguments}:
        return f"{kernel.name}: missing or unknown arguments {sorted(names ^ {*arguments})}"
    for name, type_ in kernel.arguments:
        value = arguments[name]
        if MAP_TYPE.match(type_):
            continue
        if name in kernel.aligned and value & 15:
            return f"{kernel.name}: {name} = {value} is no multiple of 16"
        try:
            struct.pack(C_CODES.get(type_, "Q"), value)
        except (struct.error, OverflowError):
            return f"{kernel.name}: {name} = {value} " + (
                "is no address" if type_[0] == "*" else f"does not fit {type_}"
            )
    raise AssertionError(kernel.name)


@dataclass(slots=True)
class _Prepared:
    """State that a thread's launches of a kernel share. `function` is the kernel's in the context of that handle."""

    kernel: CompiledKernel  # kept, so that its id stays its own
    parameters: ParameterBlock
    block: tuple[int, int, int]
    config: Any = None
    context: int = 0
    function: Any = None


class CudaLauncher:
    """Implements `Launcher` over the CUDA driver. A cubin is loaded once per context and stays loaded; threads may
    share it."""

    def __init__(self, driver: Any = None) -> None:
        """Take `driver` in place of `cuda.bindings.driver`, for tests."""
        self._driver = driver
        self._functions: dict[tuple[int, bytes, str], Any] = {}
        self._digests: dict[int, tuple[CompiledKernel, bytes]] = {}
        self._lock = threading.Lock()
        self._ready = threading.local()
        self._maps: dict[tuple[str, TensorMap], Any] = {}

    def launch(self, kernel: CompiledKernel, call: Launch, stream: int) -> None:
        """Launch on the stream with this handle (0: the default stream) of the current context. A grid with a 0
        launches nothing. Raises EnvironmentUnfitError without a driver, a context or a cubin for this GPU, ValueError
        for arguments that do not fit, RuntimeError for CUDA's errors."""
        blocks: dict[int, _Prepared] = self._ready.__dict__.setdefault("blocks", {})
        prepared = blocks.get(id(kernel))
        if prepared is None:
            parameters = ParameterBlock(kernel, self._encode_map)
            prepared = blocks[id(kernel)] = _Prepared(kernel, parameters, (kernel.num_warps * WARP, 1, 1))
        parameters = prepared.parameters
        parameters.fill_parameters(call.arguments)
        if 0 in call.grid:
            return
        context = self._find_context()
        if context != prepared.context:
            prepared.function, prepared.context = self._find_function(kernel, context), context
        function = prepared.function
        if kernel.dependent:
            if prepared.config is None:
                prepared.config = dependent_config(self._driver, prepared.block, kernel.shared_bytes)
            config = prepared.config
            config.gridDimX, config.gridDimY, config.gridDimZ = call.grid
            config.hStream = stream
            self._call_driver("cuLaunchKernelEx", config, function, parameters.address, 0)
            return
        block = prepared.block
        self._call_driver(
            "cuLaunchKernel", function, *call.grid, *block, kernel.shared_bytes, stream, parameters.address, 0
        )

    def _encode_map(self, type_: str, array: TensorMap) -> int:
        """Find the address of an encoded map, which is made once and kept: of two threads' the first. The driver asks
        for a multiple of 64, which an object of cuda-bindings' own call need not be."""
        if (type_, array) not in self._maps:
            self._driver = self._driver or _cuda_driver()
            function = self._call_driver("cuGetProcAddress", b"cuTensorMapEncodeTiled", 12000, 0)
            self._maps.setdefault((type_, array), encode_map(int(function), type_, array))
        return ctypes.addressof(self._maps[type_, array])

    def _find_context(self) -> int:
        if self._driver is None:
            self._driver = _cuda_driver()
        context = int(self._call_driver("cuCtxGetCurrent"))
        if not context:
            fix = "Create one first, for example by the framework."
            raise EnvironmentUnfitError("No CUDA context is current on this thread.", fix=fix)
        return context

    def _find_function(self, kernel: CompiledKernel, context: int) -> Any:
        with self._lock:
            known = self._digests.get(id(kernel))
            if known is None:  # the kernel is kept, so that its id stays its own
                known = self._digests[id(kernel)] = (kernel, hashlib.blake2b(kernel.cubin, digest_size=16).digest())
            key = (context, known[1], kernel.symbol)
            if key not in self._functions:
                self._functions[key] = self._load_function(kernel)
            return self._functions[key]

    def _load_function(self, kernel: CompiledKernel) -> Any:
        module = self._call_driver("cuModuleLoadData", kernel.cubin)
        function = self._call_driver("cuModuleGetFunction", module, kernel.symbol.encode())
        if kernel.shared_bytes > DEFAULT_SHARED:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call_driver("cuFuncSetAttribute", function, attribute, kernel.shared_bytes)
        return function

    def _call_driver(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            error = getattr(status, "name", str(status))
            if error in ("CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NOT_INITIALIZED"):
                problem = f"{name}: {error}. The kernels were not compiled for this GPU, or CUDA is not initialised."
                raise EnvironmentUnfitError(problem, fix="Build the engine for this GPU's target.")
            raise RuntimeError(f"{name} failed: {error}")
        return values[0] if values else None


def encode_map(function: int, type_: str, array: TensorMap) -> Any:
    """Encode by cuTensorMapEncodeTiled at address `function`: 128 bytes, at a multiple of 64. Raises RuntimeError."""
    found = MAP_TYPE.match(type_)
    assert found and len(array.extents) == len(array.strides) + 1
    memory = ctypes.create_string_buffer(128 + 64)
    encoded = (ctypes.c_char * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
    rank, box = len(array.extents), [int(size) for size in found["box"].split(",")]
    longs, ints = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    encode = ctypes.CFUNCTYPE(
        ctypes.c_int, *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64), *[ctypes.c_void_p] * 4,
        *[ctypes.c_int] * 4,
    )(function)  # fmt: skip
    status = encode(
        ctypes.addressof(encoded), ITEM_TYPES[found["item"]], rank, array.address, longs(*array.extents[::-1]),
        longs(*array.strides[::-1]), ints(*box[::-1]), ints(*[1] * rank), 0, SWIZZLES[found["swizzle"]], 2, 0,
    )  # fmt: skip
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed: {status} ({array}, {type_})")
    return encoded


def dependent_config(driver: Any, block: tuple[int, int, int], shared_bytes: int) -> Any:
    """Make the CUlaunchConfig of dependent launches, but for grid and stream."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    config.attrs = [attribute]
    config.numAttrs = 1
    return config


def _cuda_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        fix = "pip install cuda-bindings"
        raise EnvironmentUnfitError(f"The CUDA driver's Python bindings cannot be loaded: {error}.", fix=fix) from error
    try:
        (status,) = driver.cuInit(0)  # harmless where the framework has done it
    except RuntimeError as error:  # the driver's library is not there
        raise EnvironmentUnfitError(f"No NVIDIA driver: {error}", fix="Run on a machine with a GPU.") from error
    if int(status) != 0:
        raise EnvironmentUnfitError(f"CUDA cannot be initialised: {status.name}.", fix="Is there a GPU and a driver?")
    return driver


SHARED_LAUNCHER = CudaLauncher()
"""The process's launcher: modules are loaded once whoever launches."""
