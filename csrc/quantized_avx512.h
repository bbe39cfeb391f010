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

  static I load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static I broadcast(const void* p) {
    int32_t value;
    std::memcpy(&value, p, sizeof(value));
    return _mm512_set1_epi32(value);
  }
  static V::F load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static V::F load_small(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }
  static V::F scale_once(V::F scale, V::F code, V::F min) { return V::fma(scale, code, min); }
  static V::F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  template <int kBits, int kShift>
  static I bits(I v) {
    return _mm512_and_si512(_mm512_srli_epi32(v, kShift), _mm512_set1_epi32((1 << kBits) - 1));
  }
  static I low_nibbles(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static I high_nibbles(I v) {
    return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
  }
  template <Codes, int>
  static constexpr int zero_code() {
    return 0;
  }

  template <bool kMins, int kRows>
  static PLAIT_INLINE void begin(const char* offsets, I (&sums)[kRows][kVecs]) {
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] = kMins ? _mm512_setzero_si512() : broadcast(offsets + 4 * r);
    }
  }

  // Of the first two codes of each step.
  static int32_t sum_of_first_pairs(const int8_t* codes, size_t count) {
    __m128i sums = _mm_setzero_si128();
    for (size_t i = 0; i < count; i += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
      const __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), bytes);
      sums = _mm_add_epi32(sums, _mm_madd_epi16(pairs, _mm_set1_epi32(1)));
    }
    return _mm512_reduce_add_epi32(_mm512_zextsi128_si512(sums));
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

  // Returns the sum of the codes. Sizes are compared by their bits, among which NaN is greater than
  // infinity.
  template <class T, int kGroup>
  static int32_t quantize_group(const T* x, int8_t* codes, float* scale) {
    V::F values[kGroup / 16];
    I most = _mm512_setzero_si512();
    PLAIT_UNROLL
    for (int i = 0; i < kGroup / 16; ++i) {
      values[i] = V::load(x + 16 * i);
      const I size =
          _mm512_and_si512(_mm512_castps_si512(values[i]), _mm512_set1_epi32(0x7fffffff));
      most = _mm512_max_epi32(most, size);
    }
    const int32_t bits = _mm512_reduce_max_epi32(most);
    float size;
    std::memcpy(&size, &bits, sizeof(size));
    const GroupScale group(size);
    *scale = group.scale;
    const V::F factor = _mm512_set1_ps(group.inverse);
    I sums = _mm512_setzero_si512();
    PLAIT_UNROLL
    for (int i = 0; i < kGroup / 16; ++i) {
      const I whole = _mm512_cvtps_epi32(_mm512_mul_ps(values[i], factor));
      sums = _mm512_add_epi32(sums, whole);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16 * i), _mm512_cvtsepi32_epi8(whole));
    }
    return _mm512_reduce_add_epi32(sums);
  }

  // Steps of four codes to (x0, x2), (x1, x3).
  static void widen(const int8_t* codes, size_t count, int16_t* out) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    for (size_t i = 0; i < count; i += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                          _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, order)));
    }
  }
};

}  // namespace
}  // namespace plait
