// Sixteen floats in an AVX-512 register. Only for files compiled with AVX-512 F, BW, VL, DQ and
// BF16; the one BF16 instruction stands in linear_avx512.cpp, where processors without it do not
// go.

#pragma once

// GCC 12 warns of its own header's deliberately undefined registers (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "vec.h"

namespace plait {
namespace {

struct Avx512Vec {
  static constexpr size_t kLanes = 16;
  static constexpr size_t kRegisters = 32;
  using F = __m512;
  using Bits = __m512i;

  static F zero() { return _mm512_setzero_ps(); }
  static F broadcast(float value) { return _mm512_set1_ps(value); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F load(const uint16_t* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }
  // Not by vcvtneps2bf16, which flushes small values to zero.
  static F load(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }
  template <int kByte>
  static F byte_of_four(const void* p) {
    __m512i v = _mm512_loadu_si512(p);
    if constexpr (kByte < 3) v = _mm512_slli_epi32(v, 24 - 8 * kByte);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(v, 24));
  }
  static void store(uint16_t* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(round_to_bf16(v)));
  }

  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F round(F v) {
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static F exp2_whole(F v) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
  }
  static float sum(F v) {
    const __m256 low = _mm512_castps512_ps256(v);
    const __m256 high = _mm512_extractf32x8_ps(v, 1);
    const __m256 eight = _mm256_add_ps(low, high);
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

  // Keeps pairs in a register, where a compiler would rather load them again.
  static void pin(Bits& v) { __asm__("" : "+v"(v)); }
  static Bits load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static F first_of_pairs(Bits v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
  static F second_of_pairs(Bits v) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static F first_of_pairs_at(const uint16_t* p) { return first_of_pairs(load_pairs(p)); }
  static F second_of_pairs_at(const uint16_t* p) { return second_of_pairs(load_pairs(p)); }
  static void accumulate(F& sum, F a, F b) { sum = fma(a, b, sum); }
  static void store_pairs(uint16_t* p, F first, F second) {
    const __m512i upper = _mm512_slli_epi32(round_to_bf16(second), 16);
    _mm512_storeu_si512(p, _mm512_or_si512(round_to_bf16(first), upper));
  }

 private:
  // A bf16 in the lower half of each lane, zeros in the upper one.
  static __m512i round_to_bf16(F v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    rounded = _mm512_srli_epi32(rounded, 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
  }
};

}  // namespace
}  // namespace plait
