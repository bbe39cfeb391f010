// Whole numbers beside Avx512Vec, as PlainCodes. Only for files compiled with AVX-512 F and BW.

#pragma once

#include "lora_weights.h"
#include "vec_avx512.h"

namespace plait {
namespace {

struct Avx512Codes {
  using V = Avx512Vec;
  using I = __m512i;
  using W = __m512i;
  static constexpr bool kHasCodes = true;

  static I zero() { return _mm512_setzero_si512(); }
  static W load(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static W broadcast(const int16_t* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof(both));
    return _mm512_set1_epi32(both);
  }
  // Keeps sums where they are: GCC would move them about, and run out of registers.
  static PLAIT_INLINE void add(I& sum, W codes, W pair) {
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(codes, pair));
    __asm__("" : "+v"(sum));
  }
  static V::F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  static void store(int16_t* p, V::F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v)));
  }
};

}  // namespace
}  // namespace plait
