"""Check casts of weights: values that are not finite are refused, values that are too small are counted.

Knows neither files nor formats of checkpoints. Invariant: every block in a checkpoint is finite in its stored
format.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from wicore_trt.checkpoint.quantize import count_flushed, count_rounded, find_bad_row, to_float32
from wicore_trt.errors import CheckpointError

_LARGEST = {"F16": ("float16", "65504"), "BF16": ("bfloat16", "3.38953e+38")}
_FLUSHED = {
    tag: f"too small for {form} and became 0"
    for tag, form in (("F16", "float16"), ("BF16", "bfloat16"), ("F8_E4M3", "FP8 beside the largest of their row"))
}
_ROUNDED = {  # the smallest numbers with all of their bits
    "F16": "below 6.1e-05 and lost bits as float16",
    "BF16": "below 1.2e-38 and lost bits as bfloat16",
}


class CastReport:
    """Counts, by format and tensor, weights that became 0 or lost bits because they are too small."""

    def __init__(self) -> None:
        self._flushed = {tag: Counter[str]() for tag in _FLUSHED}
        self._rounded = {tag: Counter[str]() for tag in _ROUNDED}

    def count_losses(self, name: str, values: np.ndarray, stored: np.ndarray, tag: str) -> None:
        """Count the float32 `values` of tensor `name` that lost something in `stored`: F16, BF16 or E4M3 bits."""
        if flushed := count_flushed(values, stored):
            self._flushed[tag][name] += flushed
        if tag in _ROUNDED and (rounded := count_rounded(values, stored, tag)):
            self._rounded[tag][name] += rounded

    @property
    def flushed_to_zero(self) -> int:
        """Number of weights, of all tensors and formats, that became 0."""
        return sum(found.total() for found in self._flushed.values())

    def describe_losses(self) -> list[str]:
        """Return one sentence for each format that lost something, naming the tensor that lost most."""
        said = []
        for losses, words in ((self._flushed, _FLUSHED), (self._rounded, _ROUNDED)):
            for tag, found in losses.items():
                for worst, most in found.most_common(1):
                    what = f"{found.total()} weights of {len(found)} tensors are {words[tag]}"
                    said.append(f"{what}, {most} of them in {worst}.")
        return said


def check_finite_rows(place: str, name: str, first_row: int, block: np.ndarray, tag: str) -> None:
    """Raise CheckpointError when a block in format `tag` (F32, F16 or BF16 bits) holds an infinity or a NaN.
    `first_row` is the block's first row in the tensor, `place` the file."""
    row = find_bad_row(block, tag)
    if row is None:
        return
    values = to_float32(block[row : row + 1], tag)
    kind = "NaN" if np.isnan(values).any() else "an infinity"
    raise CheckpointError(f"{place}: {name} holds {kind} in row {first_row + row}.", fix="Its weights are damaged.")


def check_cast(place: str, name: str, first_row: int, values: np.ndarray, stored: np.ndarray, tag: str) -> None:
    """Raise CheckpointError for float32 `values` that are not finite, or are beyond the range of format `tag`."""
    row = find_bad_row(stored, tag)
    if row is None:
        return
    check_finite_rows(place, name, first_row, values, "F32")
    worst = float(np.abs(values[row]).max())
    format_name, largest = _LARGEST[tag]
    other = "bfloat16 or fp8" if tag == "F16" else "float32"
    problem = f"{place}: {name} reaches {worst:g}, beyond {format_name}'s {largest}, in row {first_row + row}."
    raise CheckpointError(problem, fix=f"Use --dtype {other}.")
