// Digest of a page's bytes: two levels of NH^2, as wicore_trt/runtime/page_digest.py defines it.
#pragma once
#include <stdint.h>
#include <string.h>

#include "wicore_cpu.h"

namespace WICORE_ISA {

constexpr int64_t kPairs = 512;                        // of 32-bit words in a chunk
constexpr int64_t kChunk = 2 * kPairs * sizeof(uint32_t);

inline uint64_t nh(uint32_t a, uint32_t b, uint32_t key_a, uint32_t key_b) {
  return static_cast<uint64_t>(a + key_a) * static_cast<uint64_t>(b + key_b);
}

inline void page_digest(const wicore_page_digest& args) {
  const uint32_t* key_a = args.key;
  const uint32_t* key_b = key_a + kPairs + 1;
  const uint32_t* second_a = key_b + kPairs + 1;
  const uint32_t* second_b = second_a + args.second_pairs;
  uint64_t sums[2] = {0, 0};
  int64_t chunk = 0;
  uint32_t last[2 * kPairs];
  for (int64_t part = 0; part < args.parts; ++part) {
    const char* bytes = static_cast<const char*>(args.starts[part]);
    for (int64_t at = 0; at < args.lengths[part]; at += kChunk, ++chunk) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(bytes + at);
      if (args.lengths[part] - at < kChunk) {
        memset(last, 0, sizeof(last));
        memcpy(last, bytes + at, static_cast<size_t>(args.lengths[part] - at));
        words = last;
      }
      uint64_t s = 0, t = 0;
      for (int64_t i = 0; i < kPairs; ++i) {
        s += nh(words[i], words[kPairs + i], key_a[i], key_b[i]);
        t += nh(words[i], words[kPairs + i], key_a[i + 1], key_b[i + 1]);
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
  args.out[0] = sums[0];
  args.out[1] = sums[1];
}

}  // namespace WICORE_ISA
