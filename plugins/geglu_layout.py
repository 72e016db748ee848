"""Launches of `kernels.geglu`: plain arithmetic. Knows pointers as integers; neither Triton nor CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wicore_trt.plugins.layout import Launch


def geglu_launch(
    constants: Mapping[str, Any], gate_up: Any, out: Any, scales: Any, tokens: int, alpha: float = 1.0
) -> Launch:
    """`kernels.geglu.geglu` of gate_up [tokens, 2 I]; `alpha` is a power of two, `scales` 0 without FP8."""
    blocks = 1 if constants["FP8"] else -(-constants["WIDTH"] // constants["BLOCK"])
    arguments = {"gate_up": gate_up, "out": out, "scales": scales, "alpha": alpha}
    return Launch((tokens, blocks, 1), arguments)
