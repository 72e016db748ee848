"""Streams of a GPU as the page copier uses them: work in order within a lane, events between lanes, pinned memory.

Everything of page copies that only a GPU can do is here; it must not know pages or steps. Invariant: what a lane is
given runs in the order in which it was given, and not before the events that the lane was told to wait for.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

import torch

log = logging.getLogger(__name__)


class Event(Protocol):
    """A point in a lane."""

    def synchronize(self) -> None:
        """Sleep until the lane has come here. Any thread may."""


class Lane(Protocol):
    """A queue of work that runs beside other lanes."""

    def record(self) -> Event:
        """The point behind all that was given so far."""

    def wait(self, event: Event) -> None:
        """What is given from now on starts after `event`."""

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy bytes: (target, source) pairs of equal length, one on the device and one in host memory. Host memory
        that is not pinned is right but slow, and the call then waits."""


class CudaLane:
    """Implements `Lane` on a CUDA stream."""

    def __init__(self, device: torch.device, stream: int | None = None) -> None:
        """`stream`: the handle of one that is there (0: the default stream), in place of a new one."""
        if stream is None:
            self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        elif stream:
            self._stream = torch.cuda.ExternalStream(stream, device)  # type: ignore[no-untyped-call]
        else:
            self._stream = torch.cuda.default_stream(device)

    def record(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)


class CudaHostMemory:
    """Host memory that the GPU may reach by itself. `pin` and `unpin_all` come from one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: list[memoryview] = []

    def pin(self, memory: memoryview) -> bool:
        """Lock writable memory, so that copies run at the bus's speed beside the host. False, with a warning, where the
        system refuses; then copies pass through the driver's own buffers."""
        begun = time.perf_counter()
        status = int(torch.cuda.cudart().cudaHostRegister(_address(memory), memory.nbytes, 0))  # type: ignore
        if status:
            with suppress(RuntimeError):  # the next kernel would report this error as its own
                torch.zeros(1, device=self._device)
            log.warning("%d bytes of host memory were not pinned (CUDA error %d): slow copies", memory.nbytes, status)
            return False
        self._pinned.append(memory)
        log.info("pinned %d bytes of host memory in %.1f s", memory.nbytes, time.perf_counter() - begun)
        return True

    def unpin_all(self) -> None:
        """Only when no copy is under way."""
        for memory in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(_address(memory))  # type: ignore[no-untyped-call]
        self._pinned = []


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
