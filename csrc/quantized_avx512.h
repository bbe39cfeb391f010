// What kernels of quantised weights share on AVX-512, with and without its dot products of bytes.

#pragma once

#include "quantized_exact.h"
#include "vec_avx512.h"

namespace plait {
namespace {

struct Avx512Quant {
  using V = Avx512Vec;
  using I = __m512i;
  static constexpr int kVecs = 1;
  static constexpr float kZeros[kRowGroup] = {};

  static I load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static I broadcast(const void* p) {
    int32_t value;
    std::memcpy(&value, p, sizeof(value));
    return _mm512_set1_epi32(value);
  }
  static V::F load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static V::F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  static I minus(I v, const void* offset) { return _mm512_sub_epi32(v, broadcast(offset)); }
  template <int kBits, int kShift>
  static I bits(I v) {
    return _mm512_and_si512(_mm512_srli_epi32(v, kShift), _mm512_set1_epi32((1 << kBits) - 1));
  }
  static I low_nibbles(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static I high_nibbles(I v) {
    return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
  }
  // See quantized_linear_avx2.cpp.
  static PLAIT_INLINE void pin(I& v) { __asm__("" : "+v"(v)); }

  static void unpack_nibbles(const uint8_t* lines, size_t count, uint8_t* out) {
    for (size_t i = 0; i < count; ++i, lines += 64, out += 128) {
      const I line = load_codes(lines);
      _mm512_storeu_si512(out, low_nibbles(line));
      _mm512_storeu_si512(out + 64, high_nibbles(line));
    }
  }

  // The greatest size, by its bits, among which NaN is greater than infinity.
  static float largest(const float* values, size_t count) {
    I most = _mm512_setzero_si512();
    for (size_t i = 0; i < count; i += 16) {
      const I bits = _mm512_loadu_si512(values + i);
      most = _mm512_max_epi32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const int32_t bits = _mm512_reduce_max_epi32(most);
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  // Rounds values * inverse to codes; returns their sum.
  static int32_t round_group(const float* values, float inverse, size_t count, int8_t* out) {
    const __m512 factor = _mm512_set1_ps(inverse);
    I sums = _mm512_setzero_si512();
    for (size_t i = 0; i < count; i += 16) {
      const I whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(values + i), factor));
      sums = _mm512_add_epi32(sums, whole);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtsepi32_epi8(whole));
    }
    return _mm512_reduce_add_epi32(sums);
  }
};

}  // namespace
}  // namespace plait
