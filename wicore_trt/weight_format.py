"""Formats of the weights of a model's linears: the one list, for checkpoints, engines and kernels.

Plain data; it must not know tensors, files or kernels. Invariant: `algo` and `storage` are spelled as in the files of
checkpoints and engines, so a format that is in use keeps its spelling.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from wicore_trt.arithmetic import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors that store a weight [out, in]: values with the safetensors `tag`, `packed` of them in a byte or item, and
    scales with `scale_tag`, one per `group` values of a row (0: one per row, no second dimension)."""

    tag: str
    packed: int
    scale_tag: str
    group: int


LAYOUTS = {
    "fp8": Layout("F8_E4M3", 1, "F32", 0),
    "q4_0": Layout("U8", 2, "F16", 32),
    "q8_0": Layout("I8", 1, "F16", 32),
    "q6_k": Layout("I8", 1, "F32", 16),
}
"""Layout of quantized weights by their storage. "q4_0" has GGUF's 16 bytes of each block: low nibbles are the first 16
values, a value is d * (q - 8), or d * q + m where there are minimums. "q8_0" is d * q; "q6_k" is Q6_K with its two
scales multiplied, which float32 holds exactly."""
_BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F16": 2, "F32": 4}
HEADS = ("float16", "q8_0", "q6_k")
"""Storage of embedding and head that a format may name, where it is not the base dtype."""
MINIMUM_KINDS = ("attention.dense", "attention.qkv", "mlp.gate_up", "mlp.proj")
"""Kinds of linears, as in the names of a step's weights."""


def row_bytes(storage: str, k: int) -> int:
    """Return the bytes of a row of `k` values in `storage`, a base dtype or a name in LAYOUTS, its scales included."""
    layout = LAYOUTS.get(storage)
    if layout is None:
        return k * ITEM_BYTES[storage]
    return k // layout.packed + _BYTES[layout.scale_tag] * (k // layout.group if layout.group else 1)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage of a layer's linears; embedding, head and norms have the base dtype. `storage` is the dtype of the
    values. A quantized format has the `algo` of a checkpoint's config.json, and a scale per `group` values of an output
    channel (0: per channel). `static_activations`: each linear also stores a scale of its input. `minimums`: kinds of
    linears that have a float16 minimum beside each scale of a group. `head`: storage of embedding and head, "" for the
    base dtype."""

    storage: str
    algo: str | None = None
    group: int = 0
    static_activations: bool = False
    minimums: tuple[str, ...] = ()
    head: str = ""

    @property
    def quantized(self) -> bool:
        """True for every format but the base dtypes."""
        return self.algo is not None

    @property
    def fp8(self) -> bool:
        """True for E4M3, whose products take activations in E4M3, too."""
        return self.storage == "fp8"

    @property
    def calibrated(self) -> WeightFormat:
        """Return the format with static scales of activations; itself where activations have no scales."""
        return next((f for f in FORMATS.values() if f.storage == self.storage and f.static_activations), self)

    def of_kind(self, kind: str) -> WeightFormat:
        """Return the format of one kind of linears, such as "mlp.proj": only that one's minimums, no head."""
        return replace(self, minimums=(kind,) if kind in self.minimums else (), head="")

    def row_bytes(self, k: int) -> int:
        """Return the bytes of one output channel of `k` values, its scales and minimums included."""
        return row_bytes(self.storage, k) + (2 * (k // self.group) if self.minimums else 0)

    def describe(self) -> dict[str, str]:
        """Return the entries of a manifest's `quantization` beside "base_dtype"."""
        more = {"head": self.head, "minimums": ",".join(self.minimums)}
        return {"algo": str(self.algo), **{key: value for key, value in more.items() if value}}


VISION = "vision.safetensors"
"""File of an image encoder's tensors, beside the ranks' files: whole, once, and for steps of text not loaded."""
PLAIN = {dtype: WeightFormat(dtype) for dtype in ("float32", "bfloat16", "float16")}
"""Unquantized formats by their dtype, which is the base dtype too."""
BF16, FP16 = PLAIN["bfloat16"], PLAIN["float16"]
FP8 = WeightFormat("fp8", "FP8_PER_CHANNEL_PER_TOKEN")
"""E4M3, a scale per output channel; activations are quantized by a scale per token that a step finds."""
FP8_STATIC = WeightFormat("fp8", "FP8", static_activations=True)
Q4_0 = WeightFormat("q4_0", "W4A16_Q4_0", group=32)
"""GGUF's blocks of 32 weights with a float16 scale, as published; activations keep the base dtype."""
FORMATS = {f.algo: f for f in (FP8, FP8_STATIC, Q4_0)}
QUANTIZED = {"fp8": FP8, "q4_0": Q4_0}
"""Quantized formats by the name that `--dtype` takes, which is the dtype of their engines."""


def find_format(algo: str | None, base_dtype: str, head: str = "", minimums: Iterable[str] = ()) -> WeightFormat:
    """Find the format with this `algo`, None for unquantized weights. Raises KeyError for an unknown algo, dtype, head
    or kind, and for a head or minimums of a format without groups."""
    found, kinds = PLAIN[base_dtype] if algo is None else FORMATS[algo], tuple(minimums)
    if (head or kinds) and not (found.group and head in ("", *HEADS) and kinds == tuple(sorted({*kinds}))):
        raise KeyError(head or kinds)
    if not {*kinds} <= {*MINIMUM_KINDS}:
        raise KeyError(kinds)
    return replace(found, head=head, minimums=kinds) if head or kinds else found
