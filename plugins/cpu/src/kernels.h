// The operators as function pointers: one table per instruction set, filled by kernels_<isa>.cpp.
#pragma once
#include <stdint.h>

#include "wicore_cpu.h"

namespace wicore {

// XXH3-128 of what was added since `held` was set to 0.
struct Xxh3 {
  uint64_t lane[8];
  uint8_t tail[1024];
  int64_t held = 0, length = 0;
};

struct Kernels {
  const char* name;
  void (*embed)(const wicore_embed&);
  void (*norm)(const wicore_norm&);
  void (*add_norm)(const wicore_add_norm&);
  void (*geglu)(const wicore_geglu&);
  void (*linear)(const wicore_linear&);
  void (*qk_norm_rope_write)(const wicore_qk_norm_rope_write&);
  void (*attention)(const wicore_attention&);
  void (*digest_piece)(const uint32_t* key, int64_t second_pairs, const uint8_t* data, int64_t bytes, int64_t begin,
                       uint64_t* sums);
  void (*xxh3_add)(Xxh3&, const uint8_t* data, int64_t bytes);
  void (*xxh3_end)(Xxh3&, uint8_t* out);
  void (*resize_rows)(const uint8_t* x, int64_t width, int64_t rows, int64_t size, uint8_t* out);
  void (*resize_columns)(const uint8_t* x, int64_t height, int64_t size, int64_t first, int64_t last, uint8_t* square);
};

// Of the instruction set in use.
const Kernels& active_kernels();

// nullptr when the instruction set was not compiled in.
extern const Kernels* const kAvx512Bf16;
extern const Kernels* const kAvx2;
extern const Kernels* const kGeneric;

}  // namespace wicore
