"""Shapes of linear layers of few rows, block sizes that run them, and their launches: plain arithmetic.

Knows pointers as integers only; neither Triton nor CUDA. Invariant: a `LinearConfig` changes only the order of float32
sums, and that order does not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from wicore_trt.arithmetic import div_ceil
from wicore_trt.plugins.layout import Launch, TensorMap
from wicore_trt.weight_format import WeightFormat

VECTOR: Final = "vector"
MATRIX: Final = "matrix"
TILES: Final = "tiles"
GROUPS: Final = "groups"
MAX_SPLITS = 16
FLOAT16_EXPONENT = 15  # results up to 2**15 fit float16 (65504) with a factor of two to spare


@dataclass(frozen=True)
class LinearShape:
    """Sizes and types of a linear layer: `n` columns of its output, `k` of its input. `dtype` ("bfloat16", "float16")
    is that of the input, or what quantized `weights` are widened to, and else the weights' own. `fp8_input`: the input
    is E4M3 too, with a float32 scale per row. `out` is "float32" or a 16-bit type. `geglu`: the weights are [2 n, k],
    rows [gate; up]. `largest`: also output each row's largest magnitude; not by "vector"."""

    n: int
    k: int
    dtype: str
    weights: WeightFormat
    out: str
    fp8_input: bool = False
    geglu: bool = False
    largest: bool = False

    def __post_init__(self) -> None:
        assert self.dtype in ("bfloat16", "float16")
        assert self.weights.quantized or self.weights.storage in (self.dtype, "float16")
        assert self.out in ("float32", "bfloat16", "float16") and (self.weights.fp8 or not self.fp8_input)
        assert self.n > 0 and self.k > 0 and self.k % 16 == 0, "rows of weights begin at multiples of 16 bytes"

    @property
    def four_bit(self) -> bool:
        return self.weights.storage == "q4_0"

    @property
    def weight_rows(self) -> int:
        return 2 * self.n if self.geglu else self.n

    @property
    def weight_bytes(self) -> int:
        return self.weight_rows * self.weights.row_bytes(self.k)


@dataclass(frozen=True)
class LinearConfig:
    """Block sizes of a launch; powers of two. "vector" takes one row of x without matrix units; `unroll` and
    `num_stages` say how its loads overlap. "matrix" takes `columns` rows of x per program and splits k into `splits`
    parts, summed in order by the part that ends last. `block_n` counts outputs: with geglu a program reads twice as
    many rows of weights. `evict_first` suits weights that one launch reads once, that is, few rows. "tiles" is "matrix"
    for weights of 4 bits (`kernels.linear_q4`): block_k / 32 warps share the rows of a program; `unroll` blocks of
    weights and `num_stages` of x are on their way to each; geglu may be split. No bit depends on these. "groups" is
    "tiles" by warp groups (`kernels.linear_q4_groups`), on sm90, without minimums and of ordered x: a warp has 32 rows
    of weights, and `num_stages` steps of `block_k` columns have places in shared memory."""

    kind: Literal["vector", "matrix", "tiles", "groups"]
    block_n: int
    block_k: int
    columns: int = 1
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 1
    unroll: int = 1
    evict_first: bool = True

    def __post_init__(self) -> None:
        for size in (self.block_n, self.block_k, self.columns, self.num_warps):
            assert size > 0 and size & (size - 1) == 0, f"{size} is no power of two"
        assert 1 <= self.splits <= MAX_SPLITS
        if self.kind == VECTOR:
            assert self.columns == 1 and self.splits == 1
        else:
            assert self.columns >= 8 and self.block_n >= 16 and self.block_k >= 32
        if self.kind == TILES:
            assert self.num_warps % self.warps_k == 0 and self.block_n % (32 * self.warps_n) == 0
        if self.kind == GROUPS:
            assert self.num_warps in (4, 8) and self.columns <= 32 and self.block_k == 128

    @property
    def warps_k(self) -> int:
        """Warps of "tiles" that share rows of weights."""
        return self.block_k // 32

    @property
    def warps_n(self) -> int:
        return self.num_warps // self.warps_k

    def short_name(self) -> str:
        text = f"{self.kind[0]}{self.block_n}x{self.block_k}"
        text += "" if self.kind == VECTOR else f"c{self.columns}s{self.splits}"
        text += "" if self.kind in (MATRIX, GROUPS) else f"u{self.unroll}"
        return text + f"w{self.num_warps}p{self.num_stages}" + ("" if self.evict_first else "n")

    def count_tiles(self, shape: LinearShape, tokens: int) -> int:
        return self.count_blocks(shape) * div_ceil(tokens, self.columns)

    def count_blocks(self, shape: LinearShape) -> int:
        return div_ceil(shape.n, self.block_n)


def check_config(shape: LinearShape, config: LinearConfig) -> None:
    assert (config.kind in (TILES, GROUPS)) == shape.four_bit
    if config.kind == VECTOR:
        assert not shape.fp8_input, "one row is read faster in 16 bits than it is quantised"
        assert not shape.largest, "one row is not quantised"
    if config.kind == GROUPS:
        assert config.block_n * (2 if shape.geglu else 1) == 32 * config.num_warps and not shape.weights.minimums
        assert shape.k % config.block_k == 0 and config.splits <= shape.k // config.block_k, "a split would be empty"
    elif config.splits > 1:
        assert not shape.geglu or config.kind == TILES, "gate and up meet in one program"
        parts = div_ceil(shape.k, config.block_k)
        assert div_ceil(parts, config.splits) * (config.splits - 1) < parts, "a split would be empty"


class LinearArrays(NamedTuple):
    """Arrays that a launch reads and writes (shapes: `kernels.linear`); 0 for those that the shape lacks. `partials`
    (bytes: `partials_bytes`) and `counters` (int32, `tiles`, zeros) are scratch of the launches of one stream; the
    counters are zeros again after each. `largest` (int32 [tokens]) is zeros before a launch. 4-bit weights, their
    scales and minimums (float16) are in the order of `kernels.linear_q4`."""

    x: Any
    w: Any
    out: Any
    w_scale: Any = 0
    x_scale: Any = 0
    partials: Any = 0
    counters: Any = 0
    largest: Any = 0
    w_minimum: Any = 0


def partials_bytes(shape: LinearShape, config: LinearConfig, tokens: int) -> int:
    if config.splits == 1:
        return 0
    outputs = config.block_n * (2 if shape.geglu else 1)
    return 4 * config.splits * config.count_tiles(shape, tokens) * outputs * config.columns


def linear_launch(
    shape: LinearShape, config: LinearConfig, arrays: LinearArrays, tokens: int, alpha: float = 1.0
) -> Launch:
    """Launch `kernels.linear` for `tokens` rows; `alpha`, a power of two, multiplies the output."""
    check_config(shape, config)
    arguments = {"x": arrays.x, "w": arrays.w, "out": arrays.out, "w_scale": arrays.w_scale, "alpha": alpha}
    if config.kind == VECTOR:
        assert tokens in (0, 1), "the vector kernel takes one row"
        return Launch((config.count_blocks(shape) * tokens, 1, 1), arguments)
    more = {"partials": arrays.partials, "counters": arrays.counters, "tokens": tokens}
    if config.kind == GROUPS:
        arguments |= _map_arrays(shape, arrays, max(1, tokens))
        return Launch((config.count_tiles(shape, tokens) * config.splits, 1, 1), {**arguments, **more})
    own = ("w_minimum",) if shape.four_bit else ("x_scale", "largest")
    more |= {name: getattr(arrays, name) for name in own}
    return Launch((config.count_tiles(shape, tokens), config.splits, 1), {**arguments, **more})


def _map_arrays(shape: LinearShape, arrays: LinearArrays, tokens: int) -> dict[str, TensorMap]:
    """Map what "groups" copies: x [K / 64, tokens, 64], so that a box is what a step's products take; words and scales
    of strips of 32 rows, of gate and of up, block by block."""
    halves, strips, words = shape.weight_rows // shape.n, shape.n // 32, shape.k // 32 * 512
    return {
        "x": TensorMap(arrays.x, (shape.k // 64, tokens, 64), (128, 2 * shape.k)),
        "w": TensorMap(arrays.w, (halves, strips, shape.k // 32, 128), (strips * words, words, 512)),
        "w_scale": TensorMap(arrays.w_scale, (halves, strips, shape.k), (strips * words // 8, words // 8)),
    }


def quantize_launch(constants: Mapping[str, Any], x: Any, out: Any, x_scale: Any, largest: Any, tokens: int) -> Launch:
    """Launch `kernels.linear_quantize` of x [tokens, K]. `quantize_rows` zeroes `largest`, `quantize_parts` reads
    it."""
    parts = div_ceil(constants["K"], constants["BLOCK"])
    return Launch((tokens, parts, 1), {"x": x, "out": out, "x_scale": x_scale, "largest": largest})


def dequantize_launch(constants: Mapping[str, Any], w: Any, out: Any, w_scale: Any, w_minimum: Any = 0) -> Launch:
    """Launch `kernels.linear_q4.dequantize_q4` into out [N, K]."""
    tiles = constants["N"] * constants["K"] // 1024
    arguments = {"w": w, "out": out, "w_scale": w_scale, "w_minimum": w_minimum}
    return Launch((div_ceil(tiles, constants["W"] * constants["T"]), 1, 1), arguments)


def geglu_exponent(hidden: int, largest: float) -> int:
    """Find e >= 0 so that gelu_tanh(gate) * up * 2**-e fits float16 whatever the tokens are.

    `largest` is the maximum over r of |s * gate_r| * |s * up_r|: Euclidean norms of row r of the two weights (scales
    included), each column times the weight s that the RMS norm in front multiplies by ("1 + w"). Proof: the norm's
    vector n before s has |n|^2 <= hidden, so by Cauchy and Schwarz |gate| <= sqrt(hidden) |s * gate_r|, the same holds
    for up, and |gelu(g)| <= |g|. Rounding the input to 16 bits or E4M3 adds at most a factor of 1.07 to each, which the
    distance of 2**15 to 65504 covers. The linear after it multiplies its float32 result by 2**e: exact.

    Cost: values below 2**(e - 14) lose bits, at most 2**(e - 25) each, which is 2**-39 of the bound. A typical value is
    1 / hidden of the bound (2**-12 for 27B), so this stays under float16's own rounding by a factor of 2**15."""
    bound, exponent = hidden * largest, 0
    assert 0 <= bound < float("inf"), "weights are not finite"
    while bound > 2.0 ** (FLOAT16_EXPONENT + exponent):
        exponent += 1
    return exponent
