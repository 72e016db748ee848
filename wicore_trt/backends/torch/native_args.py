"""Arguments of the native operators: the C structs of plugins/cpu/include/wicore_cpu.h, built from tensors.

Functions assert dtypes, shapes and contiguity, and return a struct for `NativeLibrary.run`. A struct's `rows` may be
lowered afterwards, so one struct serves steps of any size up to its buffers'. The header states what each operator
computes. Invariant: a struct keeps alive every tensor that it points to.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 16, 256
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
Q4_0, Q4_1, Q8_0, Q6_K = 3, 4, 5, 6  # formats of packed codes, beside the dtypes
F32 = torch.float32
# Dtype of inputs of matrix products by that of the engine: float16 ones are float32 on its grid.
OPERANDS = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}


class Args(ctypes.Structure):
    """Base of the argument structs."""

    OP: ClassVar[int]
    rows: int
    index: int
    kept: dict[str, Any]

    def point(self, **tensors: tuple[Any, ...]) -> None:
        """Set each named field to the address of a tensor, given as (tensor, dtype, *shape) of `check_address`, and
        keep it alive."""
        self.kept = tensors
        for name, given in tensors.items():
            setattr(self, name, check_address(*given))


def _list_fields(ints: str, pointers: str, *, real: str = "") -> list[tuple[str, Any]]:
    """List a struct's fields in order: int64, one double at most, pointers to tensors."""
    fields: list[tuple[str, Any]] = [(name, c_int64) for name in ints.split()]
    fields += [(name, c_double) for name in real.split()]
    return fields + [(name, c_void_p) for name in pointers.split()]


class Embed(Args):
    OP = 0
    _fields_ = _list_fields("rows k format", "index weight out", real="scale")


class Norm(Args):
    OP = 1
    _fields_ = _list_fields("rows k dtype", "x weight out", real="eps")


class AddNorm(Args):
    OP = 2
    _fields_ = _list_fields("rows k dtype", "residual x post next out", real="eps")


class Geglu(Args):
    OP = 3
    _fields_ = _list_fields("rows k dtype", "x out")


class Linear(Args):
    OP = 4
    _fields_ = _list_fields("rows n k dtype format", "x weight row_scale quantized quantized_scale out")


class StepGeometry(Args):
    """Geometry of a step for one layer group; `set_step` fills it."""

    _fields_ = _list_fields("num_seqs table_width", "cu_seqlens positions page_table key_ends")


class KV(Args):
    _fields_ = [
        *_list_fields("heads kv_heads head_dim page_tokens page_stride layer_offset kv_dtype", "pool"),
        ("step", POINTER(StepGeometry)),
    ]


class QKNormRopeWrite(Args):
    OP = 5
    _fields_ = [*_list_fields("rows dtype", "qkv q_weight k_weight cos sin q", real="eps"), ("kv", POINTER(KV))]


class Attention(Args):
    OP = 6
    _fields_ = [*_list_fields("rows dtype window", "q out", real="scale"), ("kv", POINTER(KV))]


class GatherRows(Args):
    OP = 7
    _fields_ = _list_fields("rows row_bytes", "index x out")


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weight [n, k] in the kernels' layout of `format`, for operands of `dtype`. `scale` (float32 [n]) makes a product
    quantize its input to E4M3."""

    data: torch.Tensor
    n: int
    k: int
    dtype: torch.dtype
    format: int
    scale: torch.Tensor | None = None


def find_format(matrix: torch.Tensor, scales: torch.Tensor | None, minimums: torch.Tensor | None) -> int:
    """Find the format, by wicore_cpu.h's code, of a matrix. uint8 [n, k / 2] is Q4_0, or Q4_1 with minimums, both
    float16 [n, k / 32]; int8 [n, k] is Q8_0 with scales float16 [n, k / 32] and Q6_K with float32 [n, k / 16]."""
    if matrix.dtype not in (torch.uint8, torch.int8):
        return DTYPE_CODES.get(matrix.dtype, DTYPE_CODES[torch.bfloat16])
    assert scales is not None
    if matrix.dtype == torch.uint8:
        code, row_bytes, dtype = Q4_0 if minimums is None else Q4_1, 16, torch.float16
    elif scales.dtype == torch.float16:
        code, row_bytes, dtype = Q8_0, 32, torch.float16
    else:
        code, row_bytes, dtype = Q6_K, 16, F32
    groups, rest = divmod(matrix.shape[1], row_bytes)
    assert not rest, "rows are whole groups"
    for values in (scales,) if minimums is None else (scales, minimums):
        check_address(values, dtype, len(matrix), groups)
    return code


def check_address(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Return the address of a contiguous CPU tensor, whose dtype and shape it asserts."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "kernels take contiguous CPU tensors"
    assert tensor.dtype == dtype, f"{tensor.dtype} where a kernel takes {dtype}"
    assert not shape or tuple(tensor.shape) == shape, f"shape {tuple(tensor.shape)} where a kernel takes {shape}"
    return tensor.data_ptr()


def make_embed(ids: torch.Tensor, weight: PackedWeight, scale: float, out: torch.Tensor) -> Embed:
    """out float32 [rows, k] = weight[ids int64 [rows]] * scale."""
    rows = out.shape[0]
    args = Embed(rows, weight.k, weight.format, scale)
    args.point(index=(ids, torch.int64, rows), weight=(weight.data, torch.uint8), out=(out, F32, rows, weight.k))
    return args


def make_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, out: torch.Tensor) -> Norm:
    """out operand [rows, k] = RMSNorm(x float32 [rows, k]) * weight float32 [k], rounded to dtype."""
    rows, k = out.shape
    args = Norm(rows, k, DTYPE_CODES[dtype], eps)
    args.point(x=(x, F32, rows, k), weight=(weight, F32, k), out=(out, OPERANDS[dtype]))
    return args


def make_add_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> AddNorm:
    """residual += RMSNorm(x) * weights[0], in place; out operand = RMSNorm(residual) * weights[1], rounded."""
    rows, k = out.shape
    args = AddNorm(rows, k, DTYPE_CODES[dtype], eps)
    args.point(residual=(residual, F32, rows, k), x=(x, F32, rows, k), post=(weights[0], F32, k),
               next=(weights[1], F32, k), out=(out, OPERANDS[dtype]))  # fmt: skip
    return args


def make_geglu(x: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> Geglu:
    """out operand [rows, k] = gelu_tanh(x[:, :k]) * x[:, k:], rounded; x float32 [rows, 2k]."""
    rows, k = out.shape
    args = Geglu(rows, k, DTYPE_CODES[dtype])
    args.point(x=(x, F32, rows, 2 * k), out=(out, OPERANDS[dtype]))
    return args


def make_linear(
    x: torch.Tensor, weight: PackedWeight, out: torch.Tensor, quantized: tuple[torch.Tensor, torch.Tensor] | None = None
) -> Linear:
    """out float32 [rows, n] = x operand [rows, k] @ weight.T. A weight with a scale needs `quantized`: scratch bfloat16
    [>= rows * k] and float32 [>= rows]."""
    rows = out.shape[0]
    args = Linear(rows, weight.n, weight.k, DTYPE_CODES[weight.dtype], weight.format)
    scales: dict[str, tuple[Any, ...]] = {}
    if weight.scale is not None:
        assert quantized is not None and quantized[0].numel() >= x.numel() and quantized[1].numel() >= rows
        scales = {"row_scale": (weight.scale, F32, weight.n), "quantized": (quantized[0], torch.bfloat16)}
        scales["quantized_scale"] = quantized[1], F32
    operand = x, OPERANDS[weight.dtype], rows, weight.k
    args.point(x=operand, weight=(weight.data, torch.uint8), out=(out, F32, rows, weight.n), **scales)
    return args


def set_step(
    step: StepGeometry,
    cu_seqlens: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    key_ends: torch.Tensor | None = None,
) -> None:
    """Point `step` to the geometry of a step: int32 [S + 1], [N], [S, P], [N]."""
    int32 = torch.int32
    step.num_seqs, step.table_width = page_table.shape
    step.point(
        cu_seqlens=(cu_seqlens, int32, step.num_seqs + 1), positions=(positions, int32), page_table=(page_table, int32)
    )
    step.key_ends = None if key_ends is None else check_address(key_ends, int32, *positions.shape)
    step.kept["key_ends"] = key_ends


def layer_kv(pool: torch.Tensor, layer: int, heads: int, step: StepGeometry) -> KV:
    """Make the KV of layer number `layer` of the group in its pool [pages, layers, 2, page_tokens, kv_heads,
    head_dim]."""
    _, layers, two, page_tokens, kv_heads, head_dim = pool.shape
    assert two == 2 and layer < layers and heads % kv_heads == 0
    assert head_dim % HEAD_DIM_MULTIPLE == 0 and head_dim <= MAX_HEAD_DIM
    args = KV(heads, kv_heads, head_dim, page_tokens, pool.stride(0), layer * pool.stride(1), DTYPE_CODES[pool.dtype])
    args.point(pool=(pool, pool.dtype))
    args.step = ctypes.pointer(step)  # ctypes keeps what such a field points to
    return args


def make_qk_norm_rope_write(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    dtype: torch.dtype,
    kv: KV,
    q: torch.Tensor,
) -> QKNormRopeWrite:
    """Make q operand [rows, heads, D] from qkv float32, and write k and v to `kv`. Weights (q, k) are float32 [D]; rope
    (cos, sin) float32 [positions, D / 2]."""
    rows, dim = q.shape[0], kv.head_dim
    args = QKNormRopeWrite(rows, DTYPE_CODES[dtype], eps)
    args.point(
        qkv=(qkv, F32, rows, (kv.heads + 2 * kv.kv_heads) * dim), q=(q, OPERANDS[dtype], rows, kv.heads, dim),
        q_weight=(weights[0], F32, dim), k_weight=(weights[1], F32, dim),
        cos=(rope[0], F32, len(rope[0]), dim // 2), sin=(rope[1], F32, len(rope[1]), dim // 2),
    )  # fmt: skip
    args.kv = ctypes.pointer(kv)
    return args


def make_attention(
    q: torch.Tensor, kv: KV, window: int, scale: float, dtype: torch.dtype, out: torch.Tensor
) -> Attention:
    """Attend with q operand [rows, heads, D] to the last `window` keys (0: all) up to each row's own, or to its key end
    where the step has some; out operand [rows, heads * D]."""
    rows, width = out.shape
    assert width == kv.heads * kv.head_dim
    args = Attention(rows, DTYPE_CODES[dtype], window, scale)
    args.point(q=(q, OPERANDS[dtype], rows, kv.heads, kv.head_dim), out=(out, OPERANDS[dtype]))
    args.kv = ctypes.pointer(kv)
    return args


def make_gather(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> GatherRows:
    """out[i] = x[index[i]]; index int64."""
    rows = out.shape[0]
    args = GatherRows(rows, out[0].numel() * out.element_size())
    args.point(index=(index, torch.int64, rows), x=(x, out.dtype), out=(out, out.dtype))
    return args
