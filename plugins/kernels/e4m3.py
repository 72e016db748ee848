"""FP8 E4M3 to float32 and back, by integer arithmetic on bits.

Every GPU from sm80 on runs it alike: Triton's own conversion to E4M3 needs sm90 (NATIVE). It knows no pointers.
Invariant: `decode` is exact, NaN included; `encode` rounds to nearest even, saturates at +-448 and keeps NaN.
Format: 1 sign, 4 exponent (bias 7), 3 mantissa bits, no infinity, NaN is 0x7F or 0xFF (arXiv:2209.05433).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


def has_conversions(target: str) -> bool:
    """Tell whether kernels for `target` ("sm90") may be NATIVE."""
    return int(target.removeprefix("sm")) >= 90


@triton.jit
def decode(bits):
    """float32 values of E4M3 bytes (uint8)."""
    wide = bits.to(tl.uint16)
    # Exponent and mantissa fall into float16's fields; the biases differ by 8. float16 holds E4M3's subnormals exactly.
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    value = half.to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def halves(pairs):
    """float16 values of the low and of the high byte of E4M3 pairs (uint16), by instructions of sm89 and later: three
    for four values, where shifts and Triton's conversion take a dozen."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 low, high;
        prmt.b32 sorted, $2, $2, 0x3120;
        mov.b32 {low, high}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


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


@triton.jit
def magnitude_bits(value):
    """The bits of float32 |value| as int32, in the order of the magnitudes; a NaN's are the largest, so a maximum of
    them knows of it."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_scale(bits):
    """float32 scale of a row whose largest `magnitude_bits` are `bits`: max(abs(row)) / 448, 1 for a row of zeros, NaN
    for one with a NaN."""
    return tl.where(bits == 0, 1.0, tl.div_rn(bits.to(tl.float32, bitcast=True), 448.0))


@triton.jit
def quantize_row(value, scale, NATIVE: tl.constexpr):
    """`quantize` of 16-bit values by their `row_scale`, a scalar, in fewer instructions: the same bytes, but that -0
    becomes 0, and an infinite scale makes the whole row NaN.

    The quotient is Markstein's: a product with the reciprocal, and one step with its exact remainder. That it rounds to
    the same E4M3 value as the true quotient for every 16-bit value and every scale of 16-bit rows was found by trying
    them all (the tests try a part). Tiny scales are lifted, exactly, where a reciprocal would overflow. NATIVE: the
    conversion is an instruction, from sm90 on; for sm89 Triton cuts values to float16 first, which rounds twice.
    """
    lift = tl.where(scale < 8.271806125530277e-25, 1.2676506002282294e30, 1.0)  # 2**-80, 2**100
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), scale * lift)
    value = value * lift
    unit, inverse = tl.zeros_like(value) + scale * lift, tl.zeros_like(value) + inverse
    quotient = value * inverse
    quotient = tl.fma(tl.fma(-quotient, unit, value), inverse, quotient)
    if NATIVE:
        return quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return encode(quotient)
