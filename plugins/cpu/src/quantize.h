// Dynamic quantization of activations to E4M3 (4 exponent, 3 mantissa bits, largest 448), one scale per row.
//
// The quantized values are kept as bf16, which holds every E4M3 value exactly, so the product runs on the bf16 path.
#pragma once
#include <stdint.h>

#include "pool.h"
#include "simd.h"
#include "wicore_cpu.h"

namespace WICORE_ISA {

constexpr float kE4M3Max = 448.0f;

// Nearest E4M3 value, ties to even, saturating; a NaN stays one.
INLINE vf round_e4m3(vf v) {
  const vu sign = as_bits(v) & 0x80000000u;
  const vf magnitude = as_float(as_bits(v) ^ sign);
  const vf bounded = magnitude > splat(kE4M3Max) ? splat(kE4M3Max) : magnitude;
  // Adding 2^(e + 20) makes the float32 adder round at the third mantissa bit; below 2^-6 E4M3 is subnormal.
  const vu exponent = as_bits(bounded) & 0x7f800000u;
  const vu least = splat_u32(121u << 23);
  const vf anchor = as_float((exponent > least ? exponent : least) + (20u << 23));
  return as_float(as_bits((bounded + anchor) - anchor) | sign);
}

inline void quantize_row(const uint16_t* x, int64_t k, uint16_t* out, float* scale) {
  vu largest{};  // magnitudes compared as integers, so that a NaN counts as the largest
  for (int64_t i = 0; i < k; i += W) {
    const vf v = k - i < W ? BF16::get_first(x + i, k - i) : BF16::get(x + i);
    const vu magnitude = as_bits(v) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  uint32_t lane[W];
  store(lane, largest);
  for (int i = 1; i < W; ++i) lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
  const float amax = load<float>(lane);
  *scale = amax == 0.0f ? 1.0f : amax / kE4M3Max;
  const vf divisor = splat(*scale);
  for (int64_t i = 0; i < k; i += W) {
    if (k - i < W) {
      BF16::put_first(out + i, round_e4m3(BF16::get_first(x + i, k - i) / divisor), k - i);
    } else {
      BF16::put(out + i, round_e4m3(BF16::get(x + i) / divisor));
    }
  }
}

inline void quantize_rows(const wicore_linear& a) {
  wicore::parallel_for(a.rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      quantize_row(static_cast<const uint16_t*>(a.x) + i * a.k, a.k, static_cast<uint16_t*>(a.quantized) + i * a.k,
                   a.quantized_scale + i);
    }
  });
}

}  // namespace WICORE_ISA
