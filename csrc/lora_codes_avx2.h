// Whole numbers beside Avx2Vec, as PlainCodes. Only for files compiled with AVX2.

#pragma once

#include "lora_weights.h"
#include "vec_avx2.h"

namespace plait {
namespace {

struct Avx2Codes {
  using V = Avx2Vec;
  using I = __m256i;
  using W = __m256i;
  static constexpr bool kHasCodes = true;

  static I zero() { return _mm256_setzero_si256(); }
  static W load(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static W broadcast(const int16_t* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof(both));
    return _mm256_set1_epi32(both);
  }
  // Keeps sums where they are: GCC would move them about, and run out of registers.
  static PLAIT_INLINE void add(I& sum, W codes, W pair) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes, pair));
    __asm__("" : "+x"(sum));
  }
  static V::F to_float(I v) { return _mm256_cvtepi32_ps(v); }
  static void store(int16_t* p, V::F v) {
    const __m256i whole = _mm256_cvtps_epi32(v);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(p),
        _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
  }
};

}  // namespace
}  // namespace plait
