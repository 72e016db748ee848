// Operators on single rows: embedding look-up, RMSNorm, residual add with two norms, gated GELU.
//
// Reduction order of a norm: four vectors of partial sums over the row's whole vectors, then the ragged end, then a
// tree over the lanes. It depends on the row's length only. Arithmetic is float32.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "formats.h"
#include "groups.h"
#include "pool.h"
#include "simd.h"
#include "wicore_cpu.h"

namespace WICORE_ISA {

constexpr int64_t kRowsPerRange = 4;
constexpr int64_t kEmbedAhead = 64;

// Operand rows of a float16 engine: put keeps float32, and finish rounds the whole row, scaled by a power of two if it
// leaves float16's range (gate * up has no bound). The scale is multiplied back: a later product is linear in it.
struct F16Row {
  using Bits = float;
  INLINE void put(Bits* p, vf v) { store(p, v); }
  INLINE void put_first(Bits* p, vf v, int64_t n) { store_first(p, v, n); }
  INLINE void finish(Bits* row, int64_t k) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < k; ++i) {
      const uint32_t magnitude = load<uint32_t>(row + i) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    const int32_t exponent = static_cast<int32_t>(largest >> 23) - 127;  // 2^exponent <= largest
    const uint32_t shift = exponent > 14 && exponent < 128 ? static_cast<uint32_t>(exponent - 14) : 0;
    const vf down = as_float(splat_u32((127u - shift) << 23));
    const vf up = as_float(splat_u32((127u + shift) << 23));
    int64_t i = 0;
    for (; i + W <= k; i += W) store(row + i, from_f16(to_f16(load<vf>(row + i) * down)) * up);
    if (i < k) store_first(row + i, from_f16(to_f16(load_first<vf>(row + i, k - i) * down)) * up, k - i);
  }
};

INLINE float inverse_rms(const float* x, int64_t k, float eps) {
  vf sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= k; i += 4 * W) {
    for (int j = 0; j < 4; ++j) {
      const vf v = load<vf>(x + i + j * W);
      sum[j] = fma(v, v, sum[j]);
    }
  }
  for (; i < k; i += W) {
    const vf v = k - i < W ? load_first<vf>(x + i, k - i) : load<vf>(x + i);
    sum[0] = fma(v, v, sum[0]);
  }
  const float total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(k) + eps);
}

template <class Out>
INLINE void normalize(const float* x, const float* weight, int64_t k, float inverse, typename Out::Bits* out) {
  int64_t i = 0;
  for (; i + W <= k; i += W) Out::put(out + i, load<vf>(x + i) * inverse * load<vf>(weight + i));
  if (i < k) {
    Out::put_first(out + i, load_first<vf>(x + i, k - i) * inverse * load_first<vf>(weight + i, k - i), k - i);
  }
  Out::finish(out, k);
}

// Calls row(storage, args, i) for the rows of `args`, with the storage of its dtype.
template <class Half, class Args, class Row>
void for_rows(const Args& args, Row row) {
  with_storage<Half>(args.dtype, [&](auto storage) {
    wicore::parallel_for(args.rows, kRowsPerRange, [&](int64_t begin, int64_t end) {
      const Args& a = args;
      for (int64_t i = begin; i < end; ++i) row(storage, a, i);
    });
  });
}

inline void norm(const wicore_norm& args) {
  for_rows<F16Row>(args, [](auto out, const wicore_norm& a, int64_t i) {
    using Out = decltype(out);
    const float* x = a.x + i * a.k;
    const float inverse = inverse_rms(x, a.k, static_cast<float>(a.eps));
    normalize<Out>(x, a.weight, a.k, inverse, static_cast<typename Out::Bits*>(a.out) + i * a.k);
  });
}

inline void add_norm(const wicore_add_norm& args) {
  for_rows<F16Row>(args, [](auto out, const wicore_add_norm& a, int64_t i) {
    using Out = decltype(out);
    const float eps = static_cast<float>(a.eps);
    const float* x = a.x + i * a.k;
    float* residual = a.residual + i * a.k;
    const float inverse = inverse_rms(x, a.k, eps);
    int64_t j = 0;
    for (; j + W <= a.k; j += W) {
      store(residual + j, load<vf>(residual + j) + load<vf>(x + j) * inverse * load<vf>(a.post + j));
    }
    for (; j < a.k; ++j) residual[j] += x[j] * inverse * a.post[j];
    normalize<Out>(residual, a.next, a.k, inverse_rms(residual, a.k, eps),
                   static_cast<typename Out::Bits*>(a.out) + i * a.k);
  });
}

// gelu_tanh(x) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3).
INLINE vf gelu_tanh(vf x) {
  const vf u = x * fma(x * x, splat(0.044715f * 0.7978845608f), splat(0.7978845608f));
  return x / (1.0f + vexp(-2.0f * u));
}

inline void geglu(const wicore_geglu& args) {
  for_rows<F16Row>(args, [](auto storage, const wicore_geglu& a, int64_t i) {
    using Out = decltype(storage);
    const float* gate = a.x + i * 2 * a.k;
    const float* up = gate + a.k;
    auto* out = static_cast<typename Out::Bits*>(a.out) + i * a.k;
    int64_t j = 0;
    for (; j + W <= a.k; j += W) Out::put(out + j, gelu_tanh(load<vf>(gate + j)) * load<vf>(up + j));
    if (j < a.k) {
      const int64_t n = a.k - j;
      Out::put_first(out + j, gelu_tanh(load_first<vf>(gate + j, n)) * load_first<vf>(up + j, n), n);
    }
    Out::finish(out, a.k);
  });
}

template <class T>
INLINE float scalar_value(typename T::Bits bits) {
  typename T::Bits lanes[W] = {bits};
  return T::get(lanes)[0];
}

// A row of a quantized table: scale * code is exact in float32.
template <class T>
INLINE void embed_groups(const wicore_embed& a, const uint8_t* block, int64_t lane, float* out) {
  for (int64_t k = 0; k < a.k; ++k) {
    const uint8_t* group = block + k / T::kGroup.size * T::kGroup.bytes();
    const uint8_t* scale = group + T::kCodes + lane * T::kGroup.scale;
    const float factor = T::kGroup.scale == 4 ? load<float>(scale) : scalar_value<F16>(load<uint16_t>(scale));
    const uint8_t code = group[k % T::kGroup.size * WICORE_PACK_ROWS + lane];
    out[k] = static_cast<float>(static_cast<int8_t>(code)) * factor * static_cast<float>(a.scale);
  }
}

template <class T>
INLINE void embed_row(const wicore_embed& a, const typename T::Bits* block, int64_t row, float* out) {
  const float scale = static_cast<float>(a.scale);
  const int64_t lane = row * T::kPair;
  for (int64_t k = 0; k < a.k; k += W) {
    typename T::Bits bits[W] = {};
    const int64_t n = a.k - k < W ? a.k - k : W;
    for (int64_t i = 0; i < n; ++i) {
      bits[i] = block[(k + i) / T::kPair * (WICORE_PACK_ROWS * T::kPair) + lane + (k + i) % T::kPair];
    }
    // A row's elements lie a line apart, which the processor does not foresee.
    for (int64_t i = 0; i < n; i += T::kPair) {
      __builtin_prefetch(block + (k + i + kEmbedAhead) * WICORE_PACK_ROWS + lane);
    }
    store_first(out + k, T::get(bits) * scale, n);
  }
}

inline void embed(const wicore_embed& a) {
  with_weights(a.format, a.format == WICORE_BF16 ? WICORE_BF16 : WICORE_F32, [&](auto weights) {
    using T = decltype(weights);
    wicore::parallel_for(a.rows, kRowsPerRange, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t tile = a.ids[i] / WICORE_PACK_ROWS * wicore::tile_bytes(a.k, a.format);
        const void* at = static_cast<const char*>(a.weight) + tile;
        const auto* block = static_cast<const typename T::Bits*>(at);
        const int64_t lane = a.ids[i] % WICORE_PACK_ROWS;
        if constexpr (std::is_same_v<typename T::Bits, uint8_t>) {
          embed_groups<T>(a, block, lane, a.out + i * a.k);
        } else {
          embed_row<T>(a, block, lane, a.out + i * a.k);
        }
      }
    });
  });
}

}  // namespace WICORE_ISA
