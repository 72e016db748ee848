"""A `CpuDevice` that is late, as a GPU is: what is put on its stream happens some time before somebody waits for it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from runtime.triton_cpu import CpuDevice
from torch.utils._python_dispatch import TorchDispatchMode

PUT = ("copy_.default", "index_copy_.default", "index_select.out")
"""What an executor asks of torch on its stream."""


class LateDevice(CpuDevice):
    """While it is `late`; at first it does all at once."""

    def __init__(self, target: str, rng: random.Random) -> None:
        super().__init__(target)
        self.late, self._doing, self._rng = False, False, rng
        self._queue: deque[Callable[[], None]] = deque()
        self._put = self._done = 0
        self._storages: set[int] = set()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = super().empty(shape, dtype)
        self._storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    def put(self, work: Callable[[], Any]) -> None:
        if self._doing or not self.late:
            work()
            return
        self._queue.append(work)
        self._put += 1
        if self._rng.random() < 0.1:
            self._advance(self._put - self._rng.randrange(12))

    def _advance(self, upto: int) -> None:
        self._doing = True
        try:
            with torch.inference_mode():
                while self._queue and self._done < upto:
                    self._done += 1
                    self._queue.popleft()()
        finally:
            self._doing = False

    def synchronize(self) -> None:
        self._advance(self._put)

    def record(self) -> Callable[[], None]:
        at = self._put
        return lambda: self._advance(at)

    def active(self) -> AbstractContextManager[object]:
        return _Stream(self)

    def has(self, *tensors: torch.Tensor) -> bool:
        """Whether one of them lies in its memory."""
        return any(t.untyped_storage().data_ptr() in self._storages for t in tensors)


class _Stream(TorchDispatchMode):
    """Inside, what torch is to do with the device's memory is put on its stream."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("out", args[0] if args else None)
        if func.__name__ in PUT and self._device.has(to, args[1] if func.__name__ == PUT[0] else to):
            self._device.put(lambda: func(*args, **kwargs))
            return to
        return func(*args, **kwargs)
