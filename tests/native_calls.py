"""Has the native threads of a disk store make a test's own system calls, so that each fault meets them, too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char, c_int64
from typing import Any

from wicore_trt.kv.disk.files import Files


class _Buffer(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_CALL = CFUNCTYPE(c_int64, c_int64, POINTER(_Buffer), c_int64, c_int64)
_kept: list[Any] = []


def calls_of(files: Files) -> tuple[Any, Any]:
    """In place of `native.find_calls`: those of any `files`, whatever they do."""
    calls = _CALL(_make_call(lambda *args: files.preadv(*args))), _CALL(_make_call(lambda *args: files.pwritev(*args)))
    _kept.append(calls)
    return calls


def _make_call(call: Callable[..., int]) -> Callable[..., int]:
    def run(fd: int, buffers: Any, count: int, offset: int) -> int:
        views = [memoryview((c_char * b.length).from_address(b.start)).cast("B") for b in buffers[:count]]
        try:
            return call(fd, views, offset)
        except OSError as error:
            return -(error.errno or 5)

    return run
