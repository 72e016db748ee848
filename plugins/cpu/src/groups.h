// Products with weights of small integers in groups along k: value = scale * code (+ minimum), see wicore_cpu.h.
//
// Codes are multiplied as the exact integers that they are, a group's sum is float32, and the group's scale, widened
// to float32, multiplies that sum: no weight and no scale is rounded. A bf16 row meets 4-bit codes as bf16 pairs,
// wider codes as float32.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "formats.h"
#include "simd.h"
#include "wicore_cpu.h"

namespace WICORE_ISA {

constexpr int64_t kPrefetchBytes = 2048;  // how far ahead of use weights are requested

// The first pass over a block requests the lines of all columns: weights come from memory once, in one stream.
INLINE void request_line(const void* line, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch(static_cast<const char*>(line) + kPrefetchBytes + at);
  }
}

INLINE float widen(float x) { return x; }
INLINE float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  return load<float>(&bits);
}

// Float16 weights for operands of type X.
template <class X>
struct F16For : F16 {
  using Activation = X;
};

// A format of groups for operands of type X. Every row of a tile has its codes at `column`, which is a multiple of W.
template <int64_t kFormat, class X>
struct Grouped {
  using Bits = uint8_t;
  using Activation = X;
  static constexpr wicore::Group kGroup = wicore::group_of(kFormat);
  static constexpr int64_t kCodes = WICORE_PACK_ROWS * kGroup.codes;
  static constexpr int64_t kScales = WICORE_PACK_ROWS * kGroup.scale;

  INLINE vf scale(const uint8_t* group, int64_t column) {
    const uint8_t* at = group + kCodes + column * kGroup.scale;
    if constexpr (kGroup.scale == 4) return load<vf>(at);
    return from_f16(load<vh>(at));
  }

  // minimum + 8 scale, the value of code 0: codes are signed.
  INLINE vf minimum(const uint8_t* group, int64_t column) {
    const uint8_t* at = group + kCodes + kScales + column * kGroup.minimum;
    return fma(scale(group, column), splat(8.0f), from_f16(load<vh>(at)));
  }

  // acc[r][c] += sum over the group of code * x[r].
  template <int R, int C>
  INLINE void accumulate(vf (&acc)[R][C], const X* x, int64_t ldx, const uint8_t* group, int column) {
    if constexpr (kGroup.codes == kGroup.size) {
      for (int64_t k = 0; k < kGroup.size; ++k) {
        const uint8_t* line = group + k * WICORE_PACK_ROWS + column;
        if (column == 0) request_line(line, WICORE_PACK_ROWS);
        vf w[C];
        for (int c = 0; c < C; ++c) w[c] = from_i8(line + c * W);
        for (int r = 0; r < R; ++r) {
          const vf value = splat(widen(x[r * ldx + k]));
          for (int c = 0; c < C; ++c) acc[r][c] = fma(w[c], value, acc[r][c]);
        }
      }
    } else {
      for (int64_t k = 0; k < kGroup.size; k += 8) {
        const uint8_t* line = group + k / 8 * 4 * WICORE_PACK_ROWS + column * 4;
        if (column == 0) request_line(line, 4 * WICORE_PACK_ROWS);
        accumulate_eight<0>(acc, x + k, ldx, line);
        accumulate_eight<1>(acc, x + k, ldx, line);
        accumulate_eight<2>(acc, x + k, ldx, line);
        accumulate_eight<3>(acc, x + k, ldx, line);
      }
    }
  }

  // Two of the eight k of a line, which keeps them in nibble J of the halves of a column's 32 bits.
  template <int J, int R, int C>
  INLINE void accumulate_eight(vf (&acc)[R][C], const X* x, int64_t ldx, const uint8_t* line) {
    if constexpr (sizeof(X) == 2) {
      vu w[C];
      for (int c = 0; c < C; ++c) w[c] = nibble_pairs<J>(load<vu>(line + c * W * 4));
      for (int r = 0; r < R; ++r) {
        const vu pair = splat_u32(load<uint32_t>(x + r * ldx + 2 * J));
        for (int c = 0; c < C; ++c) acc[r][c] = dot_bf16(acc[r][c], w[c], pair);
      }
    } else {
      for (int half = 0; half < 2; ++half) {
        vf w[C];
        for (int c = 0; c < C; ++c) w[c] = nibbles(load<vu>(line + c * W * 4), 4 * J + 16 * half);
        for (int r = 0; r < R; ++r) {
          const vf value = splat(x[r * ldx + 2 * J + half]);
          for (int c = 0; c < C; ++c) acc[r][c] = fma(w[c], value, acc[r][c]);
        }
      }
    }
  }

  // The sum of a group of x, in an order that the format alone chooses.
  INLINE float sum(const X* x) {
    vf lanes{};
    for (int64_t k = 0; k < kGroup.size; k += W) lanes += std::conditional_t<sizeof(X) == 2, BF16, F32>::get(x + k);
    return sum_lanes(lanes);
  }
};

// Calls body(weights) with the storage of weights of `format` for operands of `dtype`.
template <class Body>
INLINE void with_weights(int64_t format, int64_t dtype, const Body& body) {
  if (dtype == WICORE_BF16) {
    switch (format) {
      case WICORE_BF16: body(BF16{}); break;
      case WICORE_F16: body(F16For<uint16_t>{}); break;
      case WICORE_Q4_0: body(Grouped<WICORE_Q4_0, uint16_t>{}); break;
      case WICORE_Q4_1: body(Grouped<WICORE_Q4_1, uint16_t>{}); break;
      case WICORE_Q8_0: body(Grouped<WICORE_Q8_0, uint16_t>{}); break;
      case WICORE_Q6_K: body(Grouped<WICORE_Q6_K, uint16_t>{}); break;
      default: break;
    }
    return;
  }
  switch (format) {
    case WICORE_F32: body(F32{}); break;
    case WICORE_F16: body(F16For<float>{}); break;
    case WICORE_Q4_0: body(Grouped<WICORE_Q4_0, float>{}); break;
    case WICORE_Q4_1: body(Grouped<WICORE_Q4_1, float>{}); break;
    case WICORE_Q8_0: body(Grouped<WICORE_Q8_0, float>{}); break;
    case WICORE_Q6_K: body(Grouped<WICORE_Q6_K, float>{}); break;
    default: break;
  }
}

}  // namespace WICORE_ISA
