// The transpose of paged_attention_kernel.h in AVX registers. Only for files compiled with AVX2.

#pragma once

#include <immintrin.h>

#include "paged_attention_kernel.h"

namespace plait {
namespace {

struct AvxTranspose {
  static void transpose(const char* const* rows, int64_t count, float* panel) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      four_columns(rows, i, panel + i * kPanelKeys);
      four_columns(rows, i + 4, panel + (i + 4) * kPanelKeys);
    }
    for (; i + 4 <= count; i += 4) four_columns(rows, i, panel + i * kPanelKeys);
    if (i == count) return;
    const char* rest[8];
    for (int key = 0; key < 8; ++key) rest[key] = rows[key] + i * 4;
    PlainTranspose::transpose(rest, count - i, panel + i * kPanelKeys);
  }

 private:
  // Rows 0 … 3 go to the lower halves, rows 4 … 7 to the upper ones, so that the shuffles below
  // stay within halves.
  static __m256 pair(const char* lower, const char* upper, int64_t i) {
    const __m128 low = _mm_loadu_ps(reinterpret_cast<const float*>(lower) + i);
    return _mm256_insertf128_ps(_mm256_castps128_ps256(low),
                                _mm_loadu_ps(reinterpret_cast<const float*>(upper) + i), 1);
  }

  static void four_columns(const char* const* rows, int64_t i, float* panel) {
    const __m256 r0 = pair(rows[0], rows[4], i);
    const __m256 r1 = pair(rows[1], rows[5], i);
    const __m256 r2 = pair(rows[2], rows[6], i);
    const __m256 r3 = pair(rows[3], rows[7], i);
    const __m256 low01 = _mm256_unpacklo_ps(r0, r1);
    const __m256 high01 = _mm256_unpackhi_ps(r0, r1);
    const __m256 low23 = _mm256_unpacklo_ps(r2, r3);
    const __m256 high23 = _mm256_unpackhi_ps(r2, r3);
    _mm256_storeu_ps(panel, _mm256_shuffle_ps(low01, low23, 0x44));
    _mm256_storeu_ps(panel + kPanelKeys, _mm256_shuffle_ps(low01, low23, 0xee));
    _mm256_storeu_ps(panel + 2 * kPanelKeys, _mm256_shuffle_ps(high01, high23, 0x44));
    _mm256_storeu_ps(panel + 3 * kPanelKeys, _mm256_shuffle_ps(high01, high23, 0xee));
  }
};

}  // namespace
}  // namespace plait
