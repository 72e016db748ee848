"""Products by cuBLAS and attention by cuDNN for large steps, and a bound on a layer's products.

Knows tensors; neither layers nor steps. Invariant: sums of 16-bit products are float32. Off a GPU plain operators serve
tests.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from wicore_trt.runtime.dtypes import E4M3

FAST_SUMS = 21504
"""The longest sum (columns of the weights) that an FP8 product may leave to Hopper's matrix units alone, which add in
about 14 bits; longer ones are added in float32 every 128 products. On random 27B rows that is an error of 4.0e-3 (sums
of 21,504) or 2.3e-3 (5,376) of the result instead of bfloat16's 1.7e-3, where rounding both operands to E4M3 makes
about 4e-2. A prefill takes a seventh less (H100)."""

SLICE_ROWS = {"float": 2048, "scaled": 4096}
"""Rows that one product takes. On an H100 more of them take longer each: 62 layers of 27B 69.4 ms per 1,024 rows when
2,048 are multiplied at once and 75.4 with 8,192 (bfloat16), 35.5 with 4,096 and 39.1 with 8,192 (E4M3), in short runs.
A prefill of seconds is bound by power, and then they take the same."""


def float_mm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """out (float32 or x's type) = x @ w.T of 16-bit operands, with float32 sums."""
    for part in _slice_rows(len(x), SLICE_ROWS["float"]):
        if not x.is_cuda:
            out[part].copy_(torch.mm(x[part].float(), w.float().T))
        elif out.dtype == torch.float32:
            torch.mm(x[part], w.T, out_dtype=torch.float32, out=out[part])
        else:
            # Otherwise cuBLAS may add the parts of a split sum in bfloat16.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.mm(x[part], w.T, out=out[part])


def scaled_mm(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor
) -> None:
    """out (bfloat16) = (x @ w.T) * x_scale[:, None] * w_scale of E4M3 bytes; sums are float32, or see FAST_SUMS."""
    x, w = x.view(E4M3), w.view(E4M3)
    for part in _slice_rows(len(x), SLICE_ROWS["scaled"]):
        if not x.is_cuda:
            out[part].copy_((x[part].float() @ w.float().T) * x_scale[part, None] * w_scale)
            continue
        scales = {"scale_a": x_scale[part, None], "scale_b": w_scale[None, :]}
        fast = w.shape[1] <= FAST_SUMS
        # PyTorch has no public name for it.
        torch._scaled_mm(x[part], w.T, **scales, out_dtype=out.dtype, use_fast_accum=fast, out=out[part])  # noqa: SLF001


def _slice_rows(rows: int, most: int) -> list[slice]:
    return [slice(start, min(start + most, rows)) for start in range(0, rows, most)]


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with rows that see all keys. q [rows, heads, D]; k, v [keys, kv_heads, D]. Returns [rows, heads, D] of q's
    type, and float32 [heads, rows]: ln of the sum of exp(scale * score) over the keys."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if q.is_cuda:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001 -- the public call gives no sums
            q, k, v, None, True, 0.0, False, False, scale=scale
        )
        out, sums = found[0], found[1]
    else:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).float() for x in (k, v))
        scores = q.float() @ k.transpose(2, 3) * scale
        sums = scores.logsumexp(3)
        out = (torch.softmax(scores, 3) @ v).to(q.dtype)
    return out[0].transpose(0, 1), sums.reshape(q.shape[1], q.shape[2])


def gate_up_bound(gate_up: Iterable[torch.Tensor], scale: torch.Tensor | None, norm: torch.Tensor) -> float:
    """Find `largest` of `linear_layout.geglu_exponent` for the rows of gate_up [2 I, H], its scales [2 I] if E4M3, and
    the norm [H]."""
    lengths = torch.cat([(rows.float() * norm).norm(dim=1) for rows in gate_up])
    if scale is not None:
        lengths = lengths * scale.view(-1).abs()
    gate, up = lengths.chunk(2)
    return float((gate * up).max())
