// Vectors of W float32 lanes for the instruction set that this translation unit is compiled for.
//
// GCC/Clang vector extensions give the plain arithmetic; only what they cannot say is spelled with intrinsics:
// fused multiply-add, the bf16 pair product and float16 conversion. Everything is static inside a namespace of its
// own per instruction set, so that the linker can never mix code of two of them. Contraction is off: a fused
// operation is fused because it says fma.
#pragma once
#include <stdint.h>
#include <string.h>

#include "wicore_cpu.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace WICORE_ISA {

#if defined(__AVX512BF16__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int8_t vb __attribute__((vector_size(W)));
typedef uint64_t vq __attribute__((vector_size(4 * W)));
constexpr int Q = W / 2;  // lanes of a vq

#define INLINE static inline __attribute__((always_inline))

template <class V>
INLINE V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
INLINE void store(void* p, V v) {
  memcpy(p, &v, sizeof v);
}

INLINE vf splat(float x) { return x - vf{}; }
INLINE vu splat_u32(uint32_t x) { return x + vu{}; }
INLINE vq splat_u64(uint64_t x) { return x + vq{}; }
INLINE vf as_float(vu v) { return (vf)v; }
INLINE vu as_bits(vf v) { return (vu)v; }
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512BF16__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// Lane by lane the product of the lower halves.
INLINE vq mul_halves(vq a, vq b) {
#if defined(__AVX512BF16__)
  return (vq)_mm512_maskz_mul_epu32((__mmask8)-1, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vq)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// Lanes 2i and 2i + 1 change places.
INLINE vq swap_pairs(vq v) {
#if defined(__AVX512BF16__)
  return (vq)_mm512_maskz_shuffle_epi32((__mmask16)-1, (__m512i)v, _MM_PERM_BADC);
#elif defined(__AVX2__)
  return (vq)_mm256_shuffle_epi32((__m256i)v, 0x4e);
#else
  return vq{v[1], v[0]};
#endif
}

// acc + lo(a) lo(b) + hi(a) hi(b), each lane of a and b two bf16 values.
INLINE vf dot_bf16(vf acc, vu a, vu b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
  const vu high = splat_u32(0xffff0000u);
  acc = fma(as_float(a << 16), as_float(b << 16), acc);
  return fma(as_float(a & high), as_float(b & high), acc);
#endif
}

INLINE vf from_bf16(vh h) { return as_float(__builtin_convertvector(h, vu) << 16); }

// Round to nearest even; a NaN stays a NaN.
INLINE vh to_bf16(vf v) {
  const vu bits = as_bits(v);
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(v == v ? rounded : splat_u32(0x7fc0u), vh);
}

INLINE vf from_i8(const void* p) {
#if defined(__AVX512BF16__)
  return __builtin_convertvector((vi)_mm512_maskz_cvtepi8_epi32((__mmask16)-1, (__m128i)load<vb>(p)), vf);
#elif defined(__AVX2__)
  return __builtin_convertvector((vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))), vf);
#else
  return __builtin_convertvector(__builtin_convertvector(load<vb>(p), vi), vf);
#endif
}

// Bits [at, at + 4) of each lane as a number from -8 to 7.
INLINE vf nibbles(vu codes, int at) { return __builtin_convertvector((vi)(codes << (28 - at)) >> 28, vf); }

// Bits [4 J, 4 J + 4) and [16 + 4 J, 20 + 4 J) of each lane as two bf16 values from -8 to 7.
template <int J>
INLINE vu nibble_pairs(vu codes) {
#if defined(__AVX512BF16__)
  // Only the low five bits of an index count, so a table whose halves are equal looks up four.
  const __m512i table = (__m512i)(vu){0x3f800000u, 0x40404000u, 0x40a04080u, 0x40e040c0u, 0xc0e0c100u, 0xc0a0c0c0u,
                                      0xc040c080u, 0xbf80c000u, 0x3f800000u, 0x40404000u, 0x40a04080u, 0x40e040c0u,
                                      0xc0e0c100u, 0xc0a0c0c0u, 0xc040c080u, 0xbf80c000u};
  return (vu)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)codes, 4 * J), table);
#else
  return as_bits(nibbles(codes, 4 * J)) >> 16 | as_bits(nibbles(codes, 16 + 4 * J));
#endif
}

INLINE vf from_f16(vh h) {
#if defined(__AVX512BF16__)
  return _mm512_maskz_cvtph_ps((__mmask16)-1, (__m256i)h);
#elif defined(__AVX2__)
  return _mm256_cvtph_ps((__m128i)h);
#else
  // Shift the fields to float32's and let a multiplication by 2^112 fix the exponent, subnormals included.
  const vu bits = __builtin_convertvector(h, vu);
  const vu magnitude = (bits & 0x7fffu) << 13;
  const vf scaled = as_float(magnitude) * 0x1p112f;
  const vu special = magnitude | 0x7f800000u;
  const vu exact = magnitude >= splat_u32(0x0f800000u) ? special : as_bits(scaled);
  return as_float(exact | ((bits & 0x8000u) << 16));
#endif
}

// Round to nearest even onto the float16 grid; overflow becomes infinity.
INLINE vh to_f16(vf v) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_maskz_cvtps_ph((__mmask16)-1, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (vh)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // Adding 2^(e + 13) lets the float32 adder round at float16's last bit; e is at least float16's smallest.
  const vu sign = as_bits(v) & 0x80000000u;
  const vf magnitude = as_float(as_bits(v) ^ sign);
  const vu exponent = as_bits(magnitude) & 0x7f800000u;
  const vu least = splat_u32(113u << 23);
  const vf anchor = as_float((exponent > least ? exponent : least) + (13u << 23));
  const vf rounded = (magnitude + anchor) - anchor;
  const vu field = as_bits(rounded * 0x1p-112f) >> 13;
  const vu finite = magnitude >= splat(65520.0f) ? splat_u32(0x7c00u) : field;
  const vu bits = v == v ? finite : splat_u32(0x7e00u);
  return __builtin_convertvector(bits | (sign >> 16), vh);
#endif
}

// e^x to about 1 ulp for x in [-87.3, 88]; 0 below, infinity above, NaN for NaN.
INLINE vf vexp(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: rounds to an integer held in the low bits
  const vf low = splat(-87.33654f);
  const vf clamped = x < low ? low : x;
  const vf shifted = fma(clamped, splat(1.44269504f), magic);
  const vf n = shifted - magic;
  vf r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);  // Cephes expf
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  const vf scale = as_float((as_bits(shifted) - as_bits(magic) + 127u) << 23);
  const vf result = p * scale;
  const vf above = x > splat(88.0f) ? splat(__builtin_inff()) : result;
  return x < low ? vf{} : above;
}

// The first `n` of W elements; the others are zero.
template <class V>
INLINE V load_first(const void* p, int64_t n) {
  V v{};
  memcpy(&v, p, static_cast<size_t>(n) * (sizeof(V) / W));
  return v;
}

template <class V>
INLINE void store_first(void* p, V v, int64_t n) {
  memcpy(p, &v, static_cast<size_t>(n) * (sizeof(V) / W));
}

// Fixed order: halves are added lane by lane.
INLINE float sum_lanes(vf v) {
  float lane[W];
  memcpy(lane, &v, sizeof lane);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

// Storage of an operand of matrix products, see wicore_cpu.h. `Bits` is one element in memory.
struct F32 {
  using Bits = float;
  using Activation = float;  // operand that a weight of this type is multiplied by
  static constexpr int kPair = 1;  // consecutive k that a packed weight keeps together
  INLINE vf get(const Bits* p) { return load<vf>(p); }
  INLINE vf get_first(const Bits* p, int64_t n) { return load_first<vf>(p, n); }
  INLINE void put(Bits* p, vf v) { store(p, v); }
  INLINE void put_first(Bits* p, vf v, int64_t n) { store_first(p, v, n); }
  INLINE void finish(Bits*, int64_t) {}
};

struct BF16 {
  using Bits = uint16_t;
  using Activation = uint16_t;
  static constexpr int kPair = 2;
  INLINE vf get(const Bits* p) { return from_bf16(load<vh>(p)); }
  INLINE vf get_first(const Bits* p, int64_t n) { return from_bf16(load_first<vh>(p, n)); }
  INLINE void put(Bits* p, vf v) { store(p, to_bf16(v)); }
  INLINE void put_first(Bits* p, vf v, int64_t n) { store_first(p, to_bf16(v), n); }
  INLINE void finish(Bits*, int64_t) {}
};

struct F16 {
  using Bits = uint16_t;
  using Activation = float;
  static constexpr int kPair = 1;
  INLINE vf get(const Bits* p) { return from_f16(load<vh>(p)); }
  INLINE void put(Bits* p, vf v) { store(p, to_f16(v)); }
};

// float32 storage of float16 values.
struct F16InF32 {
  using Bits = float;
  INLINE vf get(const Bits* p) { return load<vf>(p); }
  INLINE void put(Bits* p, vf v) { store(p, from_f16(to_f16(v))); }
};

// Calls body(storage) with the storage of `dtype`: F32, BF16 or, for float16, Half.
template <class Half, class Body>
INLINE void with_storage(int64_t dtype, const Body& body) {
  switch (dtype) {
    case WICORE_F32: body(F32{}); break;
    case WICORE_BF16: body(BF16{}); break;
    case WICORE_F16: body(Half{}); break;
    default: break;
  }
}

}  // namespace WICORE_ISA
