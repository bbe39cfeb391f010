#include "quantized_exact.h"
#include "vec_avx2.h"

namespace plait {
namespace {

// Without dot instructions. Products of 4-bit codes are summed in int16: pairs by vpmaddubsw, at
// most 2 · 15 · 127, and eight of them in a row group. Products of 8-bit codes would not fit there,
// so bytes are widened, even and odd ones apart, and their rows come as (x0, x2), (x1, x3) in
// int16.
struct Avx2Quant {
  using V = Avx2Vec;
  using I = __m256i;
  static constexpr int kVecs = 2;
  static constexpr int kMaxRows = 4;
  static constexpr size_t kDirectRows = 8;
  static constexpr Codes kUnpacked = Codes::kSmall;

  template <Codes kCodes>
  static constexpr size_t step_bytes() {
    return kCodes == Codes::kBytes ? 8 : 4;
  }

  static I load_codes(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static I broadcast(const void* p) {
    return _mm256_castps_si256(_mm256_broadcast_ss(static_cast<const float*>(p)));
  }
  static V::F load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static V::F load_small(const int8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  static V::F scale_once(V::F scale, V::F code, V::F min) { return V::fma(scale, code, min); }
  static V::F to_float(I v) { return _mm256_cvtepi32_ps(v); }
  static I minus(I v, const void* offset) { return _mm256_sub_epi32(v, broadcast(offset)); }
  template <int kBits, int kShift>
  static I bits(I v) {
    return _mm256_and_si256(_mm256_srli_epi32(v, kShift), _mm256_set1_epi32((1 << kBits) - 1));
  }

  // Keeps sums where they are: GCC would add up the products of several steps as a tree, and so
  // many of them drive each other out of registers.
  static PLAIT_INLINE void pin(I& v) { __asm__("" : "+x"(v)); }

  template <int kRows>
  static PLAIT_INLINE void add_step16(const I (&codes)[kVecs], const char* x,
                                      I (&sums)[kRows][kVecs]) {
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const I row = broadcast(x + 4 * r);
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        sums[r][v] = _mm256_add_epi16(sums[r][v], _mm256_maddubs_epi16(codes[v], row));
        pin(sums[r][v]);
      }
    }
  }

  template <int kRows>
  static PLAIT_INLINE void add_step32(const uint8_t* codes, const char* x,
                                      I (&sums)[kRows][kVecs]) {
    I even[kVecs], odd[kVecs];
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const I bytes = load_codes(codes + 32 * v);
      even[v] = _mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
      odd[v] = _mm256_srli_epi16(bytes, 8);
    }
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const I x_even = broadcast(x + 8 * r);
      const I x_odd = broadcast(x + 8 * r + 4);
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(even[v], x_even));
        sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(odd[v], x_odd));
        pin(sums[r][v]);
      }
    }
  }

  template <Codes kCodes, int kSteps, int kRows>
  static PLAIT_INLINE void dot(const uint8_t* codes, const char* x, I (&out)[kRows][kVecs]) {
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) out[r][v] = _mm256_setzero_si256();
    }
    if constexpr (kCodes == Codes::kBytes) {
      PLAIT_UNROLL
      for (int s = 0; s < kSteps; ++s) add_step32<kRows>(codes + 64 * s, x + 8 * kRows * s, out);
      return;
    }
    const I low = _mm256_set1_epi8(15);
    if constexpr (kCodes == Codes::kNibbles) {
      PLAIT_UNROLL
      for (int s = 0; s < kSteps; s += 2) {
        const I line[kVecs] = {load_codes(codes + 32 * s), load_codes(codes + 32 * s + 32)};
        const I first[kVecs] = {_mm256_and_si256(line[0], low), _mm256_and_si256(line[1], low)};
        add_step16<kRows>(first, x + 4 * kRows * s, out);
        const I second[kVecs] = {_mm256_and_si256(_mm256_srli_epi16(line[0], 4), low),
                                 _mm256_and_si256(_mm256_srli_epi16(line[1], 4), low)};
        add_step16<kRows>(second, x + 4 * kRows * (s + 1), out);
      }
    } else {
      PLAIT_UNROLL
      for (int s = 0; s < kSteps; ++s) {
        const I step[kVecs] = {load_codes(codes + 64 * s), load_codes(codes + 64 * s + 32)};
        add_step16<kRows>(step, x + 4 * kRows * s, out);
      }
    }
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        out[r][v] = _mm256_madd_epi16(out[r][v], _mm256_set1_epi16(1));
      }
    }
  }

  static void unpack_nibbles(const uint8_t* lines, size_t count, uint8_t* out) {
    const I low = _mm256_set1_epi8(15);
    for (size_t i = 0; i < count; ++i, lines += 64, out += 128) {
      for (int v = 0; v < kVecs; ++v) {
        const I line = load_codes(lines + 32 * v);
        auto* to = reinterpret_cast<__m256i*>(out + 32 * v);
        _mm256_storeu_si256(to, _mm256_and_si256(line, low));
        _mm256_storeu_si256(to + 2, _mm256_and_si256(_mm256_srli_epi16(line, 4), low));
      }
    }
  }

  // The greatest size, by its bits, among which NaN is greater than infinity.
  static float largest(I most) {
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(half));
  }
  static int32_t sum(I v) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtsi128_si32(half);
  }

  // Returns the sum of the codes.
  template <class T, int kGroup>
  static int32_t quantize_group(const T* x, int8_t* codes, float* scale) {
    V::F values[kGroup / 8];
    I most = _mm256_setzero_si256();
    PLAIT_UNROLL
    for (int i = 0; i < kGroup / 8; ++i) {
      values[i] = V::load(x + 8 * i);
      const I size =
          _mm256_and_si256(_mm256_castps_si256(values[i]), _mm256_set1_epi32(0x7fffffff));
      most = _mm256_max_epi32(most, size);
    }
    const GroupScale group(largest(most));
    *scale = group.scale;
    const V::F factor = _mm256_set1_ps(group.inverse);
    I sums = _mm256_setzero_si256();
    PLAIT_UNROLL
    for (int i = 0; i < kGroup / 8; i += 2) {
      const I low = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], factor));
      const I high = _mm256_cvtps_epi32(_mm256_mul_ps(values[i + 1], factor));
      sums = _mm256_add_epi32(sums, _mm256_add_epi32(low, high));
      const I words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
      const __m128i bytes =
          _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 8 * i), bytes);
    }
    return sum(sums);
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

const QuantizedKernels& quantized_kernels_avx2() {
  static constexpr QuantizedKernels kKernels = make_quantized_kernels<Avx2Quant>();
  return kKernels;
}

}  // namespace plait
