// Pillow's resize with BILINEAR, to the last bit (src/libImaging/Resample.c): weights in float64, rounded to 22 bits
// behind the point; rows are resized first, then columns of the bytes that these gave.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "simd.h"

namespace WICORE_ISA {

constexpr int kPoint = 22;

// Of output i: `count[i]` inputs from `begin[i]` on, by weights from `weight[i * most]` on.
struct Taps {
  int64_t most;
  std::vector<int64_t> begin, count;
  std::vector<int32_t> weight;

  Taps(int64_t in, int64_t out, int64_t first, int64_t last) : begin(out), count(out) {
    const double scale = static_cast<double>(in) / static_cast<double>(out), support = scale < 1.0 ? 1.0 : scale;
    most = static_cast<int64_t>(ceil(support)) * 2 + 1;
    weight.resize(static_cast<size_t>(out * most));
    std::vector<double> found(static_cast<size_t>(most));
    for (int64_t i = first; i < last; ++i) {
      const double center = (static_cast<double>(i) + 0.5) * scale, step = 1.0 / support;
      begin[i] = std::max<int64_t>(0, static_cast<int64_t>(center - support + 0.5));
      count[i] = std::min<int64_t>(in, static_cast<int64_t>(center + support + 0.5)) - begin[i];
      double sum = 0.0;
      for (int64_t k = 0; k < count[i]; ++k) {
        const double far = fabs((static_cast<double>(k + begin[i]) - center + 0.5) * step);
        sum += found[k] = far < 1.0 ? 1.0 - far : 0.0;
      }
      for (int64_t k = 0; k < count[i]; ++k) {
        const double part = sum != 0.0 ? found[k] / sum : found[k];
        weight[i * most + k] = static_cast<int32_t>(0.5 + part * (1 << kPoint));
      }
    }
  }
};

typedef uint8_t pixel_bytes __attribute__((vector_size(4)));
typedef int32_t pixel_sums __attribute__((vector_size(16)));

// Rows of `width` pixels of 4 bytes become rows of `size` pixels of 4 bytes.
inline void resize_rows(const uint8_t* x, int64_t width, int64_t rows, int64_t size, uint8_t* out) {
  const Taps taps(width, size, 0, size);
  for (int64_t row = 0; row < rows; ++row, x += width * 4) {
    for (int64_t i = 0; i < size; ++i, out += 4) {
      const int32_t* weight = &taps.weight[i * taps.most];
      const uint8_t* in = x + taps.begin[i] * 4;
      pixel_sums sums = pixel_sums{} + (1 << (kPoint - 1));
      for (int64_t k = 0; k < taps.count[i]; ++k, in += 4) {
        sums += __builtin_convertvector(load<pixel_bytes>(in), pixel_sums) * weight[k];
      }
      store(out, __builtin_convertvector(sums >> kPoint, pixel_bytes));
    }
  }
}

// Rows [first, last) of a square of `size` pixels of 3 bytes, of `height` rows of `size` pixels of 4 bytes.
inline void resize_columns(const uint8_t* x, int64_t height, int64_t size, int64_t first, int64_t last, uint8_t* square) {
  const Taps taps(height, size, first, last);
  std::vector<int32_t> sums(static_cast<size_t>(size * 4));
  for (int64_t i = first; i < last; ++i) {
    std::fill(sums.begin(), sums.end(), 1 << (kPoint - 1));
    for (int64_t k = 0; k < taps.count[i]; ++k) {
      const uint8_t* in = x + (taps.begin[i] + k) * size * 4;
      const int32_t weight = taps.weight[i * taps.most + k];
      for (int64_t j = 0; j < size * 4; ++j) sums[j] += in[j] * weight;
    }
    uint8_t* out = square + i * size * 3;
    for (int64_t j = 0; j < size; ++j) {
      for (int64_t c = 0; c < 3; ++c) out[j * 3 + c] = static_cast<uint8_t>(sums[j * 4 + c] >> kPoint);
    }
  }
}

}  // namespace WICORE_ISA
