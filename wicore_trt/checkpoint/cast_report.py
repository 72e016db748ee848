"""What a cast may not do to a weight, and what it did: not finite is refused, too small is counted.

Looks at blocks that are converted anyway. It knows neither files nor formats of checkpoints. Invariant: every block
that reaches a checkpoint is finite in the format that it is stored in.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from wicore_trt.checkpoint.quantize import bad_row, flushed_to_zero, rounded_subnormals, to_float32
from wicore_trt.errors import CheckpointError

_LARGEST = {"F16": ("float16", "65504"), "BF16": ("bfloat16", "3.38953e+38")}
_SMALL = {"F16": "float16", "BF16": "bfloat16", "F8_E4M3": "FP8 beside the largest of their row"}
_NORMAL = {"F16": "6.1e-05", "BF16": "1.2e-38"}  # the smallest number with all of its bits


class CastReport:
    """Weights that became 0 or lost bits for being too small, counted per format and tensor."""

    def __init__(self) -> None:
        self._flushed = {tag: Counter[str]() for tag in _SMALL}
        self._rounded = {tag: Counter[str]() for tag in _NORMAL}

    def count_losses(self, name: str, values: np.ndarray, stored: np.ndarray, tag: str) -> None:
        """Note what of the float32 `values` of tensor `name` was lost in `stored`: F16 values, BF16 or E4M3 bits."""
        if flushed := flushed_to_zero(values, stored):
            self._flushed[tag][name] += flushed
        if tag in _NORMAL and (rounded := rounded_subnormals(values, stored, tag)):
            self._rounded[tag][name] += rounded

    @property
    def flushed_to_zero(self) -> int:
        """Weights that became 0, of all tensors and formats."""
        return sum(found.total() for found in self._flushed.values())

    def describe_losses(self) -> list[str]:
        """One sentence per format that lost something, with the tensor that lost most."""
        said = []
        for tag, found in self._flushed.items():
            for worst, most in found.most_common(1):
                said.append(
                    f"{found.total()} weights of {len(found)} tensors are too small for {_SMALL[tag]} and became 0, "
                    f"{most} of them in {worst}."
                )
        for tag, found in self._rounded.items():
            for worst, most in found.most_common(1):
                said.append(
                    f"{found.total()} weights of {len(found)} tensors are below {_NORMAL[tag]} and lost bits as "
                    f"{_SMALL[tag]}, {most} of them in {worst}."
                )
        return said


def check_finite_rows(place: str, name: str, first_row: int, block: np.ndarray, tag: str) -> None:
    """Raise CheckpointError when a block of rows from `first_row` on, in the format `tag` (F32, F16 or BF16 bits),
    holds an infinity or a NaN; `place` is the file."""
    row = bad_row(block, tag)
    if row is None:
        return
    values = to_float32(block[row : row + 1], tag)
    kind = "NaN" if np.isnan(values).any() else "an infinity"
    raise CheckpointError(f"{place}: {name} holds {kind} in row {first_row + row}.", fix="Its weights are damaged.")


def check_cast(place: str, name: str, first_row: int, values: np.ndarray, stored: np.ndarray, tag: str) -> None:
    """As check_finite_rows for float32 `values` and what they became in format `tag`: beyond its range is refused."""
    row = bad_row(stored, tag)
    if row is None:
        return
    check_finite_rows(place, name, first_row, values, "F32")
    worst = float(np.abs(values[row]).max())
    format_name, largest = _LARGEST[tag]
    other = "bfloat16 or fp8" if tag == "F16" else "float32"
    raise CheckpointError(
        f"{place}: {name} reaches {worst:g}, beyond {format_name}'s {largest}, in row {first_row + row}.",
        fix=f"Use --dtype {other}.",
    )
