#include "linear_kernel.h"
#include "vec_avx512.h"

namespace plait {
namespace {

// bf16 by the dot instruction: a step is a pair of inputs, which the instruction sums by itself. It
// rounds and flushes in its own way, so whatever uses this format uses it for any number of rows.
struct DotFormat {
  using Vec = Avx512Vec;
  using Input = uint16_t;
  using Item = uint32_t;
  static constexpr size_t kInputs = 2;
  static constexpr size_t kItems = 1;
  static constexpr int kTileSums = kMaxSums<Vec>;

  static Item item(const Input* row, size_t index, size_t in_features) {
    Item pair = row[2 * index];
    if (2 * index + 1 < in_features) pair |= static_cast<Item>(row[2 * index + 1]) << 16;
    return pair;
  }

  template <int kRows, int kVecs>
  static PLAIT_INLINE void step(Vec::F (&sums)[kRows][kVecs], const Item* x, const char* weight,
                                size_t tile_bytes) {
    __m512bh w[kVecs];
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      w[v] = (__m512bh)_mm512_loadu_si512(vector_at<Vec>(weight, tile_bytes, v));
    }
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[r]));
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], pair, w[v]);
    }
  }
};

void multiply_or_unpack(DotFormat, const LinearJob& job, const Panels& panels,
                        const WeightBlock& block, const char* weight, const char* next, float* sums,
                        float*) {
  multiply_block<DotFormat, DotFormat>(job, panels, block, weight, job.steps * kStepBytes, next,
                                       sums);
}

}  // namespace

LinearKernels linear_kernels_avx512() {
  return {make_kernel<FloatFormat<Avx512Vec>>(), make_kernel<WidenFormat<Avx512Vec>>()};
}

LinearKernels linear_kernels_avx512_bf16() {
  return {make_kernel<FloatFormat<Avx512Vec>>(), make_kernel<DotFormat>()};
}

}  // namespace plait
