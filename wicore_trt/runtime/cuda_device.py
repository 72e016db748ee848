"""GPU as executors use it: memory, one stream, graphs.

Must not know backends or KV. Invariant: all work of an executor runs on one stream of its own, in the order of calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from wicore_trt.errors import EnvironmentUnfitError

ALIGNMENT = 256  # bytes; what compiled plans ask of addresses


class Mark(Protocol):
    """Point of a stream."""

    def query(self) -> bool:
        """Tell whether the stream has passed it."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


class CudaDevice:
    """GPU `torch_device` of the architecture `target`, like "sm89"; `stream` is its CUDA stream's handle."""

    def __init__(
        self, name: str = "auto", backend: str = "triton", *, urgent: bool = False, multiprocessors: int = 0
    ) -> None:
        """Open GPU `name`: "auto", "cuda" or "cuda:1". An `urgent` stream goes before others; one of `multiprocessors`
        runs on so many (rounded up), where 0 is all. Raises EnvironmentUnfitError, naming `backend`, without such a
        GPU; RuntimeError, ImportError or AttributeError where the driver or its bindings cannot limit a stream."""
        if name == "cpu" or not torch.cuda.is_available():
            why = "executor.device is cpu" if name == "cpu" else "PyTorch finds none"
            raise EnvironmentUnfitError(
                f"An engine of backend {backend!r} runs on an NVIDIA GPU, and {why}.",
                fix="Run it where one is, or build an engine with --backend torch.",
            )
        self.torch_device = torch.device("cuda" if name == "auto" else name)
        if self.torch_device.index is None:
            self.torch_device = torch.device("cuda", torch.cuda.current_device())
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        self.target = f"sm{major}{minor}"
        self._within: Callable[[], AbstractContextManager[None]] = nullcontext
        if multiprocessors:
            self._stream, self._within = _open_limited_stream(self.torch_device, multiprocessors)
        else:
            self._stream = torch.cuda.Stream(self.torch_device, priority=-int(urgent))  # type: ignore[no-untyped-call]
        self.stream = int(self._stream.cuda_stream)
        # The graph captured last, if it is still wanted: the next one's temporaries lie where its are, since graphs run
        # one after the other.
        self._last: Callable[[], torch.cuda.CUDAGraph | None] = lambda: None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate uninitialised contiguous memory, at a multiple of ALIGNMENT: torch's allocator aligns to 512."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def staging(self, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Allocate zeros in host memory that the device can copy from and to while the host goes on."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def free_bytes(self) -> int:
        """Count bytes that `empty` can still give."""
        torch.cuda.empty_cache()
        return self.unclaimed_bytes()

    def unclaimed_bytes(self) -> int:
        """Count `free_bytes` less freed memory that the allocator keeps for the next time."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    @contextmanager
    def active(self) -> Iterator[None]:
        """Direct torch's work to `stream`, which becomes the thread's own for good. Giving the thread its stream back,
        in order, would make both wait for each other between any two steps."""
        caller = torch.cuda.current_stream(self.torch_device)
        if caller != self._stream:
            self._stream.wait_stream(caller)
            torch.cuda.set_stream(self._stream)
        yield

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Direct torch's work to `stream` for a while. It is in no order with the caller's stream, which comes back."""
        with self._within(), torch.cuda.stream(self._stream):
            yield

    def synchronize(self) -> None:
        self._stream.synchronize()

    def record(self) -> Callable[[], None]:
        """Mark the present end of the stream; calling the result waits until the stream has passed the mark."""
        return self.mark().synchronize

    def mark(self) -> Mark:
        """Mark the present end of the stream."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event  # type: ignore[no-any-return]

    def wait_for(self, mark: Mark) -> None:
        """Let what is put on the stream from now on wait until another stream has passed `mark`."""
        self._stream.wait_event(mark)  # type: ignore[arg-type]

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` puts on the stream, without running it; calling the result runs it. The caller keeps all
        memory that it uses."""
        graph, last = torch.cuda.CUDAGraph(), self._last()
        with torch.cuda.graph(graph, stream=self._stream, pool=None if last is None else last.pool()):
            work()
        self._last = weakref.ref(graph)
        return graph.replay


def _open_limited_stream(
    device: torch.device, multiprocessors: int
) -> tuple[torch.cuda.Stream, Callable[[], AbstractContextManager[None]]]:
    """Open a stream of a green context, which never ends (CUDA driver API, "Green Contexts"; driver 550 or later).
    Return it with what makes that context the thread's own for a while, as `torch.cuda.green_contexts` does."""
    from cuda.bindings import driver

    def check(returned: Any) -> Any:
        error, *found = returned
        if int(error):
            raise RuntimeError(f"the CUDA driver limits no stream: {error}")
        return found[0] if found else None

    card = check(driver.cuDeviceGet(device.index))
    whole = check(driver.cuDeviceGetDevResource(card, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    part = check(driver.cuDevSmResourceSplitByCount(1, whole, 0, multiprocessors))
    flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = check(driver.cuGreenCtxCreate(check(driver.cuDevResourceGenerateDesc(part, 1)), card, flag))
    stream = check(driver.cuGreenCtxStreamCreate(green, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
    context = check(driver.cuCtxFromGreenCtx(green))

    @contextmanager
    def work_within() -> Iterator[None]:
        check(driver.cuCtxPushCurrent(context))
        try:
            yield
        finally:
            check(driver.cuCtxPopCurrent())

    return torch.cuda.ExternalStream(int(stream), device), work_within  # type: ignore[no-untyped-call]
