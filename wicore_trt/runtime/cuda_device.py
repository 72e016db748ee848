"""GPU as executors use it: memory, one stream, graphs.

Must not know backends or KV. Invariant: all work of an executor runs on one stream of its own, in the order of calls.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from wicore_trt.errors import EnvironmentUnfitError

ALIGNMENT = 256  # bytes; what compiled plans ask of addresses


class CudaDevice:
    """GPU `torch_device` of the architecture `target`, like "sm89"; `stream` is its CUDA stream's handle."""

    def __init__(self, name: str = "auto", backend: str = "triton") -> None:
        """Open GPU `name`: "auto", "cuda" or "cuda:1". Raises EnvironmentUnfitError, naming `backend`, without one."""
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
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
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

    def synchronize(self) -> None:
        self._stream.synchronize()

    def record(self) -> Callable[[], None]:
        """Mark the present end of the stream; calling the result waits until the stream has passed the mark."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize  # type: ignore[no-any-return]

    def with_own_graphs(self) -> CudaDevice:
        """Return the same device and stream; no graph that is captured through it shares temporaries with others."""
        found = copy.copy(self)
        found._last = lambda: None  # noqa: SLF001 -- its own
        return found

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` puts on the stream, not running it; the result runs it. The caller keeps its tensors."""
        graph, last = torch.cuda.CUDAGraph(), self._last()
        with torch.cuda.graph(graph, stream=self._stream, pool=None if last is None else last.pool()):
            work()
        self._last = weakref.ref(graph)
        return graph.replay
