// The three inner loops of attention on one block of keys: scores, online softmax, weighted values.
//
// They know rows and lanes, not sequences or pages; attention.h states the order that they keep.
#pragma once
#include <stdint.h>

#include <type_traits>

#include "rope.h"
#include "simd.h"

namespace WICORE_ISA {

constexpr int kRows = 32;  // query rows of one work item
constexpr int kKeys = 32;  // keys of one block

// Dot: queries and keys are bf16 and multiplied as pairs.
template <bool Dot>
struct AttentionScratch {
  alignas(64) std::conditional_t<Dot, uint32_t, float> q[kMaxHeadDim / (Dot ? 2 : 1) * kRows];  // [(pair of) d][row]
  alignas(64) float k[Dot ? 1 : kKeys * kMaxHeadDim];  // keys of the block as float32, unless Dot
  alignas(64) float p[kKeys * kRows];                  // [key][row]: scores, then weights
  alignas(64) float out[kRows * kMaxHeadDim];          // [row][d]: weighted values so far
  alignas(64) float maximum[kRows], sum[kRows], rescale[kRows];
  alignas(64) int32_t first[kRows], last[kRows];       // positions of the keys that a row sees
};

INLINE vf multiply(vf acc, const uint32_t* q, uint32_t k) { return dot_bf16(acc, load<vu>(q), splat_u32(k)); }
INLINE vf multiply(vf acc, const float* q, float k) { return fma(load<vf>(q), splat(k), acc); }

// p[j][row] = scale * q[row] . k[j] for V vectors of rows and kChains keys; `k` rows are `stride` elements apart.
// Keys past the block repeat its last one; nothing reads their scores.
template <int V, class Element, class Bits>
INLINE void score_tile(const Element* q, const Bits* k, int64_t stride, int64_t j0, int64_t keys, int64_t steps,
                       float scale, float* p) {
  constexpr int kChains = 8;
  const Bits* key[kChains];
  for (int j = 0; j < kChains; ++j) key[j] = k + (j0 + j < keys ? j0 + j : keys - 1) * stride;
  vf acc[kChains][V] = {};
  for (int64_t d = 0; d < steps; ++d) {
    for (int j = 0; j < kChains; ++j) {
      const Element value = load<Element>(key[j] + d * static_cast<int64_t>(sizeof(Element) / sizeof(Bits)));
      for (int v = 0; v < V; ++v) acc[j][v] = multiply(acc[j][v], q + d * kRows + v * W, value);
    }
  }
  for (int j = 0; j < kChains; ++j) {
    for (int v = 0; v < V; ++v) store(p + (j0 + j) * kRows + v * W, acc[j][v] * scale);
  }
}

template <class Scratch, class Bits>
INLINE void scores(Scratch& s, const Bits* k, int64_t stride, int64_t keys, int64_t vectors, int64_t dim, float scale) {
  const int64_t steps = dim * static_cast<int64_t>(sizeof(Bits)) / 4;
  for (int64_t j = 0; j < keys; j += 8) {
    int64_t v = 0;
    if constexpr (W == 16) {
      for (; v + 2 <= vectors; v += 2) score_tile<2>(s.q + v * W, k, stride, j, keys, steps, scale, s.p + v * W);
    }
    for (; v < vectors; ++v) score_tile<1>(s.q + v * W, k, stride, j, keys, steps, scale, s.p + v * W);
  }
}

// Online softmax (arXiv:1805.02867) of row vector `v`: scores become weights; maximum, sum and rescale are updated.
template <class Scratch>
INLINE void softmax_block(Scratch& s, int64_t v, int64_t key, int64_t keys, bool masked) {
  float* p = s.p + v * W;
  const vf hidden = splat(-__builtin_inff());
  const vf before = load<vf>(s.maximum + v * W);
  vf maximum = before;
  if (masked) {
    const vi first = load<vi>(s.first + v * W);
    const vi last = load<vi>(s.last + v * W);
    for (int64_t j = 0; j < keys; ++j) {
      const vi at = static_cast<int32_t>(key + j) + vi{};
      const vi seen = (at >= first) & (at <= last);
      store(p + j * kRows, seen ? load<vf>(p + j * kRows) : hidden);
    }
  }
  for (int64_t j = 0; j < keys; ++j) maximum = vmax(maximum, load<vf>(p + j * kRows));
  const vf base = maximum == hidden ? vf{} : maximum;  // nothing seen yet: -inf - -inf would be NaN
  const vf rescale = vexp(before - base);
  vf sum = load<vf>(s.sum + v * W) * rescale;
  for (int64_t j = 0; j < keys; ++j) {
    const vf weight = vexp(load<vf>(p + j * kRows) - base);
    store(p + j * kRows, weight);
    sum += weight;
  }
  store(s.maximum + v * W, maximum);
  store(s.sum + v * W, sum);
  store(s.rescale + v * W, rescale);
}

// out[row, d] = out * rescale + sum over keys of p[key][row] * v[key, d], for R rows and C vectors of d.
template <class KV, int R, int C>
INLINE void value_tile(const typename KV::Bits* v, int64_t stride, int64_t keys, const float* p, const float* rescale,
                       int64_t dim, float* out) {
  vf acc[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) acc[r][c] = fma(load<vf>(out + r * dim + c * W), splat(rescale[r]), vf{});
  }
  for (int64_t j = 0; j < keys; ++j) {
    vf value[C];
    for (int c = 0; c < C; ++c) value[c] = KV::get(v + j * stride + c * W);
    for (int r = 0; r < R; ++r) {
      const vf weight = splat(p[j * kRows + r]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, value[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store(out + r * dim + c * W, acc[r][c]);
  }
}

template <class KV, int R, class Scratch>
INLINE void value_rows(Scratch& s, const typename KV::Bits* v, int64_t stride, int64_t keys, int64_t row, int64_t dim) {
  int64_t d = 0;
  for (; d + 2 * W <= dim; d += 2 * W) {
    value_tile<KV, R, 2>(v + d, stride, keys, s.p + row, s.rescale + row, dim, s.out + row * dim + d);
  }
  for (; d < dim; d += W) {
    value_tile<KV, R, 1>(v + d, stride, keys, s.p + row, s.rescale + row, dim, s.out + row * dim + d);
  }
}

template <class KV, class Scratch>
INLINE void add_values(Scratch& s, const typename KV::Bits* v, int64_t stride, int64_t keys, int64_t rows,
                       int64_t dim) {
  int64_t r = 0;
  if constexpr (W == 16) {
    for (; r + 8 <= rows; r += 8) value_rows<KV, 8>(s, v, stride, keys, r, dim);
  }
  for (; r + 4 <= rows; r += 4) value_rows<KV, 4>(s, v, stride, keys, r, dim);
  if (r + 2 <= rows) {
    value_rows<KV, 2>(s, v, stride, keys, r, dim);
    r += 2;
  }
  if (r < rows) value_rows<KV, 1>(s, v, stride, keys, r, dim);
}

}  // namespace WICORE_ISA
