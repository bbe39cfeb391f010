// The transpose of paged_attention_kernel.h in AVX registers. Only for files compiled with AVX2.

#pragma once

#include <immintrin.h>

#include "paged_attention_kernel.h"

namespace plait {
namespace {

struct AvxTranspose {
  static void transpose(const float* const* keys, int64_t head_size, float* panel) {
    int64_t d = 0;
    for (; d + 4 <= head_size; d += 4) {
      __m256 columns[4];
      four_columns(keys, d, columns);
      PLAIT_UNROLL
      for (int i = 0; i < 4; ++i) _mm256_storeu_ps(panel + (d + i) * kPanelKeys, columns[i]);
    }
    for (; d < head_size; ++d) {  // bytes, since a value may be any pair of bf16
      for (int key = 0; key < 8; ++key) {
        std::memcpy(panel + d * kPanelKeys + key, keys[key] + d, sizeof(float));
      }
    }
  }

  // Pairs of bf16 are transposed as 4-byte values and widened after.
  static void transpose(const uint16_t* const* keys, int64_t head_size, float* panel) {
    const float* pairs[8];
    for (int key = 0; key < 8; ++key) pairs[key] = reinterpret_cast<const float*>(keys[key]);
    const __m256 high_half = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000)));
    int64_t d = 0;
    for (; d + 8 <= head_size; d += 8) {
      __m256 columns[4];
      four_columns(pairs, d / 2, columns);
      PLAIT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const __m256i first = _mm256_slli_epi32(_mm256_castps_si256(columns[i]), 16);
        float* const to = panel + (d + 2 * i) * kPanelKeys;
        _mm256_storeu_ps(to, _mm256_castsi256_ps(first));
        _mm256_storeu_ps(to + kPanelKeys, _mm256_and_ps(columns[i], high_half));
      }
    }
    for (; d < head_size; ++d) {
      for (int key = 0; key < 8; ++key) panel[d * kPanelKeys + key] = widen(keys[key][d]);
    }
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
