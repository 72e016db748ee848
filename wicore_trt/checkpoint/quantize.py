"""Cast between the number formats of checkpoints, in numpy alone.

BF16 is its bits in uint16 and E4M3 its bits in uint8. Casts round to nearest, ties to even. Format tags are those of
safetensors: F32, F16, BF16, F8_E4M3. Must not know names or files. Invariant: a cast to the format that the values
already have returns the same bits.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from wicore_trt.arithmetic import div_ceil
from wicore_trt.errors import CheckpointError

E4M3_MAX = 448.0
SCALE_FACTORS = np.exp2(np.arange(16) / 16).astype(np.float32)
SEARCH_COLUMNS = 1024  # longer rows are judged by an even sample, which bounds the search to a few casts
FLOATS = ("F32", "F16", "BF16")
STORAGE = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F8_E4M3": np.uint8, "U8": np.uint8, "I8": np.int8}


def to_float32(block: np.ndarray, tag: str) -> np.ndarray:
    """Convert a block stored as `tag` (F32, F16 or BF16 bits) to float32 of the same shape."""
    if tag == "F32":
        return block
    if tag == "F16":
        return block.astype(np.float32)
    if tag == "BF16":
        return (block.astype(np.uint32) << np.uint32(16)).view(np.float32)
    raise CheckpointError(f"Weights stored as {tag} cannot be read.", fix="Use a BF16, F16 or F32 source.")


def from_float32(block: np.ndarray, tag: str) -> np.ndarray:
    """Convert float32 values to the storage of `tag`: F32, F16 (overflow becomes infinity) or BF16 bits."""
    if tag == "F32":
        return block
    if tag == "F16":
        with np.errstate(over="ignore"):
            return block.astype(np.float16)
    assert tag == "BF16", tag
    bits = np.ascontiguousarray(block, dtype=np.float32).view(np.uint32)
    rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():  # a NaN's payload must not carry over into the exponent
        rounded[nan] = bits[nan] | np.uint32(0x00400000)
    return (rounded >> np.uint32(16)).astype(np.uint16)


# FP8 weights are E4M3 (no infinities, largest 448; arXiv:2209.05433) with one float32 scale per output channel:
# `weight[o, i] ~= e4m3[o, i] * scale[o]`. The scale is max(abs(row)) / 448 times the factor in [1, 2) with the least
# squared rounding error of the row, and 1 for a row of zeros. A factor moves the grid within a binade, where rounding
# differs by up to 2; beyond 2 the grid repeats, below 1 the largest weight would saturate.
def quantize_e4m3_per_channel(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize w [out, in] float32 to (E4M3 bits uint8 [out, in], scales float32 [out]).
    The quotient w / scale is taken in float32, saturates at +-448 and rounds to nearest even. Raises CheckpointError
    when w is not finite. torch reads the result as `torch.from_numpy(q).view(torch.float8_e4m3fn)`."""
    amax = np.abs(w).max(axis=1)
    if not np.isfinite(amax).all():
        raise CheckpointError("A weight to quantize is not finite.")
    scale = _best_scale(w, amax)
    return e4m3_bits(w / scale[:, None]), scale


def _best_scale(w: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """Return amax / 448 [out] times the factor of least squared error per row; the smaller factor on a tie.
    Errors are measured on rows brought to an amax in [1, 4) by a power of two. This changes no bit of a quotient,
    and keeps squares of very large and very small rows inside of float32."""
    smallest = (amax / np.float32(E4M3_MAX)).astype(np.float32)
    with np.errstate(over="ignore"):  # the largest float32 / 448 rounds up
        smallest = np.where(np.isinf(smallest * np.float32(E4M3_MAX)), np.nextafter(smallest, np.float32(0)), smallest)
    shift = np.clip(1 - np.frexp(amax)[1], -126, 126).astype(np.int32)
    unit = np.ldexp(np.float32(1.0), shift)  # a power of two, exact in float32
    sample = w[:, :: div_ceil(w.shape[1], SEARCH_COLUMNS)] * unit[:, None]
    values, best = e4m3_values(), np.ones_like(smallest)
    rounded = values[_e4m3_table()]  # what each upper half of a float32 becomes: one look-up in place of two
    least = np.full(len(w), np.inf, np.float32)
    for factor in SCALE_FACTORS:
        scale = smallest * factor
        near = scale * unit  # of a subnormal scale its own bits, so that it is judged as it will be used
        near[scale == 0] = 1.0
        error = ((rounded.take(_upper_half(sample / near[:, None])) * near[:, None] - sample) ** 2).sum(axis=1)
        with np.errstate(over="ignore"):  # rounding up may take the largest weight beyond float32
            finite = np.isfinite(values[e4m3_bits(amax * unit / near)] * scale)
        better = (error < least) & (scale != 0) & finite
        best[better], least[better] = scale[better], error[better]
    return best


def find_bad_row(block: np.ndarray, tag: str) -> int | None:
    """Find the first row of a block stored as `tag` (F32, F16 or BF16 bits) with an infinity or a NaN, or None.
    As integers those are the largest values of either sign, so two maxima find them without a copy."""
    bits, signed, top = {
        "F32": (np.uint32, np.int32, 0x7F800000),
        "F16": (np.uint16, np.int16, 0x7C00),
        "BF16": (np.uint16, np.int16, 0x7F80),
    }[tag]
    whole, sign = block.view(bits), 1 << (8 * block.itemsize - 1)
    if whole.size == 0 or (int(whole.max()) < sign + top and int(block.view(signed).max()) < top):
        return None
    wrong = (whole & (sign - 1)) >= top
    return int(np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))[0])


def count_flushed(values: np.ndarray, stored: np.ndarray) -> int:
    """Count float32 `values` that are not 0 but became 0 in `stored`, F16 values or E4M3 bits."""
    bits = stored.view(np.uint8) if stored.itemsize == 1 else stored.view(np.uint16)
    zeros = stored.size - int(np.count_nonzero(bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)))
    return zeros - (values.size - int(np.count_nonzero(values)))


def count_rounded(values: np.ndarray, stored: np.ndarray, tag: str) -> int:
    """Count float32 `values` that lost bits in `stored` below the smallest normal number of `tag` (F16 or BF16).
    Values that became 0 are not counted."""
    bits, exponent, sign = stored.view(np.uint16), {"F16": 0x7C00, "BF16": 0x7F80}[tag], 0x8000
    small = ((bits & exponent) == 0) & ((bits & (sign - 1)) != 0)
    return int((to_float32(stored[small], tag) != values[small]).sum()) if small.any() else 0


def e4m3_bits(x: np.ndarray) -> np.ndarray:
    """Cast float32 values to E4M3 bits (uint8, same shape), saturating; NaN becomes 0x7F.
    The cast is one look-up in a table of 65,536 entries. Rounding to 3 mantissa bits depends only on the upper 16
    bits of a float32 and a sticky lowest bit for the bits cut off."""
    return _e4m3_table().take(_upper_half(x))


def _upper_half(x: np.ndarray) -> np.ndarray:
    """Return indices of float32 values in a table of upper halves, of the type with the fastest look-ups."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return np.asarray((bits >> np.uint32(16)) | ((bits & np.uint32(0xFFFF)) != 0), np.intp)


def e4m3_values() -> np.ndarray:
    """Return the value of every E4M3 bit pattern, float32 [256]; 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * np.exp2(exponent.astype(np.float64) - 7)
    )
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


@cache
def _e4m3_table() -> np.ndarray:
    upper = np.arange(1 << 16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the patterns
        x = np.abs((upper << np.uint32(16)).view(np.float32).astype(np.float64))
    grid = e4m3_values()[:0x7F].astype(np.float64)  # 0 ... 448, ascending, all finite
    above = np.searchsorted(grid, np.minimum(np.nan_to_num(x, nan=0.0, posinf=E4M3_MAX), E4M3_MAX))
    below = np.maximum(above - 1, 0)
    low, high = np.minimum(x, E4M3_MAX) - grid[below], grid[above] - np.minimum(x, E4M3_MAX)
    nearest = np.where((low < high) | ((low == high) & (below % 2 == 0)), below, above).astype(np.uint8)
    nearest[np.isnan(x)] = 0x7F
    return np.asarray(nearest | ((upper >> np.uint32(15)) << np.uint32(7)).astype(np.uint8))
