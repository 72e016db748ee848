// The operators for x86-64-v3; empty where the compiler cannot target it.
#if defined(__AVX2__)
#define WICORE_ISA isa_avx2
#define WICORE_ISA_NAME "avx2"
#define WICORE_ISA_TABLE kAvx2
#include "kernels_impl.h"
#else
#include "kernels.h"
namespace wicore {
const Kernels* const kAvx2 = nullptr;
}
#endif
