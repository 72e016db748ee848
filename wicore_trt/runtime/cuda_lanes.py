"""Streams of a GPU for the page copier: work in order within a lane, events between lanes, pinned memory.

Holds everything of page copies that needs a GPU; must not know pages or steps. Invariant: a lane's work runs in the
order of calls, and not before events that the lane was told to wait for.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from wicore_trt.plugins.aot import CompiledKernel
from wicore_trt.plugins.cpu_library import open_library
from wicore_trt.plugins.launch import SHARED_LAUNCHER
from wicore_trt.plugins.step_layout import page_digest_launch
from wicore_trt.runtime.page_digest import PageDigest

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context
BATCHES = 64  # of digests, whose memory is taken at once
log = logging.getLogger(__name__)


class CudaEvent:
    """Point behind all work that a stream has so far."""

    def __init__(self, stream: Any) -> None:
        self.event: Any = torch.cuda.Event(blocking=True, enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def synchronize(self) -> None:
        """Sleep until the stream has passed this point. Any thread may."""
        self.event.synchronize()

    def seconds_after(self, earlier: CudaEvent) -> float:
        """Measure the time between two points of one stream that it has passed."""
        return float(earlier.event.elapsed_time(self.event)) / 1e3


def copy_all(memcpy: Any) -> Callable[[Sequence[tuple[int, int, int]], int], int]:
    """Make a call that puts copies (target, source, bytes) on a stream by `memcpy`, cuMemcpyAsync of ctypes. It returns
    the first status that is not 0. `memcpy` waits while the driver's queue is full; one call of the library for all
    copies lets other threads run meanwhile, and take turns once."""
    address, library = ctypes.cast(memcpy, ctypes.c_void_p), open_library()
    if library is None:
        memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

        def one_by_one(pieces: Sequence[tuple[int, int, int]], stream: int) -> int:
            return next((status for piece in pieces if (status := int(memcpy(*piece, stream)))), 0)

        return one_by_one
    call: Any = library.wicore_cpu_copy_all
    call.argtypes = (*(ctypes.c_void_p,) * 4, ctypes.c_int64, ctypes.c_void_p)

    def together(pieces: Sequence[tuple[int, int, int]], stream: int) -> int:
        columns = ((ctypes.c_uint64 * len(pieces))(*column) for column in zip(*pieces, strict=True))
        return int(call(address, *columns, len(pieces), stream))

    return together


class CudaLane:
    """Queue of work that runs beside other lanes."""

    def __init__(self, device: torch.device, stream: int | None = None) -> None:
        """Make a stream, or take the one with the handle `stream` (0: the default stream)."""
        if stream is None:
            self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        elif stream:
            self.stream = torch.cuda.ExternalStream(stream, device)  # type: ignore[no-untyped-call]
        else:
            self.stream = torch.cuda.default_stream(device)
        self._copy_all = copy_all(ctypes.CDLL("libcuda.so.1").cuMemcpyAsync)

    def record(self) -> CudaEvent:
        return CudaEvent(self.stream)

    def wait(self, event: CudaEvent) -> None:
        """Start later work after `event`."""
        self.stream.wait_event(event.event)

    def copy(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Copy (target, source, bytes) between device addresses and host addresses, whose memory the caller keeps. Host
        memory that is not pinned is right but slow, and the call then waits."""
        with torch.cuda.stream(self.stream):  # its device's context is this thread's, whichever the caller had
            status = self._copy_all(list(pieces), int(self.stream.cuda_stream))
        if status:
            raise RuntimeError(f"cuMemcpyAsync failed with CUDA error {status}")


class _Scratch:
    """Memory for one batch of digests, each array 4 * `pages` int64; `asked` and `found` are pinned, `words` on the
    device. For n pages an array holds n places in words, n lengths and n sums of two words."""

    def __init__(self, asked: torch.Tensor, words: torch.Tensor, found: torch.Tensor) -> None:
        self.asked, self.words, self.found = asked, words, found
        self.numbers = asked.numpy()


OnDevice = Callable[[torch.Tensor], object]


class StartDigests(Protocol):
    """Computes digests on a lane; call the result once that has passed this point. `first` may launch work before,
    given the pages' places from `base` in words, int64 [pages]; `then` behind, given the digests, int64 [pages, 2]."""

    def __call__(
        self, lane: CudaLane, first: OnDevice | None = None, then: OnDevice | None = None
    ) -> Callable[[], list[bytes]]: ...


class CudaDigests:
    """Digests of pages in memory behind `base`, by `kernels.page_digest`; any thread may reuse the scratch. Scratch is
    allocated ahead: pinning memory while copies run stops the driver for a tenth of a second."""

    def __init__(self, kernel: CompiledKernel, digest: PageDigest, base: int, device: torch.device, pages: int) -> None:
        self._kernel, self._second_pairs, self._base, self._device = kernel, digest.second_pairs, base, device
        self._key = torch.from_numpy(digest.words.view("<i4")).to(device)
        self._pages = pages
        self._free: deque[_Scratch] = deque()
        self._add_scratch()

    def _add_scratch(self) -> None:
        shape = (BATCHES, 4 * self._pages)
        asked, found = (torch.empty(shape, dtype=torch.int64, pin_memory=True) for _ in range(2))
        words = torch.empty(shape, dtype=torch.int64, device=self._device)
        self._free.extend(map(_Scratch, asked, words, found))

    def ask(self, lane: CudaLane, pages: Sequence[tuple[int, int]]) -> StartDigests:
        """Put places and sizes of pages (address, bytes) on the device: before copies of pages on this lane, because
        the bus takes one copy after the other. The result takes their digests, on this lane or one behind it."""
        count = len(pages)
        assert count <= self._pages
        try:
            scratch = self._free.popleft()
        except IndexError:
            self._add_scratch()
            scratch = self._free.popleft()
        scratch.numbers[:count] = [(address - self._base) // 4 for address, _ in pages]
        scratch.numbers[count : 2 * count] = [nbytes // 4 for _, nbytes in pages]
        scratch.numbers[2 * count : 4 * count] = 0
        with torch.cuda.stream(lane.stream):
            scratch.words[: 4 * count].copy_(scratch.asked[: 4 * count], non_blocking=True)
        return partial(self._start, scratch, count, max(nbytes for _, nbytes in pages))

    def _start(
        self,
        scratch: _Scratch,
        count: int,
        most_bytes: int,
        lane: CudaLane,
        first: OnDevice | None = None,
        then: OnDevice | None = None,
    ) -> Callable[[], list[bytes]]:
        words, sums = scratch.words, scratch.words[2 * count : 4 * count]
        with torch.cuda.stream(lane.stream):
            if first is not None:
                first(words[:count])
            arrays = {
                "memory": self._base, "offsets": words.data_ptr(), "lengths": words[count:].data_ptr(),
                "key": self._key.data_ptr(), "sums": sums.data_ptr(),
            }  # fmt: skip
            call = page_digest_launch(arrays, count, most_bytes, self._second_pairs)
            SHARED_LAUNCHER.launch(self._kernel, call, int(lane.stream.cuda_stream))
            if then is not None:
                then(sums.view(count, 2))
            scratch.found[: 2 * count].copy_(sums, non_blocking=True)

        def digests() -> list[bytes]:
            found = scratch.found[: 2 * count].numpy().tobytes()
            self._free.append(scratch)  # the lane has passed
            return [found[at : at + 16] for at in range(0, len(found), 16)]

        return digests


class CudaHostMemory:
    """Host memory that the GPU may reach by itself. Any thread may `pin`."""

    def __init__(self, device: torch.device) -> None:
        self._pinned: list[memoryview] | None = []
        self._lock = threading.Lock()
        self._library: Any = ctypes.CDLL("libcuda.so.1")  # its calls let other threads run
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # there is a context now
            self._context = ctypes.c_void_p()
            self._library.cuCtxGetCurrent(ctypes.byref(self._context))
        self._library.cuMemHostRegister_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._library.cuMemHostUnregister.argtypes = (ctypes.c_void_p,)

    def pin(self, memory: memoryview) -> bool:
        """Lock writable memory, so that copies run at the bus's speed beside the host. Returns False, with a warning,
        where the system refuses; copies then pass through the driver's own buffers."""
        begun = time.perf_counter()
        self._library.cuCtxSetCurrent(self._context)
        status = int(self._library.cuMemHostRegister_v2(host_address(memory), memory.nbytes, _PORTABLE))
        if status:
            log.warning("%d bytes of host memory were not pinned (CUDA error %d): slow copies", memory.nbytes, status)
            return False
        log.debug("pinned %d bytes of host memory in %.1f s", memory.nbytes, time.perf_counter() - begun)
        with self._lock:
            if self._pinned is not None:
                self._pinned.append(memory)
                return True
        self._library.cuMemHostUnregister(host_address(memory))
        return False

    def unpin_all(self) -> None:
        """Unpin everything, for good. No copy may be under way."""
        with self._lock:
            pinned, self._pinned = self._pinned, None
        for memory in pinned or ():
            self._library.cuMemHostUnregister(host_address(memory))


def host_address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
