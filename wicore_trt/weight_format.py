"""Formats of the weights of a model's linears: the one list, for checkpoints, engines and kernels.

Plain data; it must not know tensors, files or kernels. Invariant: `algo` and `storage` are spelled as in the files of
checkpoints and engines, so a format that is in use keeps its spelling.
"""

from __future__ import annotations

from dataclasses import dataclass

from wicore_trt.arithmetic import ITEM_BYTES, div_ceil


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage of a layer's linears; embedding, head and norms have the base dtype. `storage` is the dtype of the
    values. A quantized format has the `algo` of a checkpoint's config.json, and a float32 scale per `group` values of
    an output channel (0: per channel). `static_activations`: each linear also stores a scale of its input."""

    storage: str
    algo: str | None = None
    group: int = 0
    static_activations: bool = False

    @property
    def quantized(self) -> bool:
        return self.algo is not None

    @property
    def calibrated(self) -> WeightFormat:
        """Return the format with static scales of activations; an unquantized one needs none."""
        return next((f for f in FORMATS.values() if f.storage == self.storage and f.static_activations), self)

    def row_bytes(self, k: int) -> int:
        """Return the bytes of one output channel of `k` values, its scales included."""
        scales = div_ceil(k, self.group or k) if self.quantized else 0
        return k * ITEM_BYTES[self.storage] + 4 * scales


VISION = "vision.safetensors"
"""File of an image encoder's tensors, beside the ranks' files: whole, once, and for steps of text not loaded."""
PLAIN = {dtype: WeightFormat(dtype) for dtype in ("float32", "bfloat16", "float16")}
"""Unquantized formats by their dtype, which is the base dtype too."""
BF16, FP16 = PLAIN["bfloat16"], PLAIN["float16"]
FP8 = WeightFormat("fp8", "FP8_PER_CHANNEL_PER_TOKEN")
"""E4M3, a scale per output channel; activations are quantized by a scale per token that a step finds."""
FP8_STATIC = WeightFormat("fp8", "FP8", static_activations=True)
FORMATS = {f.algo: f for f in (FP8, FP8_STATIC)}
QUANTIZED = {"fp8": FP8}
"""Quantized formats by the name that `--dtype` takes, which is the dtype of their engines."""


def find_format(algo: str | None, base_dtype: str) -> WeightFormat:
    """Find the format with this `algo`, None for unquantized weights. Raises KeyError for an unknown algo or dtype."""
    return PLAIN[base_dtype] if algo is None else FORMATS[algo]
