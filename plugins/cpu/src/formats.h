// Bytes of packed weights: the layout of one tile of WICORE_PACK_ROWS rows, see wicore_cpu_pack.
#pragma once
#include <stdint.h>

#include "wicore_cpu.h"

namespace wicore {

// A group of a quantized format: `size` values along k of each row; per row of the tile bytes of codes, of the scale
// and of the minimum, which lie behind one another. `size` 0: not quantized.
struct Group {
  int64_t size, codes, scale, minimum;
  constexpr int64_t bytes() const { return WICORE_PACK_ROWS * (codes + scale + minimum); }
};

constexpr Group group_of(int64_t format) {
  switch (format) {
    case WICORE_Q4_0: return {32, 16, 2, 0};
    case WICORE_Q4_1: return {32, 16, 2, 2};
    case WICORE_Q8_0: return {32, 32, 2, 0};
    case WICORE_Q6_K: return {16, 16, 4, 0};
    default: return {0, 0, 0, 0};
  }
}

constexpr int64_t tile_bytes(int64_t k, int64_t format) {
  const Group group = group_of(format);
  if (group.size != 0) return k / group.size * group.bytes();
  if (format == WICORE_BF16) return WICORE_PACK_ROWS * 2 * ((k + 1) / 2 * 2);
  return WICORE_PACK_ROWS * (format == WICORE_F32 ? 4 : 2) * k;
}

}  // namespace wicore
