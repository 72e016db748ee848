"""4-bit weights in the order in which a GPU's lanes load them: GGUF's bytes, each nibble and scale kept.

Knows tensors and the order of `kernels.linear_q4`; neither files nor layers. Invariant: packing loses no bit and takes
as many bytes.
"""

from __future__ import annotations

import torch

ROWS = 32
"""Rows of a tile."""


def pack_tiles(packed: torch.Tensor) -> None:
    """Reorder uint8 [N, K / 2], 16 bytes per block of 32 columns as in GGUF, in place."""
    for part in torch.split(packed, 4096):
        q = torch.cat([half.view(len(part), -1, 16) for half in (part & 15, part >> 4)], dim=2)
        q = q.view(-1, 4, 8, q.shape[1], 4, 2, 4)  # row = 8 r + g; column = 8 t + 4 half + j
        low, high = q.permute(0, 3, 2, 4, 1, 6, 5).unbind(-1)  # [tiles, blocks, g, t, r, j]
        part.copy_((low | high << 4).reshape(part.shape))


def pack_scales(scales: torch.Tensor) -> None:
    """Reorder float16 [N, K / 32] in place as [tile rows, blocks, 8, 4]."""
    scales.copy_(scales.view(-1, 4, 8, scales.shape[1]).permute(0, 3, 2, 1).reshape(scales.shape))


def dequantize_blocks(packed: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None = None) -> torch.Tensor:
    """Return float32 [N, K] of GGUF's bytes uint8 [N, K / 2] or int8 [N, K], scales and minimums [N, groups]."""
    q, d = packed.view(*scales.shape, -1), scales.float()[:, :, None]
    if packed.dtype == torch.uint8:
        q = torch.cat([q & 15, q >> 4], dim=2)
        q = q.to(torch.int8) - (8 if minimums is None else 0)
    values = q * d if minimums is None else q * d + minimums.float()[:, :, None]
    return values.view(len(packed), -1)
