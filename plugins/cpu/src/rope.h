// QK-norm, rotary embedding and the write of k and v into the paged KV pool, token by token.
#pragma once
#include <stdint.h>

#include "pool.h"
#include "rows.h"
#include "simd.h"
#include "wicore_cpu.h"

namespace WICORE_ISA {

constexpr int kMaxHeadDim = 256;

// Which sequence a token of the ragged batch belongs to.
INLINE int64_t sequence_of(const wicore_step& step, int64_t token) {
  int64_t s = 0;
  while (step.cu_seqlens[s + 1] <= token) ++s;
  return s;
}

// RMSNorm over the head, then rotation: (a, b) -> (a cos - b sin, b cos + a sin) for the halves a and b.
INLINE void norm_rotate(const float* x, const float* weight, const float* cos, const float* sin, int64_t dim, float eps,
                        float* out) {
  alignas(64) float scaled[kMaxHeadDim];
  normalize<F32>(x, weight, dim, inverse_rms(x, dim, eps), scaled);
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = scaled[i];
    const float b = scaled[i + half];
    out[i] = a * cos[i] - b * sin[i];
    out[i + half] = b * cos[i] + a * sin[i];
  }
}

template <class Out>
INLINE void put_row(const float* x, int64_t dim, typename Out::Bits* out) {  // dim is a multiple of 16
  for (int64_t i = 0; i < dim; i += W) Out::put(out + i, load<vf>(x + i));
}

template <class Out, class KV>
void rope_range(const wicore_qk_norm_rope_write& a, int64_t begin, int64_t end) {
  const wicore_kv& kv = *a.kv;
  const wicore_step& step = *kv.step;
  const int64_t dim = kv.head_dim;
  const float eps = static_cast<float>(a.eps);
  alignas(64) float rotated[kMaxHeadDim];
  int64_t sequence = sequence_of(step, begin);
  for (int64_t token = begin; token < end; ++token) {
    while (step.cu_seqlens[sequence + 1] <= token) ++sequence;
    const int64_t position = step.positions[token];
    const float* cos = a.cos + position * (dim / 2);
    const float* sin = a.sin + position * (dim / 2);
    const float* x = a.qkv + token * (kv.heads + 2 * kv.kv_heads) * dim;
    auto* q = static_cast<typename Out::Bits*>(a.q) + token * kv.heads * dim;
    for (int64_t h = 0; h < kv.heads; ++h) {
      norm_rotate(x + h * dim, a.q_weight, cos, sin, dim, eps, rotated);
      put_row<Out>(rotated, dim, q + h * dim);
    }
    const int64_t slot = step.page_table[sequence * step.table_width + position / kv.page_tokens];
    if (slot < 0) continue;
    auto* k = static_cast<typename KV::Bits*>(kv.pool) + slot * kv.page_stride + kv.layer_offset +
              position % kv.page_tokens * kv.kv_heads * dim;
    auto* v = k + kv.page_tokens * kv.kv_heads * dim;
    x += kv.heads * dim;
    for (int64_t h = 0; h < kv.kv_heads; ++h) {
      norm_rotate(x + h * dim, a.k_weight, cos, sin, dim, eps, rotated);
      put_row<KV>(rotated, dim, k + h * dim);
      put_row<KV>(x + (kv.kv_heads + h) * dim, dim, v + h * dim);
    }
  }
}

inline void qk_norm_rope_write(const wicore_qk_norm_rope_write& a) {
  with_storage<F16InF32>(a.dtype, [&](auto out) {
    with_storage<F16>(a.kv->kv_dtype, [&](auto kv) {
      wicore::parallel_for(a.rows, kRowsPerRange, [&](int64_t begin, int64_t end) {
        rope_range<decltype(out), decltype(kv)>(a, begin, end);
      });
    });
  });
}

}  // namespace WICORE_ISA
