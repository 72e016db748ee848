// Weight packing: rows in blocks of 64, interleaved so that a product reads its weights as one forward stream.
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include <mutex>

#include "pool.h"
#include "wicore_cpu.h"

namespace {

constexpr int64_t kRows = WICORE_PACK_ROWS;
constexpr int64_t kHugePage = int64_t{2} << 20;

int64_t block_elements(int64_t k, int64_t dtype) { return kRows * (dtype == WICORE_BF16 ? (k + 1) / 2 * 2 : k); }

int64_t element_bytes(int64_t dtype) { return dtype == WICORE_F32 ? 4 : 2; }

struct PackJob {
  char* packed;
  const char* source;
  int64_t first_row, rows, k, dtype;
};

template <class T>
void pack_block(const PackJob& job, int64_t block, int64_t pair) {
  T* out = reinterpret_cast<T*>(job.packed) + block * block_elements(job.k, job.dtype);
  const int64_t begin = block * kRows > job.first_row ? block * kRows : job.first_row;
  const int64_t limit = job.first_row + job.rows;
  const int64_t end = (block + 1) * kRows < limit ? (block + 1) * kRows : limit;
  for (int64_t k = 0; k < job.k; ++k) {
    T* line = out + (k / pair) * kRows * pair + k % pair;
    for (int64_t row = begin; row < end; ++row) {
      memcpy(line + (row - block * kRows) * pair, job.source + ((row - job.first_row) * job.k + k) * sizeof(T),
             sizeof(T));
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

int64_t wicore_cpu_packed_bytes(int64_t n, int64_t k, int64_t dtype) {
  return (n + kRows - 1) / kRows * block_elements(k, dtype) * element_bytes(dtype);
}

void wicore_cpu_pack(void* packed, const void* source, int64_t first_row, int64_t rows, int64_t n, int64_t k,
                     int64_t dtype) {
  std::lock_guard<std::mutex> lock(wicore::entry_mutex());
  if (first_row == 0) advise_huge_pages(packed, wicore_cpu_packed_bytes(n, k, dtype));
  const PackJob job{static_cast<char*>(packed), static_cast<const char*>(source), first_row, rows, k, dtype};
  const int64_t first = first_row / kRows;
  wicore::parallel_for((first_row + rows + kRows - 1) / kRows - first, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = first + begin; block < first + end; ++block) {
      if (dtype == WICORE_F32) {
        pack_block<uint32_t>(job, block, 1);
      } else {
        pack_block<uint16_t>(job, block, dtype == WICORE_BF16 ? 2 : 1);
      }
    }
  });
}

}  // extern "C"
