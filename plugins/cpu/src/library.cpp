// The C ABI: choice of the instruction set, and dispatch of commands to it.
#include <stdint.h>
#include <string.h>

#include <initializer_list>
#include <mutex>

#include "kernels.h"
#include "pool.h"
#include "wicore_cpu.h"

namespace wicore {
namespace {

bool supported(const Kernels* kernels) {
  if (kernels == nullptr) return false;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (kernels == kAvx512Bf16) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512bf16");
  }
  if (kernels == kAvx2) {
    // F16C and the rest of x86-64-v3 came before or with AVX2 on every CPU that has it.
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  }
#endif
  return kernels == kGeneric;
}

const Kernels* best() {
  for (const Kernels* k : {kAvx512Bf16, kAvx2}) {
    if (supported(k)) return k;
  }
  return kGeneric;
}

const Kernels*& active() {
  static const Kernels* kernels = best();
  return kernels;
}

void gather_rows(const wicore_gather_rows& a) {
  for (int64_t i = 0; i < a.rows; ++i) {
    memcpy(static_cast<char*>(a.out) + i * a.row_bytes, static_cast<const char*>(a.x) + a.index[i] * a.row_bytes,
           static_cast<size_t>(a.row_bytes));
  }
}

template <class Args>
const Args& as(const void* args) {
  return *static_cast<const Args*>(args);
}

bool dispatch(const Kernels& k, const wicore_command& c) {
  switch (c.op) {
    case WICORE_OP_EMBED: k.embed(as<wicore_embed>(c.args)); return true;
    case WICORE_OP_NORM: k.norm(as<wicore_norm>(c.args)); return true;
    case WICORE_OP_ADD_NORM: k.add_norm(as<wicore_add_norm>(c.args)); return true;
    case WICORE_OP_GEGLU: k.geglu(as<wicore_geglu>(c.args)); return true;
    case WICORE_OP_LINEAR: k.linear(as<wicore_linear>(c.args)); return true;
    case WICORE_OP_QK_NORM_ROPE_WRITE: k.qk_norm_rope_write(as<wicore_qk_norm_rope_write>(c.args)); return true;
    case WICORE_OP_ATTENTION: k.attention(as<wicore_attention>(c.args)); return true;
    case WICORE_OP_GATHER_ROWS: gather_rows(as<wicore_gather_rows>(c.args)); return true;
    default: return false;
  }
}

}  // namespace

const Kernels& active_kernels() { return *active(); }

}  // namespace wicore

extern "C" {

int64_t wicore_cpu_abi(void) { return WICORE_CPU_ABI; }

void wicore_cpu_set_threads(int64_t threads) {
  std::lock_guard<std::mutex> lock(wicore::entry_mutex());
  wicore::set_threads(threads);
}


int wicore_cpu_set_isa(const char* name) {
  std::lock_guard<std::mutex> lock(wicore::entry_mutex());
  if (strcmp(name, "auto") == 0) {
    wicore::active() = wicore::best();
    return 0;
  }
  for (const wicore::Kernels* k : {wicore::kAvx512Bf16, wicore::kAvx2, wicore::kGeneric}) {
    if (wicore::supported(k) && strcmp(name, k->name) == 0) {
      wicore::active() = k;
      return 0;
    }
  }
  return -1;
}

const char* wicore_cpu_isa(void) { return wicore::active()->name; }

int wicore_cpu_run(const wicore_command* commands, int64_t count) {
  std::lock_guard<std::mutex> lock(wicore::entry_mutex());
  for (int64_t i = 0; i < count; ++i) {
    if (!wicore::dispatch(*wicore::active(), commands[i])) return -1;
  }
  return 0;
}

int wicore_cpu_copy_all(wicore_copy_async copy, const uint64_t* targets, const uint64_t* sources, const uint64_t* bytes,
                        int64_t count, void* stream) {
  for (int64_t i = 0; i < count; ++i) {
    if (int status = copy(targets[i], sources[i], bytes[i], stream)) return status;
  }
  return 0;
}

void wicore_cpu_resize_rows(const uint8_t* x, int64_t width, int64_t rows, int64_t size, uint8_t* out) {
  wicore::active()->resize_rows(x, width, rows, size, out);
}

void wicore_cpu_resize_columns(const uint8_t* x, int64_t height, int64_t size, int64_t first, int64_t last,
                               uint8_t* square) {
  wicore::active()->resize_columns(x, height, size, first, last, square);
}

void wicore_cpu_page_digest(const wicore_page_digest* args) {
  args->out[0] = args->out[1] = 0;
  for (int64_t part = 0, begin = 0; part < args->parts; begin += args->lengths[part++]) {
    const auto* data = static_cast<const uint8_t*>(args->starts[part]);
    wicore::active()->digest_piece(args->key, args->second_pairs, data, args->lengths[part], begin, args->out);
  }
}

}  // extern "C"
