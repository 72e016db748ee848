"""Digest of a KV page's bytes, by which every tier knows that no bit of them changed.

CPU and GPU compute the same 128 bits (`plugins/cpu`, `plugins/kernels/page_digest.py`, else numpy). Must not know tiers
or what a page holds. Invariant: equal bytes and key give equal digests. Two different pages of one length, made without
knowledge of the key, have equal digests with a chance of at most 2^-63.

The function is NH of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway, CRYPTO 1999; RFC 4418), two Toeplitz iterations,
two levels. Words are 32 bits, little endian. A chunk of 1,024 words m has, for iteration t in {0, 1},

    s[t] = sum over i < 512 of ((m[i] + a[i + t]) mod 2^32) ((m[512 + i] + b[i + t]) mod 2^32)   mod 2^64

with the key's words a, b [513]; the last chunk is filled with zeros. The halves of its two sums, low half first, are
two pairs (x, y) of the second level's message. The digest is the two sums of that level, with a key of its own:

    d[t] = sum over pairs j of ((x[j] + c[j + t]) mod 2^32) ((y[j] + e[j + t]) mod 2^32)         mod 2^64

Each level maps different messages to equal sums with a chance of at most 2^-64 (theorem 2 there: 2^-32 an iteration).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from hashlib import shake_256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wicore_trt.arithmetic import div_ceil
from wicore_trt.plugins.cpu_library import open_library

KEY_BYTES = 32
PAIRS = 512
CHUNK_BYTES = 8 * PAIRS
_BLOCK = 64  # chunks that numpy works on at a time, so that they stay in the cache

Words = NDArray[np.uint32]


class _Arguments(ctypes.Structure):
    """wicore_page_digest of wicore_cpu.h."""

    _fields_ = [
        ("parts", ctypes.c_int64),
        ("second_pairs", ctypes.c_int64),
        ("starts", ctypes.POINTER(ctypes.c_void_p)),
        ("lengths", ctypes.POINTER(ctypes.c_int64)),
        ("key", ctypes.c_void_p),
        ("out", ctypes.POINTER(ctypes.c_uint64)),
    ]


class PageDigest:
    """Digests under one key of pages of at most `page_bytes`. `words`: the key's a, b [513], c, e [`second_pairs`]."""

    def __init__(self, key: bytes, page_bytes: int) -> None:
        assert len(key) == KEY_BYTES
        self.second_pairs = 2 * div_ceil(page_bytes, CHUNK_BYTES) + 1
        count = 2 * (PAIRS + 1) + 2 * self.second_pairs
        # NH wants words that are as good as random
        self.words: Words = np.frombuffer(shake_256(b"wicore-kv-digest" + key).digest(4 * count), "<u4").copy()
        self._library = _library()

    def compute_digest(self, parts: Sequence[memoryview]) -> bytes:
        """Compute 16 bytes, on any thread, for a page in `parts`: multiples of 4,096 bytes, and the last one of 4."""
        sizes = [part.nbytes for part in parts]
        assert not sum([size % CHUNK_BYTES for size in sizes[:-1]]) and sizes[-1] % 4 == 0
        arrays = [np.frombuffer(part, np.uint8) for part in parts]
        if self._library is None:
            return self._digest_by_numpy(arrays)
        count, out = len(arrays), (ctypes.c_uint64 * 2)()
        starts = (ctypes.c_void_p * count)(*[array.ctypes.data for array in arrays])
        lengths = (ctypes.c_int64 * count)(*sizes)
        arguments = _Arguments(count, self.second_pairs, starts, lengths, self.words.ctypes.data, out)
        self._library.wicore_cpu_page_digest(ctypes.byref(arguments))
        return bytes(out)

    def _digest_by_numpy(self, arrays: list[NDArray[np.uint8]]) -> bytes:
        sums = [self._sum_chunks(_pad_words(array)) for array in arrays]
        message = np.concatenate(sums).view("<u4").reshape(-1, 2)
        x, y = message[:, 0], message[:, 1]
        c, e = self.words[2 * (PAIRS + 1) :].reshape(2, -1)
        pairs = len(message)
        digest = [_sum_nh(x, y, c[t : t + pairs], e[t : t + pairs], axis=0) for t in (0, 1)]
        return np.array(digest, "<u8").tobytes()

    def _sum_chunks(self, message: Words) -> NDArray[np.uint64]:
        """Compute both iterations' sums, [chunks, 2]."""
        a, b = self.words[: 2 * (PAIRS + 1)].reshape(2, -1)
        found = np.empty((len(message), 2), "<u8")
        for at in range(0, len(message), _BLOCK):
            block = message[at : at + _BLOCK]
            for t in (0, 1):
                found[at : at + _BLOCK, t] = _sum_nh(
                    block[:, :PAIRS], block[:, PAIRS:], a[t : t + PAIRS], b[t : t + PAIRS], axis=1
                )
        return found


def _sum_nh(x: Words, y: Words, key_x: Words, key_y: Words, *, axis: int) -> Any:
    return np.multiply(x + key_x, y + key_y, dtype=np.uint64).sum(axis=axis, dtype=np.uint64)


def _pad_words(array: NDArray[np.uint8]) -> Words:
    missing = -array.nbytes % CHUNK_BYTES
    if missing:
        array = np.concatenate([array, np.zeros(missing, np.uint8)])
    return array.view("<u4").reshape(-1, 2 * PAIRS)


@cache
def _library() -> Any:
    library = open_library()
    if library is not None:
        library.wicore_cpu_page_digest.argtypes = [ctypes.POINTER(_Arguments)]
        library.wicore_cpu_page_digest.restype = None
    return library
