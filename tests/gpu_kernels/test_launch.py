"""Launching by raw pointers: what the driver is handed, once per context, and what is refused before it sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.plugins.aot import CompiledKernel
from wicore_trt.plugins.launch import CudaLauncher, dependent_config
from wicore_trt.plugins.layout import Launch, TensorMap

ARGUMENTS = (("data", "*fp16"), ("table", "*i32"), ("count", "i32"), ("stride", "i64"), ("scale", "fp32"))
VALUES = {"data": 0x7F00_0000_0010, "table": 0x7F00_0000_0204, "count": -3, "stride": 1 << 40, "scale": 0.1}


def kernel(**changes: Any) -> CompiledKernel:
    fields = {
        "name": "k",
        "symbol": "k_fn",
        "target": "sm89",
        "arguments": ARGUMENTS,
        "aligned": frozenset({"data", "stride"}),
        "constants": {},
        "num_warps": 4,
        "num_stages": 2,
        "shared_bytes": 1024,
        "triton_version": "3.6.0",
        "cubin": b"\x7fELF",
    }
    return CompiledKernel(**{**fields, **changes})


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_INVALID_VALUE = 1


class FakeDriver:
    """Records calls; reads the parameters as the real driver does, during cuLaunchKernel."""

    class CUfunction_attribute(IntEnum):
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    class CUlaunchAttributeID(IntEnum):
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6

    CUlaunchConfig = SimpleNamespace

    @staticmethod
    def CUlaunchAttribute() -> Any:
        return SimpleNamespace(value=SimpleNamespace())

    def __init__(self) -> None:
        self.context = 11
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, Status] = {}
        self.parameters: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name in self.fails:
                return (self.fails[name], None)
            if name.startswith("cuLaunchKernel"):
                self._read(arguments[2] if name == "cuLaunchKernelEx" else arguments[9])
                return (Status.CUDA_SUCCESS,)
            values = {"cuCtxGetCurrent": self.context, "cuModuleLoadData": 21, "cuModuleGetFunction": 31}
            return (Status.CUDA_SUCCESS, *([values[name]] if name in values else []))

        return call

    def _read(self, address: int) -> None:
        types = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_float]
        types += [ctypes.c_uint64, ctypes.c_uint64]
        pointers = (ctypes.c_uint64 * len(types)).from_address(address)
        self.parameters = [t.from_address(p).value for t, p in zip(types, pointers, strict=True)]

    def names(self) -> list[str]:
        return [c[0] for c in self.calls]


def test_parameters_grid_and_stream() -> None:
    driver = FakeDriver()
    CudaLauncher(driver).launch(kernel(), Launch((5, 6, 7), dict(reversed(VALUES.items()))), 0xBEEF)
    assert driver.calls[-1][:9] == ("cuLaunchKernel", 31, 5, 6, 7, 128, 1, 1, 1024)
    assert driver.calls[-1][9] == 0xBEEF and driver.calls[-1][11] == 0
    want = [*VALUES.values(), 0, 0]
    want[4] = ctypes.c_float(0.1).value
    assert driver.parameters == want


def test_a_cubin_is_loaded_once_per_context() -> None:
    driver = FakeDriver()
    launcher, one = CudaLauncher(driver), kernel()
    for context, other in ((11, one), (11, one), (11, kernel()), (12, one), (11, kernel(cubin=b"\x7fELF2"))):
        driver.context = context
        launcher.launch(other, Launch((1, 1, 1), VALUES), 0)
    assert [c[1] for c in driver.calls if c[0] == "cuModuleLoadData"] == [b"\x7fELF", b"\x7fELF", b"\x7fELF2"]
    assert driver.names().count("cuLaunchKernel") == 5 and ("cuModuleGetFunction", 21, b"k_fn") in driver.calls


def test_much_shared_memory_is_opted_in() -> None:
    driver = FakeDriver()
    CudaLauncher(driver).launch(kernel(shared_bytes=48 * 1024), Launch((1, 1, 1), VALUES), 0)
    assert "cuFuncSetAttribute" not in driver.names()
    CudaLauncher(driver).launch(kernel(shared_bytes=48 * 1024 + 1), Launch((1, 1, 1), VALUES), 0)
    assert ("cuFuncSetAttribute", 31, 8, 48 * 1024 + 1) in driver.calls


def test_tensor_maps_are_encoded_once_and_passed_by_value() -> None:
    """Sizes and strides in bytes come innermost first. Three of both, which no kernel reads, follow."""
    encoded: list[tuple[Any, ...]] = []
    arguments: list[Any] = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64]
    longs, ints = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
    arguments += [longs, longs, ints, ints, *[ctypes.c_int] * 4]

    @ctypes.CFUNCTYPE(ctypes.c_int, *arguments)
    def encode(to: int, *given: Any) -> int:
        item, rank, address, sizes, strides, box, steps, *rest = given
        encoded.append((to % 64, item, rank, address, sizes[:3], strides[:2], box[:3], steps[:3], rest))
        ctypes.memset(to, 0x40 + len(encoded), 128)
        return int(address == 0xBAD)

    class MapDriver(FakeDriver):
        def cuGetProcAddress(self, name: bytes, *_: int) -> tuple[Any, ...]:
            assert name == b"cuTensorMapEncodeTiled"
            return Status.CUDA_SUCCESS, ctypes.cast(encode, ctypes.c_void_p).value, 0

        def _read(self, address: int) -> None:
            places = (ctypes.c_void_p * 10).from_address(address)
            self.parameters = [ctypes.string_at(places[1], 128), ctypes.c_int32.from_address(places[0]).value]
            assert all(places)

    driver, type_ = MapDriver(), "tensordesc<bf16[2, 32, 64],NVMMASharedLayout(swizzle_byte_width=128, rank=3)>"
    launcher, mapped = CudaLauncher(driver), kernel(arguments=(("n", "i32"), ("x", type_)), aligned=frozenset())
    other = TensorMap(0x20, (84, 7, 64), (128, 10752))
    for n, array in enumerate((TensorMap(0x10, (84, 7, 64), (128, 10752)), other, TensorMap(*other))):
        launcher.launch(mapped, Launch((1, 1, 1), {"n": n, "x": array}), 0)
        assert driver.parameters == [bytes([0x41 + min(n, 1)]) * 128, n]
    assert encoded[0] == (0, 9, 3, 0x10, [64, 7, 84], [10752, 128], [64, 32, 2], [1, 1, 1], [0, 3, 2, 0])
    assert len(encoded) == 2
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled failed: 1"):
        launcher.launch(mapped, Launch((1, 1, 1), {"n": 0, "x": TensorMap(0xBAD, *other[1:])}), 0)
    with pytest.raises(ValueError, match="x"):
        launcher.launch(mapped, Launch((1, 1, 1), {"n": 0}), 0)


def test_of_two_threads_that_encode_one_tensor_map_the_first_ones_stays() -> None:
    """The other thread's launch may still read it, while its memory would be given to something else."""
    array, type_ = TensorMap(0x10, (84, 7, 64), (128, 10752)), "tensordesc<bf16[2, 32, 64], swizzle_byte_width=128>"
    driver, addresses = FakeDriver(), list[int]()
    launcher = CudaLauncher(driver)

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def encode(to: int) -> int:
        if not addresses:  # the other thread comes between this one's question and its answer
            addresses.append(to)
            addresses.append(launcher._encode_map(type_, array))
        return 0

    driver.cuGetProcAddress = lambda *_: (Status.CUDA_SUCCESS, ctypes.cast(encode, ctypes.c_void_p).value, 0)  # type: ignore[attr-defined]
    assert launcher._encode_map(type_, array) == addresses[1] != addresses[0]


def read_config(config: Any) -> tuple[Any, ...]:
    (attribute,) = config.attrs[: config.numAttrs]
    grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
    block = (config.blockDimX, config.blockDimY, config.blockDimZ)
    allowed = (int(attribute.id), attribute.value.programmaticStreamSerializationAllowed)
    return grid, block, config.sharedMemBytes, int(config.hStream), allowed


def test_a_dependent_kernel_need_not_wait_for_the_end_of_the_one_in_front() -> None:
    driver = FakeDriver()
    CudaLauncher(driver).launch(kernel(dependent=True), Launch((5, 6, 7), VALUES), 0xBEEF)
    name, config, function, _, extra = driver.calls[-1]
    assert (name, function, extra) == ("cuLaunchKernelEx", 31, 0) and driver.parameters[:4] == [*VALUES.values()][:4]
    assert read_config(config) == ((5, 6, 7), (128, 1, 1), 1024, 0xBEEF, (6, 1))
    driver.fails["cuLaunchKernelEx"] = Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE"):
        CudaLauncher(driver).launch(kernel(dependent=True), Launch((5, 6, 7), VALUES), 0)


def test_the_drivers_own_structures_hold_such_a_launch() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="pip install cuda-bindings")
    config = dependent_config(driver, (128, 1, 1), 70_000)
    config.gridDimX, config.gridDimY, config.gridDimZ, config.hStream = 5, 6, 7, 0xBEEF
    assert read_config(config) == ((5, 6, 7), (128, 1, 1), 70_000, 0xBEEF, (6, 1))


def test_an_empty_grid_launches_nothing() -> None:
    driver = FakeDriver()
    CudaLauncher(driver).launch(kernel(), Launch((0, 3, 1), VALUES), 0)
    assert not driver.calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": 0x7F00_0000_0008}, "multiple of 16"),
        ({"stride": 8}, "multiple of 16"),
        ({"count": 1 << 31}, "does not fit i32"),
        ({"stride": 1 << 63}, "does not fit i64"),
        ({"table": -4}, "no address"),
        ({"extra": 1}, "extra"),
    ],
)
def test_arguments_that_do_not_fit_never_reach_the_driver(change: dict[str, int], message: str) -> None:
    driver = FakeDriver()
    with pytest.raises(ValueError, match=message):
        CudaLauncher(driver).launch(kernel(), Launch((1, 1, 1), {**VALUES, **change}), 0)
    with pytest.raises(ValueError, match="scale"):
        CudaLauncher(driver).launch(kernel(), Launch((1, 1, 1), {k: v for k, v in VALUES.items() if k != "scale"}), 0)
    assert not driver.calls


def test_a_machine_without_a_gpu_is_told_so() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="pip install cuda-bindings")
    try:
        ready = int(driver.cuInit(0)[0]) == 0
    except RuntimeError:
        ready = False
    if ready:
        pytest.skip("this machine has one")
    with pytest.raises(EnvironmentUnfitError, match=r"No NVIDIA driver|cannot be initialised"):
        CudaLauncher().launch(kernel(), Launch((1, 1, 1), VALUES), 0)


def test_cuda_errors_are_named() -> None:
    driver = FakeDriver()
    driver.fails["cuLaunchKernel"] = Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE"):
        CudaLauncher(driver).launch(kernel(), Launch((1, 1, 1), VALUES), 0)
    driver.fails["cuModuleLoadData"] = Status.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(EnvironmentUnfitError, match="Build the engine for this GPU"):
        CudaLauncher(driver).launch(kernel(), Launch((1, 1, 1), VALUES), 0)
    driver.context = 0
    with pytest.raises(EnvironmentUnfitError, match="No CUDA context"):
        CudaLauncher(driver).launch(kernel(), Launch((1, 1, 1), VALUES), 0)
