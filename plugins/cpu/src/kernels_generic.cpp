// The operators for any processor: four-lane vectors, which compilers map to SSE2 or NEON.
#define WICORE_ISA isa_generic
#define WICORE_ISA_NAME "generic"
#define WICORE_ISA_TABLE kGeneric
#include "kernels_impl.h"
