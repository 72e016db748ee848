"""Blocks of weights that share a scale, as GGUF publishes them: taken apart without a change, or made by its rule.

Knows layouts, neither names nor files. Invariant: scales and values taken from a file's blocks are that file's bits, so
its bytes can be made from them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from wicore_trt.weight_format import Q4_0

GROUP = Q4_0.group
_TINY = np.float32(3e-39)  # the reciprocal of less is infinite; float16 makes 0 of it


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a weight [rows, in] in the storage of `weight_format.LAYOUTS`: `values` uint8 [rows, in / 2] of nibbles
    or int8 [rows, in], `scales` float16 or float32 [rows, in / group], `minimums` float16 as `scales`, or None."""

    values: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None = None

    @property
    def parts(self) -> list[np.ndarray]:
        """Values, scales and minimums, as they follow one another in a file."""
        return [self.values, self.scales, *([] if self.minimums is None else [self.minimums])]

    def add_minimums(self) -> Blocks:
        """Return the same weights with minimums: -8 d, which float16 holds exactly or as an infinity."""
        with np.errstate(over="ignore"):
            return self if self.minimums is not None else replace(self, minimums=self.scales * np.float16(-8))

    def to_float32(self) -> np.ndarray:
        """Compute the weights, float32 [rows, in]: d * (q - 8) and d * q are exact, d * q + m is rounded once."""
        scales = self.scales.astype(np.float32)[:, :, None]
        if self.values.dtype == np.int8:
            values = self.values.reshape(*self.scales.shape, -1).astype(np.float32)
        else:
            bytes_ = self.values.reshape(*self.scales.shape, GROUP // 2)
            values = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=2).astype(np.float32)
            if self.minimums is None:
                values -= np.float32(8)
        with np.errstate(invalid="ignore", over="ignore"):  # scales are checked where they are read
            values *= scales
            if self.minimums is not None:
                values += self.minimums.astype(np.float32)[:, :, None]
        return values.reshape(len(values), -1)


def _split_q4(raw: np.ndarray, head: int) -> Blocks:
    """Split Q4_0 (`head` 2 bytes: d) or Q4_1 (4: d, m) blocks, uint8 [rows, blocks * (head + 16)]."""
    blocks = raw.reshape(len(raw), -1, head + GROUP // 2)
    scales = np.ascontiguousarray(blocks[..., :head]).view(np.float16)
    values = np.ascontiguousarray(blocks[..., head:]).reshape(len(raw), -1)
    return Blocks(values, scales[..., 0].copy(), scales[..., 1].copy() if head == 4 else None)


def _split_q8_0(raw: np.ndarray) -> Blocks:
    blocks = raw.reshape(len(raw), -1, 2 + GROUP)
    values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return Blocks(values.reshape(len(raw), -1), np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].copy())


def _split_q6_k(raw: np.ndarray) -> Blocks:
    """Split Q6_K blocks of 256: 128 bytes of low nibbles, 64 of upper bit pairs, int8 [16] scales, d (ggml-quants.c,
    dequantize_row_q6_K). Values are int8 -32..31, scales d * scale, exact in float32."""
    blocks = raw.reshape(len(raw), -1, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64) >> np.array([[0], [4]], np.uint8)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    values = (low & 15).reshape(*blocks.shape[:2], 256) | ((high & 3) << 4).reshape(*blocks.shape[:2], 256)
    d = np.ascontiguousarray(blocks[..., 208:]).view(np.float16).astype(np.float32)
    scales = d * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    return Blocks((values.astype(np.int8) - np.int8(32)).reshape(len(raw), -1), scales.reshape(len(raw), -1))


def _widen_q4_0(raw: np.ndarray) -> Blocks:
    """Return Q4_0 blocks as those of Q8_0, with q - 8 for values."""
    blocks = _split_q4(raw, 2)
    nibbles = blocks.values.reshape(*blocks.scales.shape, GROUP // 2)
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).view(np.int8) - np.int8(8)
    return Blocks(values.reshape(len(raw), -1), blocks.scales)


def join_q4_0(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Join int8 [rows, in] of -8..7 and float16 [rows, in / 32] to GGUF's Q4_0 blocks, uint8 [rows, bytes]."""
    nibbles = (values + np.int8(8)).view(np.uint8).reshape(*scales.shape, GROUP)
    packed = nibbles[..., : GROUP // 2] | nibbles[..., GROUP // 2 :] << 4
    return np.concatenate([scales[..., None].view(np.uint8), packed], axis=2).reshape(len(values), -1)


LINEAR_BLOCKS: dict[str, Callable[[np.ndarray], Blocks]] = {
    "Q4_0": lambda raw: _split_q4(raw, 2),
    "Q4_1": lambda raw: _split_q4(raw, 4),
}
"""Kinds of GGUF blocks that a linear of a q4_0 engine keeps, and how rows of their bytes are split."""
HEAD_BLOCKS: dict[str, tuple[str, Callable[[np.ndarray], Blocks]]] = {
    "Q8_0": ("q8_0", _split_q8_0),
    "Q4_0": ("q8_0", _widen_q4_0),
    "Q6_K": ("q6_k", _split_q6_k),
}
"""Kinds of GGUF blocks that embedding and head keep, the storage that they get, and how they are split."""


def quantize_q4_0(weights: np.ndarray) -> Blocks:
    """Quantize float32 [rows, in] by llama.cpp's reference rule (ggml-quants.c, quantize_row_q4_0_ref): d is the value
    of largest magnitude / -8, q is x * (1 / d) + 8.5, each rounded to float32, cut off at 15. d is stored in float16;
    an infinite one is the caller's to refuse."""
    blocks = weights.reshape(len(weights), -1, GROUP)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[..., None], axis=2)
    d = largest / np.float32(-8)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(np.abs(d) < _TINY, np.float32(0), np.float32(1) / d)
        values = np.minimum((blocks * inverse + np.float32(8.5)).astype(np.uint8), 15)
        scales = d[..., 0].astype(np.float16)
    packed = values[..., : GROUP // 2] | values[..., GROUP // 2 :] << 4
    return Blocks(packed.reshape(len(weights), -1), scales)


def fits_bfloat16(block: np.ndarray) -> bool:
    """Tell whether bfloat16 holds each value of a float16 `block` exactly."""
    return not (block.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF)).any()


def dequantize_parts(parts: list[np.ndarray]) -> np.ndarray:
    """Compute the weights, float32 [rows, in], of the `parts` of a weight as a checkpoint stores them."""
    values, scales, *more = parts
    return Blocks(values, scales, *more).to_float32()
