#include <immintrin.h>

#include "resample_kernel.h"

namespace plait {
namespace {

struct Avx2Sums {
  __m256i values = _mm256_set1_epi32(1 << (kWeightBits - 1));

  void add(int32_t weight, const uint8_t* bytes) {
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
    const __m256i product =
        _mm256_mullo_epi32(_mm256_cvtepu8_epi32(eight), _mm256_set1_epi32(weight));
    values = _mm256_add_epi32(values, product);
  }

  void store(uint8_t* out) const {
    const __m256i whole = _mm256_srai_epi32(values, kWeightBits);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
  }
};

}  // namespace

void resample_avx2(const ResampleArgs& args) { resample<Avx2Sums>(args); }

}  // namespace plait
