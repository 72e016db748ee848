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
F32 = torch.float32
OPERANDS = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
"""Dtype of inputs of matrix products by that of the engine: float16 ones are float32 on its grid."""


class Args(ctypes.Structure):
    """Base of the argument structs. `kept` keeps alive what the struct points to."""

    OP: ClassVar[int]
    rows: int
    index: int
    kept: tuple[Any, ...]


def _int_fields(*names: str) -> list[tuple[str, Any]]:
    return [(name, c_int64) for name in names]


def _pointer_fields(*names: str) -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in names]


class Embed(Args):
    OP = 0
    _fields_ = [*_int_fields("rows", "k", "dtype"), ("scale", c_double), *_pointer_fields("index", "weight", "out")]


class Norm(Args):
    OP = 1
    _fields_ = [*_int_fields("rows", "k", "dtype"), ("eps", c_double), *_pointer_fields("x", "weight", "out")]


class AddNorm(Args):
    OP = 2
    _fields_ = [
        *_int_fields("rows", "k", "dtype"),
        ("eps", c_double),
        *_pointer_fields("residual", "x", "post", "next", "out"),
    ]


class Geglu(Args):
    OP = 3
    _fields_ = [*_int_fields("rows", "k", "dtype"), *_pointer_fields("x", "out")]


class Linear(Args):
    OP = 4
    _fields_ = [
        *_int_fields("rows", "n", "k", "dtype"),
        *_pointer_fields("x", "weight", "row_scale", "quantized", "quantized_scale", "out"),
    ]


class StepGeometry(Args):
    """Geometry of a step for one layer group; `set_step` fills it."""

    _fields_ = [*_int_fields("num_seqs", "table_width"), *_pointer_fields("cu_seqlens", "positions", "page_table")]


class KV(Args):
    _fields_ = [
        *_int_fields("heads", "kv_heads", "head_dim", "page_tokens"),
        *_int_fields("page_stride", "layer_offset", "kv_dtype"),
        *_pointer_fields("pool"),
        ("step", POINTER(StepGeometry)),
    ]


class QKNormRopeWrite(Args):
    OP = 5
    _fields_ = [
        *_int_fields("rows", "dtype"),
        ("eps", c_double),
        *_pointer_fields("qkv", "q_weight", "k_weight", "cos", "sin", "q"),
        ("kv", POINTER(KV)),
    ]


class Attention(Args):
    OP = 6
    _fields_ = [
        *_int_fields("rows", "dtype", "window"),
        ("scale", c_double),
        *_pointer_fields("q", "out"),
        ("kv", POINTER(KV)),
    ]


class GatherRows(Args):
    OP = 7
    _fields_ = [*_int_fields("rows", "row_bytes"), *_pointer_fields("index", "x", "out")]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weight [n, k] in the kernels' layout. `scale` (float32 [n]) makes a product quantize its input to E4M3."""

    data: torch.Tensor
    n: int
    k: int
    dtype: torch.dtype
    scale: torch.Tensor | None = None


def check_address(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Return the address of a contiguous CPU tensor, whose dtype and shape it asserts."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "kernels take contiguous CPU tensors"
    assert tensor.dtype == dtype, f"{tensor.dtype} where a kernel takes {dtype}"
    assert not shape or tuple(tensor.shape) == shape, f"shape {tuple(tensor.shape)} where a kernel takes {shape}"
    return tensor.data_ptr()


def make_embed(ids: torch.Tensor, weight: PackedWeight, scale: float, out: torch.Tensor) -> Embed:
    """out float32 [rows, k] = weight[ids int64 [rows]] * scale."""
    rows = out.shape[0]
    args = Embed(rows, weight.k, DTYPE_CODES[weight.dtype], scale)
    args.index, args.weight = check_address(ids, torch.int64, rows), weight.data.data_ptr()
    args.out = check_address(out, F32, rows, weight.k)
    args.kept = (ids, weight, out)
    return args


def make_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, out: torch.Tensor) -> Norm:
    """out operand [rows, k] = RMSNorm(x float32 [rows, k]) * weight float32 [k], rounded to dtype."""
    rows, k = out.shape
    args = Norm(rows, k, DTYPE_CODES[dtype], eps, check_address(x, F32, rows, k), check_address(weight, F32, k))
    args.out = check_address(out, OPERANDS[dtype])
    args.kept = (x, weight, out)
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
    args = AddNorm(
        rows, k, DTYPE_CODES[dtype], eps, check_address(residual, F32, rows, k), check_address(x, F32, rows, k)
    )
    args.post, args.next = check_address(weights[0], F32, k), check_address(weights[1], F32, k)
    args.out = check_address(out, OPERANDS[dtype])
    args.kept = (residual, x, weights, out)
    return args


def make_geglu(x: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> Geglu:
    """out operand [rows, k] = gelu_tanh(x[:, :k]) * x[:, k:], rounded; x float32 [rows, 2k]."""
    rows, k = out.shape
    args = Geglu(rows, k, DTYPE_CODES[dtype], check_address(x, F32, rows, 2 * k), check_address(out, OPERANDS[dtype]))
    args.kept = (x, out)
    return args


def make_linear(
    x: torch.Tensor, weight: PackedWeight, out: torch.Tensor, quantized: tuple[torch.Tensor, torch.Tensor] | None = None
) -> Linear:
    """out float32 [rows, n] = x operand [rows, k] @ weight.T. A weight with a scale needs `quantized`: scratch bfloat16
    [>= rows * k] and float32 [>= rows]."""
    rows = out.shape[0]
    args = Linear(rows, weight.n, weight.k, DTYPE_CODES[weight.dtype])
    args.x, args.weight = check_address(x, OPERANDS[weight.dtype], rows, weight.k), weight.data.data_ptr()
    if weight.scale is not None:
        assert quantized is not None and quantized[0].numel() >= x.numel() and quantized[1].numel() >= rows
        args.row_scale = check_address(weight.scale, F32, weight.n)
        args.quantized, args.quantized_scale = (
            check_address(quantized[0], torch.bfloat16),
            check_address(quantized[1], F32),
        )
    args.out = check_address(out, F32, rows, weight.n)
    args.kept = (x, weight, out, quantized)
    return args


def set_step(step: StepGeometry, cu_seqlens: torch.Tensor, positions: torch.Tensor, page_table: torch.Tensor) -> None:
    """Point `step` to the geometry of a step: int32 [S + 1], [N], [S, P]."""
    step.num_seqs, step.table_width = page_table.shape
    step.cu_seqlens = check_address(cu_seqlens, torch.int32, step.num_seqs + 1)
    step.positions = check_address(positions, torch.int32)
    step.page_table = check_address(page_table, torch.int32)
    step.kept = (cu_seqlens, positions, page_table)


def layer_kv(pool: torch.Tensor, layer: int, heads: int, step: StepGeometry) -> KV:
    """Make the KV of layer number `layer` of the group in its pool [pages, layers, 2, page_tokens, kv_heads,
    head_dim]."""
    _, layers, two, page_tokens, kv_heads, head_dim = pool.shape
    assert two == 2 and layer < layers and heads % kv_heads == 0
    assert head_dim % HEAD_DIM_MULTIPLE == 0 and head_dim <= MAX_HEAD_DIM
    args = KV(heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_tokens=page_tokens, step=ctypes.pointer(step))
    args.page_stride, args.layer_offset = pool.stride(0), layer * pool.stride(1)
    args.kv_dtype, args.pool = DTYPE_CODES[pool.dtype], check_address(pool, pool.dtype)
    args.kept = (pool, step)
    return args


def make_qk_norm_rope_write(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    dtype: torch.dtype,
    q: torch.Tensor,
    kv: KV,
) -> QKNormRopeWrite:
    """Make q operand [rows, heads, D] from qkv float32, and write k and v to `kv`. Weights (q, k) are float32 [D]; rope
    (cos, sin) float32 [positions, D / 2]."""
    rows, dim = q.shape[0], kv.head_dim
    args = QKNormRopeWrite(rows, DTYPE_CODES[dtype], eps)
    args.qkv = check_address(qkv, F32, rows, (kv.heads + 2 * kv.kv_heads) * dim)
    args.q_weight, args.k_weight = check_address(weights[0], F32, dim), check_address(weights[1], F32, dim)
    args.cos, args.sin = (
        check_address(rope[0], F32, len(rope[0]), dim // 2),
        check_address(rope[1], F32, len(rope[1]), dim // 2),
    )
    args.q, args.kv = check_address(q, OPERANDS[dtype], rows, kv.heads, dim), ctypes.pointer(kv)
    args.kept = (qkv, weights, rope, q, kv)
    return args


def make_attention(
    q: torch.Tensor, kv: KV, window: int, scale: float, dtype: torch.dtype, out: torch.Tensor
) -> Attention:
    """Attend causally with q operand [rows, heads, D] over the last `window` keys (0: all); out operand [rows, heads *
    D]."""
    rows, width = out.shape
    args = Attention(rows, DTYPE_CODES[dtype], window, scale)
    args.q = check_address(q, OPERANDS[dtype], rows, kv.heads, kv.head_dim)
    assert width == kv.heads * kv.head_dim
    args.out, args.kv = check_address(out, OPERANDS[dtype]), ctypes.pointer(kv)
    args.kept = (q, kv, out)
    return args


def make_gather(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> GatherRows:
    """out[i] = x[index[i]]; index int64."""
    rows = out.shape[0]
    args = GatherRows(rows, out[0].numel() * out.element_size(), check_address(index, torch.int64, rows))
    args.x, args.out = check_address(x, out.dtype), check_address(out, out.dtype)
    args.kept = (x, index, out)
    return args
