"""Torch's dtypes of weights, activations and KV values by their names in manifests and settings."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
TORCH_DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": E4M3,
    "q4_0": torch.uint8, "q8_0": torch.int8, "q6_k": torch.int8,
}  # fmt: skip
