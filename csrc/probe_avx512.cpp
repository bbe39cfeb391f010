#include <immintrin.h>

#include "probe_kernel.h"

namespace plait {
namespace {

struct Avx512 {
  typedef uint64_t W __attribute__((vector_size(64)));
  static W load(const uint64_t* p) { return (W)_mm512_loadu_si512(p); }
};

struct FloatDot {
  using S = __m512;
  using A = __m512;
  static A one() { return _mm512_set1_ps(1); }
  static void hide(A& a) { asm volatile("" : "+v"(a)); }
  static void add(S& sum, A a, A b) { sum = _mm512_fmadd_ps(a, b, sum); }
  static int64_t total(S sum) { return sum_of_lanes<float, 16>(sum); }
};

struct WidenedDot {
  using S = __m512;
  struct A {
    __m512i pairs;
    __m512 wide;
  };
  static A one() { return {_mm512_set1_epi16(0x3f80), _mm512_set1_ps(1)}; }
  static void hide(A& a) { asm volatile("" : "+v"(a.pairs)); }
  static void add(S& sum, A a, A b) {
    __m512i pairs = a.pairs;
    asm volatile("" : "+v"(pairs));  // as if loaded: widened anew for each sum
    const __m512 first = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, pairs, 16));
    const __m512 second =
        _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
    sum = _mm512_fmadd_ps(second, b.wide, _mm512_fmadd_ps(first, b.wide, sum));
  }
  static int64_t total(S sum) { return sum_of_lanes<float, 16>(sum); }
};

struct PairDot {
  using S = __m512;
  using A = __m512i;
  static A one() { return _mm512_set1_epi16(0x3f80); }
  static void hide(A& a) { asm volatile("" : "+v"(a)); }
  static void add(S& sum, A a, A b) { sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
  static int64_t total(S sum) { return sum_of_lanes<float, 16>(sum); }
};

struct ByteDot {
  using S = __m512i;
  using A = __m512i;
  static A one() { return _mm512_set1_epi8(1); }
  static void hide(A& a) { asm volatile("" : "+v"(a)); }
  static void add(S& sum, A a, A b) {
    asm volatile("" : "+v"(a));  // or all sums would share the products
    const __m512i products = _mm512_maddubs_epi16(a, b);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(products, _mm512_set1_epi16(1)));
  }
  static int64_t total(S sum) { return sum_of_lanes<int32_t, 16>(sum); }
};

}  // namespace

uint64_t probe_read_avx512(const uint64_t* words, size_t num_words) {
  return read_words<Avx512>(words, num_words);
}

int64_t probe_dot_avx512(ProbeDot kind, size_t rounds) {
  if (kind == ProbeDot::kInt8) return sum_of_products<ByteDot, 12>(rounds);
  if (kind == ProbeDot::kBfloat16) return sum_of_products<WidenedDot, 12>(rounds);
  return sum_of_products<FloatDot, 12>(rounds);
}

int64_t probe_dot_avx512_bf16(size_t rounds) { return sum_of_products<PairDot, 12>(rounds); }

// Files named for AVX-512 are not compiled for VNNI, which only part of these processors have.
__attribute__((target("avx512vnni"))) int64_t probe_dot_avx512_vnni(size_t rounds) {
  constexpr size_t kSums = 12;
  __m512i sums[kSums] = {};
  __m512i a = _mm512_set1_epi8(1);
  const __m512i b = a;
  for (size_t round = 0; round < rounds; ++round) {
    asm volatile("" : "+v"(a));
    PLAIT_PROBE_UNROLL
    for (size_t s = 0; s < kSums; ++s) sums[s] = _mm512_dpbusd_epi32(sums[s], a, b);
  }
  int64_t total = 0;
  for (size_t s = 0; s < kSums; ++s) total += sum_of_lanes<int32_t, 16>(sums[s]);
  return total;
}

}  // namespace plait
