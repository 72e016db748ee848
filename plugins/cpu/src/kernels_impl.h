// Body of every kernels_<isa>.cpp: the operators compiled for that file's instruction set, as a table.
// The file defines WICORE_ISA (a namespace), WICORE_ISA_NAME and WICORE_ISA_TABLE first.
// IWYU pragma: begin_exports
#include "attention.h"
#include "checksum.h"
#include "digest.h"
#include "kernels.h"
#include "linear.h"
#include "resize.h"
#include "rope.h"
#include "rows.h"
// IWYU pragma: end_exports

namespace wicore {
namespace {
constexpr Kernels kTable = {WICORE_ISA_NAME,           WICORE_ISA::embed,
                            WICORE_ISA::norm,          WICORE_ISA::add_norm,
                            WICORE_ISA::geglu,         WICORE_ISA::linear,
                            WICORE_ISA::qk_norm_rope_write, WICORE_ISA::attention,
                            WICORE_ISA::digest_piece,       WICORE_ISA::xxh3_add,
                            WICORE_ISA::xxh3_end,           WICORE_ISA::resize_rows,
                            WICORE_ISA::resize_columns};
}  // namespace

const Kernels* const WICORE_ISA_TABLE = &kTable;

}  // namespace wicore
