"""Launches of `kernels.geglu`: plain arithmetic. Knows pointers as integers; neither Triton nor CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wicore_trt.arithmetic import div_ceil
from wicore_trt.plugins.layout import Launch


def geglu_launch(
    constants: Mapping[str, Any], gate_up: Any, out: Any, scales: Any, tokens: int, alpha: float = 1.0
) -> Launch:
    """`kernels.geglu` of gate_up [tokens, 2 I]: `geglu`, whose `scales` are 0, or `geglu_rows`, by their constants.
    `alpha` is a power of two."""
    arguments = {"gate_up": gate_up, "out": out, "alpha": alpha}
    if "BLOCK" in constants:
        return Launch((tokens, div_ceil(constants["WIDTH"], constants["BLOCK"]), 1), arguments)
    return Launch((tokens, 1, 1), {**arguments, "scales": scales})
