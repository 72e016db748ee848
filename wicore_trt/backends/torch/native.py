"""Binding of libwicore_cpu, the native CPU kernels (plugins/cpu), by ctypes: loading, packing, running.

Must not know the model. Invariant: a call drops the GIL while its commands run, and the library serializes calls of
several threads. native_args makes the operators' arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from wicore_trt.backends.torch.native_args import Args, PackedWeight, check_address, find_format
from wicore_trt.cores import count_cores
from wicore_trt.plugins.cpu_library import library_name, open_library

ISAS = ("avx512bf16", "avx2", "generic")


class _Command(ctypes.Structure):
    _fields_ = [("op", c_int64), ("args", c_void_p)]


class NativeLibrary:
    """Loaded library. Threads and instruction set belong to the process, not to an object."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        lib.wicore_cpu_set_threads.argtypes = [c_int64]
        lib.wicore_cpu_set_threads.restype = None
        lib.wicore_cpu_set_isa.argtypes = [c_char_p]
        lib.wicore_cpu_isa.restype = c_char_p
        lib.wicore_cpu_run.argtypes = [POINTER(_Command), c_int64]
        lib.wicore_cpu_run.restype = c_int
        lib.wicore_cpu_packed_bytes.argtypes = [c_int64] * 3
        lib.wicore_cpu_packed_bytes.restype = c_int64
        lib.wicore_cpu_pack.argtypes = [*[c_void_p] * 4, *[c_int64] * 3]
        lib.wicore_cpu_pack.restype = None
        self._lib = lib

    @property
    def isa(self) -> str:
        """Instruction set in use: "avx512bf16", "avx2" or "generic"."""
        return bytes(self._lib.wicore_cpu_isa()).decode()

    @property
    def name(self) -> str:
        return library_name(self._lib)

    def set_isa(self, name: str) -> bool:
        """Use another instruction set ("auto": the best one). False, and no change, if this machine lacks it."""
        return int(self._lib.wicore_cpu_set_isa(name.encode())) == 0

    def set_threads(self, threads: int) -> None:
        """Set the threads that run a step, the calling one included."""
        assert threads >= 1
        self._lib.wicore_cpu_set_threads(threads)

    def run(self, steps: Sequence[Args]) -> ctypes.Array[_Command]:
        """Run operators in order, in one call that does not hold the GIL. Returns them for `run_again`."""
        commands = (_Command * len(steps))(*(_Command(args.OP, ctypes.addressof(args)) for args in steps))
        self.run_again(commands)
        return commands

    def run_again(self, commands: ctypes.Array[_Command]) -> None:
        """Run what `run` returned; the arguments live on and may have changed."""
        status = self._lib.wicore_cpu_run(commands, len(commands))
        assert status == 0, "unknown operator"

    def pack(
        self,
        matrix: torch.Tensor,
        scales: torch.Tensor | None = None,
        minimums: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> PackedWeight:
        """Pack a matrix [n, k] for operands of the engine's `dtype`, the matrix's own where it is None. Inputs are only
        read. An E4M3 one needs scales float32 [n] and becomes bfloat16, which holds its values exactly. Codes in
        groups, as `native_args.find_format` tells them apart, have scales and minimums [n, groups]."""
        code = find_format(matrix, scales, minimums)
        per_row = None
        if matrix.dtype == torch.float8_e4m3fn:
            assert scales is not None
            matrix, per_row, scales = matrix.bfloat16(), scales.float().reshape(-1).contiguous(), None
        n, k = matrix.shape[0], matrix.shape[1] * (2 if matrix.dtype == torch.uint8 else 1)
        data = (torch.zeros if n % 64 or k % 2 else torch.empty)(
            self._lib.wicore_cpu_packed_bytes(n, k, code), dtype=torch.uint8
        )
        sources = [None if t is None else t.contiguous() for t in (matrix, scales, minimums)]
        addresses = [None if t is None else check_address(t, t.dtype) for t in sources]
        self._lib.wicore_cpu_pack(data.data_ptr(), *addresses, n, k, code)
        return PackedWeight(data, n, k, dtype or matrix.dtype, code, per_row)


def load_library(path: Path | None = None) -> NativeLibrary | None:
    """Load the library of this package (or at `path`), set to all cores the process may use. Never raises. Returns None
    when it was not built or does not fit."""
    lib = open_library(path)
    if lib is None:
        return None
    library = NativeLibrary(lib)
    library.set_threads(count_cores())
    return library
