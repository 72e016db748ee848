// Digest of a page's bytes: two levels of NH^2, as wicore_trt/runtime/page_digest.py defines it.
#pragma once
#include <stdint.h>
#include <string.h>

#include "simd.h"
#include "wicore_cpu.h"

namespace WICORE_ISA {

constexpr int64_t kPairs = 512;                        // of 32-bit words in a chunk
constexpr int64_t kChunk = 2 * kPairs * sizeof(uint32_t);

inline uint64_t nh(uint32_t a, uint32_t b, uint32_t key_a, uint32_t key_b) {
  return static_cast<uint64_t>(a + key_a) * static_cast<uint64_t>(b + key_b);
}

// Adds `bytes` of a page from its byte `begin` on, a multiple of a chunk.
inline void digest_piece(const uint32_t* key_a, int64_t second_pairs, const uint8_t* data, int64_t bytes, int64_t begin,
                         uint64_t* sums) {
  const uint32_t* key_b = key_a + kPairs + 1;
  const uint32_t* second_a = key_b + kPairs + 1;
  const uint32_t* second_b = second_a + second_pairs;
  int64_t chunk = begin / kChunk;
  uint32_t last[2 * kPairs];
  for (int64_t at = 0; at < bytes; at += kChunk, ++chunk) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(data + at);
    if (bytes - at < kChunk) {
      memset(last, 0, sizeof(last));
      memcpy(last, data + at, static_cast<size_t>(bytes - at));
      words = last;
    }
    vq sum[2] = {};
    for (int64_t i = 0; i < kPairs; i += W) {
      const vu a = load<vu>(words + i), b = load<vu>(words + kPairs + i);
      for (int64_t shift = 0; shift < 2; ++shift) {
        const vq x = (vq)(a + load<vu>(key_a + i + shift)), y = (vq)(b + load<vu>(key_b + i + shift));
        sum[shift] += mul_halves(x, y) + mul_halves(x >> 32, y >> 32);
      }
    }
    uint64_t s = 0, t = 0;
    for (int i = 0; i < Q; ++i) {
      s += sum[0][i];
      t += sum[1][i];
    }
    const uint32_t four[4] = {static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32), static_cast<uint32_t>(t),
                              static_cast<uint32_t>(t >> 32)};
    for (int64_t shift = 0; shift < 2; ++shift) {
      const int64_t k = 2 * chunk + shift;
      sums[shift] += nh(four[0], four[1], second_a[k], second_b[k]);
      sums[shift] += nh(four[2], four[3], second_a[k + 1], second_b[k + 1]);
    }
  }
}

}  // namespace WICORE_ISA
