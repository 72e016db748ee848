"""Loads cubins into the current CUDA context and launches them on a stream, by raw pointers.

Needs `cuda-bindings` (imported at the first launch) and an NVIDIA driver; neither Triton nor torch. Knows no kernel by
name. Invariant: what a kernel assumes about its arguments (names, integer ranges, alignment) is checked before the
launch, because the device would not say.

A kernel that is made for it is launched before the one in front has ended (programmatic dependent launch); stream
capture makes edges of that kind of it. Why results stay the same: `plugins.dependent`.

Parameters of a Triton 3.6 kernel: its arguments without the constants, then a global and a profile scratch pointer,
which are null because `aot.compile_kernel` takes no kernel that uses them (triton/backends/nvidia/driver.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.plugins.aot import CompiledKernel
from wicore_trt.plugins.layout import Launch

WARP = 32
DEFAULT_SHARED = 48 * 1024  # dynamic shared memory of a block that needs no opt-in
C_TYPES: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
}


class Launcher(Protocol):
    """Starts a kernel and returns at once; arrays stay the caller's until the stream has passed the kernel."""

    def launch(self, kernel: CompiledKernel, call: Launch, stream: int) -> None: ...


class ParameterBlock:
    """The values of one launch in C types, and the array of their addresses that cuLaunchKernel reads."""

    def __init__(self, kernel: CompiledKernel, arguments: Mapping[str, Any]) -> None:
        """Raises ValueError for a name that is missing or too many, a value out of its type's range, or one that is not
        the multiple of 16 that the kernel was compiled for."""
        names = {name for name, _ in kernel.arguments}
        if names != {*arguments}:
            raise ValueError(f"{kernel.name}: missing or unknown arguments {sorted(names ^ {*arguments})}")
        self.values = [_convert(kernel, name, type_, arguments[name]) for name, type_ in kernel.arguments]
        self.values += [ctypes.c_void_p(0), ctypes.c_void_p(0)]
        self._addresses = (ctypes.c_void_p * len(self.values))(*map(ctypes.addressof, self.values))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._addresses)


def _convert(kernel: CompiledKernel, name: str, type_: str, value: Any) -> Any:
    if name in kernel.aligned and value % 16:
        raise ValueError(f"{kernel.name}: {name} = {value} is no multiple of 16")
    if type_.startswith("*"):
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{kernel.name}: {name} = {value} is no address")
        return ctypes.c_void_p(value)
    c_type = C_TYPES[type_]
    if type_ != "fp32" and c_type(value).value != value:
        raise ValueError(f"{kernel.name}: {name} = {value} does not fit {type_}")
    return c_type(value)


class CudaLauncher:
    """`Launcher` over the CUDA driver. A cubin is loaded once per context and stays loaded; threads may share it."""

    def __init__(self, driver: Any = None) -> None:
        """`driver` stands in for `cuda.bindings.driver` in tests."""
        self._driver = driver
        self._functions: dict[tuple[int, bytes, str], Any] = {}
        self._digests: dict[int, tuple[CompiledKernel, bytes]] = {}
        self._lock = threading.Lock()

    def launch(self, kernel: CompiledKernel, call: Launch, stream: int) -> None:
        """Launch on the stream with this handle (0: the default stream) of the current context.

        A grid with a 0 launches nothing. Raises EnvironmentUnfitError without a driver, a context or a cubin for this
        GPU, ValueError for arguments that do not fit, RuntimeError for what CUDA reports.
        """
        parameters = ParameterBlock(kernel, call.arguments)
        if 0 in call.grid:
            return
        function = self._function(kernel)
        block = (kernel.num_warps * WARP, 1, 1)
        if kernel.dependent:
            config = dependent_config(self._driver, call.grid, block, kernel.shared_bytes, stream)
            self._call("cuLaunchKernelEx", config, function, parameters.address, 0)
            return
        self._call("cuLaunchKernel", function, *call.grid, *block, kernel.shared_bytes, stream, parameters.address, 0)

    def _function(self, kernel: CompiledKernel) -> Any:
        with self._lock:
            if self._driver is None:
                self._driver = _cuda_driver()
            context = int(self._call("cuCtxGetCurrent"))
            if not context:
                raise EnvironmentUnfitError(
                    "No CUDA context is current on this thread.", fix="Create one first, for example by the framework."
                )
            known = self._digests.get(id(kernel))
            if known is None:  # the kernel is kept, so that its id stays its own
                known = self._digests[id(kernel)] = (kernel, hashlib.blake2b(kernel.cubin, digest_size=16).digest())
            key = (context, known[1], kernel.symbol)
            if key not in self._functions:
                self._functions[key] = self._load(kernel)
            return self._functions[key]

    def _load(self, kernel: CompiledKernel) -> Any:
        module = self._call("cuModuleLoadData", kernel.cubin)
        function = self._call("cuModuleGetFunction", module, kernel.symbol.encode())
        if kernel.shared_bytes > DEFAULT_SHARED:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, attribute, kernel.shared_bytes)
        return function

    def _call(self, name: str, *arguments: Any) -> Any:
        """One driver function's value. Raises for any status but success."""
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            error = getattr(status, "name", str(status))
            if error in ("CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NOT_INITIALIZED"):
                raise EnvironmentUnfitError(
                    f"{name}: {error}. The kernels were not compiled for this GPU, or CUDA is not initialised.",
                    fix="Build the engine for this GPU's target.",
                )
            raise RuntimeError(f"{name} failed: {error}")
        return values[0] if values else None


def dependent_config(
    driver: Any, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, stream: int
) -> Any:
    """CUlaunchConfig of a launch that need not wait for the end of the kernel in front."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    config.attrs = [attribute]
    config.numAttrs = 1
    return config


def _cuda_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EnvironmentUnfitError(
            f"The CUDA driver's Python bindings cannot be loaded: {error}.", fix="pip install cuda-bindings"
        ) from error
    try:
        (status,) = driver.cuInit(0)  # harmless where the framework has done it
    except RuntimeError as error:  # the driver's library is not there
        raise EnvironmentUnfitError(f"No NVIDIA driver: {error}", fix="Run on a machine with a GPU.") from error
    if int(status) != 0:
        raise EnvironmentUnfitError(f"CUDA cannot be initialised: {status.name}.", fix="Is there a GPU and a driver?")
    return driver


SHARED_LAUNCHER = CudaLauncher()
"""The process's launcher: modules are loaded once whoever launches."""
