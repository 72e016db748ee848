// Weight packing: rows in tiles of 64, interleaved so that a product reads its weights as one forward stream.
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include <mutex>

#include "formats.h"
#include "pool.h"
#include "wicore_cpu.h"

namespace {

constexpr int64_t kRows = WICORE_PACK_ROWS;
constexpr int64_t kHugePage = int64_t{2} << 20;

// Rows of one tile, from `row` of a matrix [n, k].
struct PackJob {
  uint8_t* tile;
  const uint8_t *source, *scales, *minimums;
  int64_t row, rows, k;
};

template <class T>
void pack_tile(const PackJob& job, int64_t pair) {
  T* tile = reinterpret_cast<T*>(job.tile);
  for (int64_t k = 0; k < job.k; ++k) {
    T* line = tile + (k / pair) * kRows * pair + k % pair;
    for (int64_t row = 0; row < job.rows; ++row) {
      memcpy(line + row * pair, job.source + ((job.row + row) * job.k + k) * static_cast<int64_t>(sizeof(T)), sizeof(T));
    }
  }
}

// Eight k of a row are 32 bits: k = 2 j + i is nibble j of 16-bit half i, as a number from -8 to 7.
void pack_nibbles(const uint8_t* source, uint8_t* out) {
  for (int eight = 0; eight < 4; ++eight) {
    uint32_t bits = 0;
    for (int i = 0; i < 8; ++i) {
      const int k = 8 * eight + i;
      const uint32_t code = (k < 16 ? source[k] & 15u : source[k - 16] >> 4) ^ 8u;
      bits |= code << (i / 2 * 4 + i % 2 * 16);
    }
    memcpy(out + eight * 4 * kRows, &bits, sizeof bits);
  }
}

void pack_groups(const PackJob& job, const wicore::Group& group) {
  const int64_t groups = job.k / group.size;
  for (int64_t row = 0; row < job.rows; ++row) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = (job.row + row) * groups + g;
      const uint8_t* codes = job.source + at * group.codes;
      uint8_t* out = job.tile + g * group.bytes();
      if (group.codes == group.size) {
        for (int64_t k = 0; k < group.size; ++k) out[k * kRows + row] = codes[k];
      } else {
        pack_nibbles(codes, out + row * 4);
      }
      uint8_t* scale = out + kRows * group.codes + row * group.scale;
      memcpy(scale, job.scales + at * group.scale, static_cast<size_t>(group.scale));
      if (group.minimum == 0) continue;
      uint8_t* minimum = out + kRows * (group.codes + group.scale) + row * group.minimum;
      memcpy(minimum, job.minimums + at * group.minimum, static_cast<size_t>(group.minimum));
    }
  }
}

// Streaming weights through 4 KiB pages costs a TLB miss per page; ask for huge ones where the buffer holds any.
void advise_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t mask = static_cast<uintptr_t>(kHugePage) - 1;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + mask) & ~mask;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) & ~mask;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

}  // namespace

extern "C" {

int64_t wicore_cpu_packed_bytes(int64_t n, int64_t k, int64_t format) {
  return (n + kRows - 1) / kRows * wicore::tile_bytes(k, format);
}

void wicore_cpu_pack(void* packed, const void* source, const void* scales, const void* minimums, int64_t n, int64_t k,
                     int64_t format) {
  std::lock_guard<std::mutex> lock(wicore::entry_mutex());
  advise_huge_pages(packed, wicore_cpu_packed_bytes(n, k, format));
  const wicore::Group group = wicore::group_of(format);
  wicore::parallel_for((n + kRows - 1) / kRows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = tile * kRows;
      const PackJob job{static_cast<uint8_t*>(packed) + tile * wicore::tile_bytes(k, format),
                        static_cast<const uint8_t*>(source),
                        static_cast<const uint8_t*>(scales),
                        static_cast<const uint8_t*>(minimums),
                        row,
                        n - row < kRows ? n - row : kRows,
                        k};
      if (group.size != 0) {
        pack_groups(job, group);
      } else if (format == WICORE_F32) {
        pack_tile<uint32_t>(job, 1);
      } else {
        pack_tile<uint16_t>(job, format == WICORE_BF16 ? 2 : 1);
      }
    }
  });
}

}  // extern "C"
