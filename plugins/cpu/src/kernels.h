// The operators as function pointers: one table per instruction set, filled by kernels_<isa>.cpp.
#pragma once
#include "wicore_cpu.h"

namespace wicore {

struct Kernels {
  const char* name;
  void (*embed)(const wicore_embed&);
  void (*norm)(const wicore_norm&);
  void (*add_norm)(const wicore_add_norm&);
  void (*geglu)(const wicore_geglu&);
  void (*linear)(const wicore_linear&);
  void (*qk_norm_rope_write)(const wicore_qk_norm_rope_write&);
  void (*attention)(const wicore_attention&);
  void (*page_digest)(const wicore_page_digest&);
};

// nullptr when the instruction set was not compiled in.
extern const Kernels* const kAvx512Bf16;
extern const Kernels* const kAvx2;
extern const Kernels* const kGeneric;

}  // namespace wicore
