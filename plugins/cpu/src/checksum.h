// XXH3-128 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), seed 0, of data that comes in pieces.
#pragma once
#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace WICORE_ISA {

constexpr int64_t kStripe = 64, kBlock = 1024, kSecretBytes = 192;
constexpr uint64_t kPrime1 = 0x9e3779b185ebca87u, kPrime2 = 0xc2b2ae3d27d4eb4fu;
constexpr uint32_t kPrime32 = 0x9e3779b1u;

inline const uint8_t* secret() {
  static const uint64_t words[kSecretBytes / 8] = {
      0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
      0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
      0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
      0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
      0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};
  return reinterpret_cast<const uint8_t*>(words);
}

INLINE uint64_t word(const uint8_t* p) { return load<uint64_t>(p); }

using wicore::Xxh3;

struct Sums {
  vq lane[8 / Q];
};

INLINE void add_stripes(Sums& sums, const uint8_t* data, const uint8_t* key, int64_t stripes) {
  for (int64_t n = 0; n < stripes; ++n, data += kStripe, key += 8) {
    for (int i = 0; i < 8 / Q; ++i) {
      const vq value = load<vq>(data + i * sizeof(vq)), mixed = value ^ load<vq>(key + i * sizeof(vq));
      sums.lane[i] += swap_pairs(value) + mul_halves(mixed, mixed >> 32);
    }
  }
}

INLINE void add_block(Sums& sums, const uint8_t* data) {
  add_stripes(sums, data, secret(), kBlock / kStripe);
  for (int i = 0; i < 8 / Q; ++i) {
    const vq mixed = sums.lane[i] ^ (sums.lane[i] >> 47) ^ load<vq>(secret() + kSecretBytes - 64 + i * sizeof(vq));
    sums.lane[i] = mul_halves(mixed, splat_u64(kPrime32)) + (mul_halves(mixed >> 32, splat_u64(kPrime32)) << 32);
  }
}

INLINE uint64_t merge(const Sums& sums, const uint8_t* key, uint64_t start) {
  uint64_t lane[8];
  memcpy(lane, &sums, sizeof lane);
  for (int i = 0; i < 8; i += 2) {
    const unsigned __int128 mixed = lane[i] ^ word(key + 8 * i);
    const unsigned __int128 product = mixed * (lane[i + 1] ^ word(key + 8 * i + 8));
    start += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  start = (start ^ (start >> 37)) * 0x165667919e3779f9u;
  return start ^ (start >> 32);
}

inline void xxh3_add(Xxh3& state, const uint8_t* data, int64_t bytes) {
  static const uint64_t start[8] = {0xc2b2ae3du,         kPrime1,     kPrime2,             0x165667b19e3779f9u,
                                    0x85ebca77c2b2ae63u, 0x85ebca77u, 0x27d4eb2f165667c5u, kPrime32};
  if (state.held == 0) {
    memcpy(state.lane, start, sizeof start);
    state.length = 0;
  }
  state.length += bytes;
  Sums sums = load<Sums>(state.lane);
  const int64_t room = std::min(kBlock - state.held, bytes);
  memcpy(state.tail + state.held, data, static_cast<size_t>(room));
  state.held += room;
  if (bytes > room) {  // the last block waits: it is added otherwise
    add_block(sums, state.tail);
    for (data += room, bytes -= room; bytes > kBlock; data += kBlock, bytes -= kBlock) add_block(sums, data);
    memcpy(state.tail, data, static_cast<size_t>(bytes));
    state.held = bytes;
  }
  memcpy(state.lane, &sums, sizeof sums);
}

// More than 240 bytes were added, 64 of them since the last whole block. out: the canonical 16 bytes.
inline void xxh3_end(Xxh3& state, uint8_t* out) {
  Sums sums = load<Sums>(state.lane);
  add_stripes(sums, state.tail, secret(), (state.held - 1) / kStripe);
  add_stripes(sums, state.tail + state.held - kStripe, secret() + kSecretBytes - kStripe - 7, 1);
  const uint64_t length = static_cast<uint64_t>(state.length);
  const uint64_t halves[2] = {merge(sums, secret() + kSecretBytes - kStripe - 11, ~(length * kPrime2)),
                              merge(sums, secret() + 11, length * kPrime1)};
  for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>(halves[i / 8] >> (56 - 8 * (i % 8)));
}

}  // namespace WICORE_ISA
