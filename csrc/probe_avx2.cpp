#include <immintrin.h>

#include "probe_kernel.h"

namespace plait {
namespace {

struct Avx2 {
  typedef uint64_t W __attribute__((vector_size(32)));
  static W load(const uint64_t* p) {
    return (W)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
};

struct FloatDot {
  using S = __m256;
  using A = __m256;
  static A one() { return _mm256_set1_ps(1); }
  static void hide(A& a) { asm volatile("" : "+x"(a)); }
  static void add(S& sum, A a, A b) { sum = _mm256_fmadd_ps(a, b, sum); }
  static int64_t total(S sum) { return sum_of_lanes<float, 8>(sum); }
};

// Sixteen values in a register: each half is widened and multiplied by values that are wide.
struct Bfloat16Dot {
  using S = __m256;
  struct A {
    __m256i pairs;
    __m256 wide;
  };
  static A one() { return {_mm256_set1_epi16(0x3f80), _mm256_set1_ps(1)}; }
  static void hide(A& a) { asm volatile("" : "+x"(a.pairs)); }
  static void add(S& sum, A a, A b) {
    __m256i pairs = a.pairs;
    asm volatile("" : "+x"(pairs));  // as if loaded: widened anew for each sum
    const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    const __m256 second =
        _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
    sum = _mm256_fmadd_ps(second, b.wide, _mm256_fmadd_ps(first, b.wide, sum));
  }
  static int64_t total(S sum) { return sum_of_lanes<float, 8>(sum); }
};

struct ByteDot {
  using S = __m256i;
  using A = __m256i;
  static A one() { return _mm256_set1_epi8(1); }
  static void hide(A& a) { asm volatile("" : "+x"(a)); }
  static void add(S& sum, A a, A b) {
    asm volatile("" : "+x"(a));  // or all sums would share the products
    const __m256i products = _mm256_maddubs_epi16(a, b);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
  }
  static int64_t total(S sum) { return sum_of_lanes<int32_t, 8>(sum); }
};

}  // namespace

uint64_t probe_read_avx2(const uint64_t* words, size_t num_words) {
  return read_words<Avx2>(words, num_words);
}

int64_t probe_dot_avx2(ProbeDot kind, size_t rounds) {
  if (kind == ProbeDot::kInt8) return sum_of_products<ByteDot, 8>(rounds);
  if (kind == ProbeDot::kBfloat16) return sum_of_products<Bfloat16Dot, 8>(rounds);
  return sum_of_products<FloatDot, 12>(rounds);
}

}  // namespace plait
