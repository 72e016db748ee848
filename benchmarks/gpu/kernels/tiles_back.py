"""The inverse of `backends.triton.tiles`, bit by bit."""

from __future__ import annotations

import torch

from wicore_trt.backends.triton.tiles import ROWS


def unpack_tiles(packed: torch.Tensor) -> torch.Tensor:
    """Return what `pack_tiles` made `packed` of."""
    tiles = packed.view(len(packed) // ROWS, -1, 8, 4, 4, 4)
    q = torch.stack([tiles & 15, tiles >> 4], dim=-1).permute(0, 4, 2, 1, 3, 6, 5).reshape(len(packed), -1, 2, 16)
    return (q[:, :, 0] | q[:, :, 1] << 4).reshape(packed.shape)


def unpack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return what `pack_scales` made `scales` of."""
    return scales.view(len(scales) // ROWS, -1, 8, 4).permute(0, 3, 2, 1).reshape(scales.shape)
