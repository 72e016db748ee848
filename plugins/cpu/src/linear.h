// Matrix product x [M, K] * weight [N, K]^T over packed weights (see wicore_cpu_pack).
//
// Reduction order, the same for every tile shape: an output element is one float32 accumulator that takes k = 0, 1,
// 2, ... in turn (bf16: pairs of k), or the scaled sums of groups of k in turn. Blocking K stores and reloads
// accumulators, which is exact. So a row's result depends on neither M nor its place in the batch.
#pragma once
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "formats.h"
#include "groups.h"
#include "pool.h"
#include "quantize.h"
#include "simd.h"
#include "wicore_cpu.h"

namespace WICORE_ISA {

constexpr int kTile = WICORE_PACK_ROWS;  // output columns of one work item
constexpr int kMaxRows = 96;             // rows of one work item
constexpr int kBlockK = 256;

constexpr int kRegisterRows = W == 16 ? 6 : 4;

// Vectors of columns per register tile: chains enough to hide latency, registers few enough not to spill.
constexpr int register_columns(int rows) { return W == 16 || rows == 1 ? 4 : 2; }

// acc[r][c] += x[r, k0:k1] * block[k0:k1, column + c * W], `block` the packed weights of one tile.
template <class T, int R, int C>
INLINE void accumulate(vf (&acc)[R][C], const typename T::Activation* x, int64_t ldx, const typename T::Bits* block,
                       int64_t k0, int64_t k1, int column) {
  for (int64_t k = k0; k < k1; ++k) {
    const typename T::Bits* line = block + k * kTile + column;
    if (column == 0) request_line(line, kTile * sizeof(typename T::Bits));
    vf w[C];
    for (int c = 0; c < C; ++c) w[c] = T::get(line + c * W);
    for (int r = 0; r < R; ++r) {
      const vf value = splat(widen(x[r * ldx + k]));
      for (int c = 0; c < C; ++c) acc[r][c] = fma(w[c], value, acc[r][c]);
    }
  }
}

template <int R, int C>
INLINE void accumulate_pairs(vf (&acc)[R][C], const uint16_t* x, int64_t ldx, const uint16_t* block, int64_t k0,
                             int64_t k1, int column) {
  for (int64_t k = k0; k < k1; k += 2) {
    const uint16_t* line = block + k * kTile + column * 2;
    if (column == 0) request_line(line, kTile * 4);
    vu w[C];
    for (int c = 0; c < C; ++c) w[c] = load<vu>(line + c * W * 2);
    for (int r = 0; r < R; ++r) {
      const vu pair = splat_u32(load<uint32_t>(x + r * ldx + k));
      for (int c = 0; c < C; ++c) acc[r][c] = dot_bf16(acc[r][c], w[c], pair);
    }
  }
}

// One register tile: R rows, C vectors of columns, k0 <= k < k1; `out` [rows][kTile] carries the accumulators.
template <class T, int R, int C>
INLINE void register_tile(const typename T::Activation* x, int64_t ldx, const typename T::Bits* block, int64_t k0,
                          int64_t k1, int column, float* out) {
  vf acc[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) acc[r][c] = k0 == 0 ? vf{} : load<vf>(out + r * kTile + column + c * W);
  }
  if constexpr (T::kPair == 1) {
    accumulate<T, R, C>(acc, x, ldx, block, k0, k1, column);
  } else {
    const int64_t whole = k1 / 2 * 2;
    accumulate_pairs<R, C>(acc, x, ldx, block, k0, whole, column);
    if (whole < k1) {  // odd K: the packed weights end in zeros
      for (int r = 0; r < R; ++r) {
        const vu last = splat_u32(x[r * ldx + whole]);
        for (int c = 0; c < C; ++c) {
          acc[r][c] = dot_bf16(acc[r][c], load<vu>(block + whole * kTile + (column + c * W) * 2), last);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store(out + r * kTile + column + c * W, acc[r][c]);
  }
}

// One register tile of a quantized format.
template <class T, int R, int C>
INLINE void register_groups(const typename T::Activation* x, int64_t ldx, const uint8_t* block, int64_t k0, int64_t k1,
                            int column, float* out) {
  for (int64_t k = k0; k < k1; k += T::kGroup.size) {
    const uint8_t* group = block + k / T::kGroup.size * T::kGroup.bytes();
    if (column == 0) request_line(group + T::kCodes, T::kGroup.bytes() - T::kCodes);
    vf acc[R][C] = {};
    T::accumulate(acc, x + k, ldx, group, column);
    for (int c = 0; c < C; ++c) {
      const int at = column + c * W;
      const vf scale = T::scale(group, at);
      for (int r = 0; r < R; ++r) {
        vf total = k == 0 ? vf{} : load<vf>(out + r * kTile + at);
        total = fma(acc[r][c], scale, total);
        if constexpr (T::kGroup.minimum != 0) total = fma(T::minimum(group, at), splat(T::sum(x + k + r * ldx)), total);
        store(out + r * kTile + at, total);
      }
    }
  }
}

template <class T, int R>
INLINE void tile_rows(const typename T::Activation* x, int64_t ldx, const typename T::Bits* block, int64_t k0,
                      int64_t k1, float* out) {
  constexpr int C = register_columns(R);
  for (int column = 0; column < kTile; column += C * W) {
    if constexpr (std::is_same_v<typename T::Bits, uint8_t>) {
      register_groups<T, R, C>(x, ldx, block, k0, k1, column, out);
    } else {
      register_tile<T, R, C>(x, ldx, block, k0, k1, column, out);
    }
  }
}

template <class T>
void tile(const typename T::Activation* x, int64_t rows, int64_t k, const typename T::Bits* block, float* out) {
  for (int64_t k0 = 0; k0 < k; k0 += kBlockK) {
    const int64_t k1 = k0 + kBlockK < k ? k0 + kBlockK : k;
    int64_t r = 0;
    for (; r + kRegisterRows <= rows; r += kRegisterRows) {
      tile_rows<T, kRegisterRows>(x + r * k, k, block, k0, k1, out + r * kTile);
    }
    switch (rows - r) {
      case 1: tile_rows<T, 1>(x + r * k, k, block, k0, k1, out + r * kTile); break;
      case 2: tile_rows<T, 2>(x + r * k, k, block, k0, k1, out + r * kTile); break;
      case 3: tile_rows<T, 3>(x + r * k, k, block, k0, k1, out + r * kTile); break;
      case 4: tile_rows<T, 4>(x + r * k, k, block, k0, k1, out + r * kTile); break;
      case 5: tile_rows<T, 5>(x + r * k, k, block, k0, k1, out + r * kTile); break;
      default: break;
    }
  }
}

inline void write_tile(const wicore_linear& a, const float* tile, int64_t row, int64_t rows, int64_t column) {
  const int64_t columns = a.n - column < kTile ? a.n - column : kTile;
  for (int64_t r = 0; r < rows; ++r) {
    float* out = a.out + (row + r) * a.n + column;
    if (a.row_scale == nullptr) {
      memcpy(out, tile + r * kTile, static_cast<size_t>(columns) * sizeof(float));
      continue;
    }
    const float activation_scale = a.quantized_scale[row + r];
    for (int64_t c = 0; c < columns; ++c) out[c] = tile[r * kTile + c] * (activation_scale * a.row_scale[column + c]);
  }
}

inline void linear(const wicore_linear& a) {
  if (a.rows <= 0) return;
  const int64_t fewest = (a.rows + kMaxRows - 1) / kMaxRows;  // blocks of rows
  const int64_t block_rows = ((a.rows + fewest - 1) / fewest + kRegisterRows - 1) / kRegisterRows * kRegisterRows;
  const int64_t row_blocks = (a.rows + block_rows - 1) / block_rows;
  if (a.row_scale != nullptr) quantize_rows(a);
  const void* x = a.row_scale != nullptr ? a.quantized : a.x;
  const int64_t items = (a.n + kTile - 1) / kTile * row_blocks;
  const int64_t share = items / (wicore::threads() * 8);
  const int64_t grain = share < 1 ? 1 : (share > 16 ? 16 : share);
  with_weights(a.format, a.dtype, [&](auto weights) {
    using T = decltype(weights);
    wicore::parallel_for(items, grain, [&](int64_t begin, int64_t end) {
      alignas(64) float out[kMaxRows * kTile];
      for (int64_t i = begin; i < end; ++i) {
        // Rows vary fastest: the weights of a tile are read from memory once, then from cache.
        const int64_t row = i % row_blocks * block_rows, column_tile = i / row_blocks;
        const int64_t rows = a.rows - row < block_rows ? a.rows - row : block_rows;
        const void* block = static_cast<const char*>(a.weight) + column_tile * wicore::tile_bytes(a.k, a.format);
        tile<T>(static_cast<const typename T::Activation*>(x) + row * a.k, rows, a.k,
                static_cast<const typename T::Bits*>(block), out);
        write_tile(a, out, row, rows, column_tile * kTile);
      }
    });
  });
}

}  // namespace WICORE_ISA
