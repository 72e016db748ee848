// Attention over paged KV, causal but within images, one work item per (sequence, KV head, block of query rows).
//
// A query row is (token, head of the group); a vector lane is a row. Keys are taken in blocks by absolute position:
// pages in ascending order, each cut every kKeys tokens. Per row and key block the sequence is always the same:
// scores (ascending d), block maximum, rescale, exponentials, sum and weighted values (ascending key).
//
// Work that a row cannot see is an exact no-op, so a row's bits do not depend on which rows share its block: a masked
// key has weight 0, an unchanged maximum rescales by 1, and adding +0 after the rescale keeps accumulators from being
// -0, the one value that adding +0 would change. Keys that no row of the item sees are not read at all: their
// slots may hold anything.
#pragma once
#include <stdint.h>
#include <string.h>

#include "attention_tiles.h"
#include "pool.h"
#include "rope.h"
#include "simd.h"
#include "wicore_cpu.h"

namespace WICORE_ISA {

struct AttentionBlock {
  int64_t sequence, kv_head, first_row, rows;
};

// Work item `index` of the step, counted over sequences, KV heads and blocks of rows.
inline AttentionBlock attention_block(const wicore_kv& kv, int64_t index) {
  const int64_t group = kv.heads / kv.kv_heads;
  for (int64_t s = 0; s < kv.step->num_seqs; ++s) {
    const int64_t rows = (kv.step->cu_seqlens[s + 1] - kv.step->cu_seqlens[s]) * group;
    const int64_t blocks = (rows + kRows - 1) / kRows;
    if (index < blocks * kv.kv_heads) {
      const int64_t first = index % blocks * kRows;
      return {s, index / blocks, first, rows - first < kRows ? rows - first : kRows};
    }
    index -= blocks * kv.kv_heads;
  }
  return {0, 0, 0, 0};
}

// KV and Operand are the storage of keys and values, and of queries and results.
template <class KV, class Operand>
struct AttentionItem {
  static constexpr bool kDot = std::is_same_v<KV, BF16> && std::is_same_v<Operand, BF16>;
  using Scratch = AttentionScratch<kDot>;
  const wicore_attention& a;
  const wicore_kv& kv;
  AttentionBlock block;
  Scratch& s;

  int64_t group() const { return kv.heads / kv.kv_heads; }
  int64_t token(int64_t row) const { return kv.step->cu_seqlens[block.sequence] + (block.first_row + row) / group(); }
  int64_t head(int64_t row) const { return block.kv_head * group() + (block.first_row + row) % group(); }

  int64_t row_offset(int64_t row) const { return (token(row) * kv.heads + head(row)) * kv.head_dim; }

  // Transposes one query row into its lane; no query (nullptr) is zeros.
  void load_query(const typename Operand::Bits* q, int64_t row) {
    if constexpr (kDot) {
      for (int64_t d = 0; d < kv.head_dim / 2; ++d) s.q[d * kRows + row] = q ? load<uint32_t>(q + d * 2) : 0;
    } else {
      for (int64_t d = 0; d < kv.head_dim; ++d) s.q[d * kRows + row] = q ? scalar_value<Operand>(q[d]) : 0.0f;
    }
  }

  // Rows beyond the block see no key and have zero queries.
  void begin(int64_t padded) {
    for (int64_t r = 0; r < padded; ++r) {
      const bool real = r < block.rows;
      const int32_t position = real ? kv.step->positions[token(r)] : -1;
      s.last[r] = real && kv.step->key_ends ? kv.step->key_ends[token(r)] - 1 : position;
      const int64_t first = a.window > 0 ? position - a.window + 1 : 0;
      s.first[r] = static_cast<int32_t>(first > 0 ? first : 0);
      s.maximum[r] = -__builtin_inff();
      s.sum[r] = 0.0f;
      load_query(real ? static_cast<const typename Operand::Bits*>(a.q) + row_offset(r) : nullptr, r);
      if (real) memset(s.out + r * kv.head_dim, 0, static_cast<size_t>(kv.head_dim) * sizeof(float));
    }
  }

  void run() {
    const int64_t vectors = (block.rows + W - 1) / W;
    begin(vectors * W);
    const int64_t lowest = s.first[0];
    const int64_t highest = s.last[block.rows - 1];
    for (int64_t page = lowest / kv.page_tokens; page <= highest / kv.page_tokens; ++page) {
      const int64_t slot = kv.step->page_table[block.sequence * kv.step->table_width + page];
      if (slot < 0) continue;
      for (int64_t offset = 0; offset < kv.page_tokens; offset += kKeys) {
        const int64_t key = page * kv.page_tokens + offset;
        const int64_t size = kv.page_tokens - offset < kKeys ? kv.page_tokens - offset : kKeys;
        const int64_t begin = lowest > key ? lowest - key : 0;
        const int64_t end = highest + 1 - key < size ? highest + 1 - key : size;
        if (begin < end) key_block(slot, offset + begin, key + begin, end - begin, vectors);
      }
    }
    finish();
  }

  void key_block(int64_t slot, int64_t offset, int64_t key, int64_t keys, int64_t vectors) {
    const int64_t stride = kv.kv_heads * kv.head_dim;
    const auto* k = static_cast<const typename KV::Bits*>(kv.pool) + slot * kv.page_stride + kv.layer_offset +
                    offset * stride + block.kv_head * kv.head_dim;
    for (int64_t j = 0; j < keys; ++j) {  // values come from memory while scores are computed
      const auto* v = k + (kv.page_tokens + j) * stride;
      for (int64_t d = 0; d < kv.head_dim; d += 64 / static_cast<int64_t>(sizeof *v)) __builtin_prefetch(v + d);
    }
    if constexpr (kDot) {
      scores(s, reinterpret_cast<const uint16_t*>(k), stride, keys, vectors, kv.head_dim, static_cast<float>(a.scale));
    } else {
      for (int64_t j = 0; j < keys; ++j) {
        for (int64_t d = 0; d < kv.head_dim; d += W) store(s.k + j * kv.head_dim + d, KV::get(k + j * stride + d));
      }
      scores(s, s.k, kv.head_dim, keys, vectors, kv.head_dim, static_cast<float>(a.scale));
    }
    const bool masked = key < s.first[block.rows - 1] || key + keys - 1 > s.last[0];
    for (int64_t v = 0; v < vectors; ++v) softmax_block(s, v, key, keys, masked);
    add_values<KV>(s, k + kv.page_tokens * stride, stride, keys, block.rows, kv.head_dim);
  }

  void finish() {
    for (int64_t r = 0; r < block.rows; ++r) {
      const float inverse = 1.0f / s.sum[r];
      const float* out = s.out + r * kv.head_dim;
      auto* to = static_cast<typename Operand::Bits*>(a.out) + row_offset(r);
      for (int64_t d = 0; d < kv.head_dim; d += W) Operand::put(to + d, load<vf>(out + d) * inverse);
    }
  }
};

inline void attention(const wicore_attention& a) {
  const wicore_kv& kv = *a.kv;
  int64_t items = 0;
  for (int64_t s = 0; s < kv.step->num_seqs; ++s) {
    const int64_t rows = (kv.step->cu_seqlens[s + 1] - kv.step->cu_seqlens[s]) * (kv.heads / kv.kv_heads);
    items += (rows + kRows - 1) / kRows * kv.kv_heads;
  }
  with_storage<F16InF32>(a.dtype, [&](auto operand) {
    with_storage<F16>(kv.kv_dtype, [&](auto stored) {
      using Item = AttentionItem<decltype(stored), decltype(operand)>;
      wicore::parallel_for(items, 1, [&](int64_t begin, int64_t end) {
        typename Item::Scratch scratch;
        for (int64_t i = begin; i < end; ++i) Item{a, kv, attention_block(kv, i), scratch}.run();
      });
    });
  });
}

}  // namespace WICORE_ISA
