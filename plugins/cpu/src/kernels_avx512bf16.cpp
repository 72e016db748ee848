// The operators for x86-64-v4+avx512bf16; empty where the compiler cannot target it.
#if defined(__AVX512BF16__)
#define WICORE_ISA isa_avx512bf16
#define WICORE_ISA_NAME "avx512bf16"
#define WICORE_ISA_TABLE kAvx512Bf16
#include "kernels_impl.h"
#else
#include "kernels.h"
namespace wicore {
const Kernels* const kAvx512Bf16 = nullptr;
}
#endif
