// Eight floats in an AVX2 register. Only for files compiled with AVX2 and FMA.

#pragma once

#include <immintrin.h>

#include "vec.h"

namespace plait {
namespace {

struct Avx2Vec {
  static constexpr size_t kLanes = 8;
  static constexpr size_t kRegisters = 16;
  using F = __m256;
  using Bits = __m256i;

  static F zero() { return _mm256_setzero_ps(); }
  static F broadcast(float value) { return _mm256_set1_ps(value); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F load(const uint16_t* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
  }
  static F load(const int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  template <int kByte>
  static F byte_of_four(const void* p) {
    __m256i v = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    if constexpr (kByte < 3) v = _mm256_slli_epi32(v, 24 - 8 * kByte);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(v, 24));
  }
  static void store(uint16_t* p, F v) {
    const __m256i rounded = round_to_bf16(v);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }

  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F round(F v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F exp2_whole(F v) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  static float sum(F v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

  // Keeps pairs in a register, where a compiler would rather load them again.
  static void pin(Bits& v) { __asm__("" : "+x"(v)); }
  static Bits load_pairs(const uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static F first_of_pairs(Bits v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
  static F second_of_pairs(Bits v) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  // Volatile, so that they stay in the order in which they fit the registers.
  static F first_of_pairs_at(const uint16_t* p) {
    F result;
    __asm__ volatile("vmovdqu %1, %0\n\tvpslld $16, %0, %0" : "=x"(result) : "m"(*vector_at(p)));
    return result;
  }
  static F second_of_pairs_at(const uint16_t* p) {
    F result;
    __asm__ volatile("vpxor %0, %0, %0\n\tvpblendw $0xaa, %1, %0, %0"
                     : "=&x"(result)
                     : "m"(*vector_at(p)));
    return result;
  }
  static void accumulate(F& sum, F a, F b) {
    __asm__ volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  }
  // One load and one widening for all three, through the only register that is left beside twelve
  // sums and three factors.
  static void accumulate_first(F& a, F& b, F& c, F x, F y, F z, const uint16_t* p) {
    F wide;
    __asm__ volatile(
        "vmovdqu %4, %3\n\tvpslld $16, %3, %3\n\t"
        "vfmadd231ps %5, %3, %0\n\tvfmadd231ps %6, %3, %1\n\tvfmadd231ps %7, %3, %2"
        : "+x"(a), "+x"(b), "+x"(c), "=&x"(wide)
        : "m"(*vector_at(p)), "x"(x), "x"(y), "x"(z));
  }
  static void accumulate_second(F& a, F& b, F& c, F x, F y, F z, const uint16_t* p) {
    F wide;
    __asm__ volatile(
        "vpxor %3, %3, %3\n\tvpblendw $0xaa, %4, %3, %3\n\t"
        "vfmadd231ps %5, %3, %0\n\tvfmadd231ps %6, %3, %1\n\tvfmadd231ps %7, %3, %2"
        : "+x"(a), "+x"(b), "+x"(c), "=&x"(wide)
        : "m"(*vector_at(p)), "x"(x), "x"(y), "x"(z));
  }
  static void store_pairs(uint16_t* p, F first, F second) {
    const __m256i upper = _mm256_slli_epi32(round_to_bf16(second), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_or_si256(round_to_bf16(first), upper));
  }

 private:
  typedef uint16_t InMemory __attribute__((vector_size(32), aligned(2), may_alias));
  static const InMemory* vector_at(const uint16_t* p) {
    return reinterpret_cast<const InMemory*>(p);
  }

  // A bf16 in the lower half of each lane, zeros in the upper one.
  static __m256i round_to_bf16(F v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    rounded = _mm256_srli_epi32(rounded, 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
  }
};

}  // namespace
}  // namespace plait
