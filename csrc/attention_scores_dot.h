// Scores of attention_scores.h by the bf16 dot instruction. Only for files compiled with
// AVX-512 BF16, and for processors that have it.

#pragma once

#include "attention_transpose_avx.h"
#include "vec_avx512.h"

namespace plait {
namespace {

// One chain over pairs of d. The instruction flushes subnormals and rounds in its own way, so it
// serves every row of this instruction set or none.
struct DotScores {
  using V = Avx512Vec;
  using Element = uint16_t;
  using Stored = uint16_t;

  static int64_t steps(int64_t head_size) { return (head_size + 1) / 2; }
  static void load_query(const uint16_t* from, float* to, int64_t head_size) {
    if (head_size % 2 != 0) std::memset(to + head_size / 2, 0, sizeof(float));
    std::memcpy(to, from, static_cast<size_t>(head_size) * sizeof(uint16_t));
  }

  static void pack(const Element* const* keys, int64_t head_size, float* panel) {
    pack_together<AvxTranspose>(keys, head_size, panel);
  }

  template <int kRows, int kVecs>
  [[gnu::always_inline]] static inline void step(V::F (&sums)[kRows][kVecs], const float* query,
                                                 int64_t stride, const float* keys, int64_t i) {
    __m512bh k[kVecs];
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) k[v] = (__m512bh)_mm512_loadu_si512(keys + v * V::kLanes);
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto q = (__m512bh)_mm512_set1_ps(query[r * stride + i]);
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], q, k[v]);
    }
  }
};

}  // namespace
}  // namespace plait
