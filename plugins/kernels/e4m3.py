"""FP8 E4M3 to float32 and back, by integer arithmetic on bits.

Every GPU from sm80 on runs it alike: Triton's own E4M3 type needs sm89. It knows no pointers and no scales.
Invariant: `decode` is exact, NaN included; `encode` rounds to nearest even, saturates at +-448 and keeps NaN.
Format: 1 sign, 4 exponent (bias 7), 3 mantissa bits, no infinity, NaN is 0x7F or 0xFF (arXiv:2209.05433).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode(bits):
    """float32 values of E4M3 bytes (uint8)."""
    wide = bits.to(tl.uint16)
    # Exponent and mantissa fall into float16's fields; the biases differ by 8. float16 holds E4M3's subnormals exactly.
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    value = half.to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def encode(value):
    """E4M3 bytes (uint8) of float32 values."""
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    not_a_number = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x43E00000)  # 448: magnitudes order like their bits
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960  # 960: the biases' difference, in place
    # Below 2**-6 the step is 2**-9, which is the last place of 2**14: adding it rounds.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (tl.where(not_a_number, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def quantize(value, scale):
    """E4M3 bytes of float32 value / scale; the division is the correctly rounded one."""
    return encode(tl.div_rn(value, tl.zeros_like(value) + scale))
