"""What a conversion asks of whoever measures static scales: measuring is running the model, which this package cannot.

Plain terms between `checkpoint.convert` and a backend. Invariant: a scale is one number for a whole tensor, so it does
not depend on tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from wicore_trt.checkpoint.format import Checkpoint
from wicore_trt.checkpoint.source import Source

Progress = Callable[[str, int, int], None]  # phase, done, in all


@dataclass(frozen=True, slots=True)
class StaticScales:
    """`scales`: float32 [1] by the name of the tensor in a checkpoint; `origin`: what `wicore.calibration` records."""

    scales: dict[str, np.ndarray]
    origin: dict[str, str | int]


class Calibration(Protocol):
    """Measures the scales of activations, and with `kv_scales` those of the KV cache."""

    @property
    def kv_scales(self) -> bool: ...

    def of_source(self, source: Source, tokenizer_files: Path, progress: Progress | None = None) -> StaticScales:
        """Scales of a source, whose tokenizer lies in `tokenizer_files`. Raises CheckpointError when the model computes
        no finite numbers."""
        ...

    def of_checkpoint(
        self, path: str | Path, output: str | Path, *, force: bool = False, progress: Progress | None = None
    ) -> Checkpoint:
        """Write the unified checkpoint `path` with static scales as `output`, which may be the same."""
        ...
