// The transpose of attention_scores.h in AVX registers. Only for files compiled with AVX2.

#pragma once

#include <immintrin.h>

#include "attention_scores.h"

namespace plait {
namespace {

struct AvxTranspose {
  // Pairs of bf16 go through as the floats that their bytes form; nothing computes with them.
  template <class Element>
  static void transpose(const Element* const* keys, int64_t count, float* panel) {
    const float* values[8];
    for (int key = 0; key < 8; ++key) values[key] = reinterpret_cast<const float*>(keys[key]);
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
      __m256 columns[4];
      four_columns(values, i, columns);
      PLAIT_UNROLL
      for (int c = 0; c < 4; ++c) _mm256_storeu_ps(panel + (i + c) * kPanelKeys, columns[c]);
    }
    PlainTranspose::transpose(values, i, count, panel);
  }

 private:
  // Keys 0 … 3 go to the lower halves, keys 4 … 7 to the upper ones, so that the shuffles below
  // stay within halves.
  static __m256 halves(const float* lower, const float* upper) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(lower)), _mm_loadu_ps(upper),
                                1);
  }

  [[gnu::always_inline]] static inline void four_columns(const float* const* keys, int64_t d,
                                                         __m256 (&columns)[4]) {
    const __m256 k0 = halves(keys[0] + d, keys[4] + d);
    const __m256 k1 = halves(keys[1] + d, keys[5] + d);
    const __m256 k2 = halves(keys[2] + d, keys[6] + d);
    const __m256 k3 = halves(keys[3] + d, keys[7] + d);
    const __m256 low01 = _mm256_unpacklo_ps(k0, k1);
    const __m256 high01 = _mm256_unpackhi_ps(k0, k1);
    const __m256 low23 = _mm256_unpacklo_ps(k2, k3);
    const __m256 high23 = _mm256_unpackhi_ps(k2, k3);
    columns[0] = _mm256_shuffle_ps(low01, low23, 0x44);
    columns[1] = _mm256_shuffle_ps(low01, low23, 0xee);
    columns[2] = _mm256_shuffle_ps(high01, high23, 0x44);
    columns[3] = _mm256_shuffle_ps(high01, high23, 0xee);
  }
};

}  // namespace
}  // namespace plait
