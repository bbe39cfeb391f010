#include "quantized_exact.h"
#include "vec_avx2.h"

namespace plait {
namespace {

// Without dot instructions. Products of 4-bit codes are summed in int16: pairs by vpmaddubsw, at
// most 2 · 15 · 127, and eight of them in a row group; on the way they may wrap, see
// kMostPairZeroPoint. Products of 8-bit codes would not fit there, so bytes are widened, even and
// odd ones apart, and their rows come as (x0, x2), (x1, x3) in int16. One row alone multiplies the
// sizes of codes about 128 with itself under their signs instead: 2 · 128 · 127 does fit.
struct Avx2Quant {
  using V = Avx2Vec;
  using I = __m256i;
  static constexpr int kVecs = 2;
  static constexpr int kMaxRows = 4;
  static constexpr size_t kMostTiles = 4;
  static constexpr size_t kDirectRows = 8;
  static constexpr Codes kUnpacked = Codes::kSmall;

  static constexpr bool kPairs = true;
  static constexpr bool kFetchesInStep = true;

  template <Codes kCodes, int kRows, bool kMins>
  static constexpr bool by_signs() {
    return kCodes == Codes::kBytes && kRows == 1 && !kMins;
  }
  template <Codes kCodes, int kRows, bool kMins>
  static constexpr size_t step_bytes() {
    return kCodes == Codes::kBytes && !by_signs<kCodes, kRows, kMins>() ? 8 : 4;
  }
  // What the codes of rows are multiplied with beside the weights' codes.
  template <Codes kCodes, int kRows>
  static constexpr int zero_code() {
    return by_signs<kCodes, kRows, false>() ? 128 : 0;
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
  template <int kBits, int kShift>
  static I bits(I v) {
    return _mm256_and_si256(_mm256_srli_epi32(v, kShift), _mm256_set1_epi32((1 << kBits) - 1));
  }

  // Keeps sums where they are: GCC would add up the products of several steps as a tree, and so
  // many of them drive each other out of registers.
  static PLAIT_INLINE void pin(I& v) { __asm__("" : "+x"(v)); }

  // Adds the products of codes with a step of each row to the tile's sums.
  template <int kRows>
  static PLAIT_INLINE void add16(I codes, const I (&rows)[kRows], I (&sums)[kRows][kVecs], int v) {
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sums[r][v] = _mm256_add_epi16(sums[r][v], _mm256_maddubs_epi16(codes, rows[r]));
      pin(sums[r][v]);
    }
  }
  template <int kRows>
  static PLAIT_INLINE void add32(I words, const I (&rows)[kRows], I (&sums)[kRows][kVecs], int v) {
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(words, rows[r]));
      pin(sums[r][v]);
    }
  }
  template <int kRows>
  static PLAIT_INLINE void load_rows(const char* x, size_t stride, I (&rows)[kRows]) {
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) rows[r] = broadcast(x + stride * static_cast<size_t>(r));
  }

  // A line of two steps. The low halves of all tiles pass by before the high ones, so that rows of
  // one step alone take registers.
  template <int kTiles, int kRows>
  static PLAIT_INLINE void add_nibbles(const uint8_t* line, size_t apart, const char* x,
                                       I (&sums)[kTiles][kRows][kVecs]) {
    const I low = _mm256_set1_epi8(15);
    I rows[kRows];
    load_rows<kRows>(x, 4, rows);
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t) {
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const I bytes = load_codes(line + t * apart + 32 * static_cast<size_t>(v));
        add16<kRows>(_mm256_and_si256(bytes, low), rows, sums[t], v);
      }
    }
    load_rows<kRows>(x + 4 * kRows, 4, rows);
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t) {
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const I bytes = load_codes(line + t * apart + 32 * static_cast<size_t>(v));
        add16<kRows>(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), low), rows, sums[t], v);
      }
    }
  }

  template <int kTiles, int kRows>
  static PLAIT_INLINE void add_small(const uint8_t* line, size_t apart, const char* x,
                                     I (&sums)[kTiles][kRows][kVecs]) {
    I rows[kRows];
    load_rows<kRows>(x, 4, rows);
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t) {
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        add16<kRows>(load_codes(line + t * apart + 32 * static_cast<size_t>(v)), rows, sums[t], v);
      }
    }
  }

  template <int kTiles, int kRows>
  static PLAIT_INLINE void add_bytes(const uint8_t* line, size_t apart, const char* x,
                                     I (&sums)[kTiles][kRows][kVecs]) {
    I rows[kRows];
    load_rows<kRows>(x, 8, rows);
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t) {
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const I bytes = load_codes(line + t * apart + 32 * static_cast<size_t>(v));
        add32<kRows>(_mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), rows, sums[t], v);
      }
    }
    load_rows<kRows>(x + 4, 8, rows);
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t) {
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const I bytes = load_codes(line + t * apart + 32 * static_cast<size_t>(v));
        add32<kRows>(_mm256_srli_epi16(bytes, 8), rows, sums[t], v);
      }
    }
  }

  template <int kTiles>
  static PLAIT_INLINE void add_signed(const uint8_t* line, size_t apart, const char* x,
                                      I (&sums)[kTiles][1][kVecs]) {
    const I row = broadcast(x);
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t) {
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const I bytes = load_codes(line + t * apart + 32 * static_cast<size_t>(v));
        const I codes = _mm256_xor_si256(bytes, _mm256_set1_epi8(static_cast<char>(0x80)));
        const I pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(row, codes));
        sums[t][0][v] =
            _mm256_add_epi32(sums[t][0][v], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        pin(sums[t][0][v]);
      }
    }
  }

  template <Codes kCodes, int kSteps, bool kMins, int kTiles, int kRows>
  static PLAIT_INLINE void dot(const GroupCodes& group, const char* x, const char* offsets,
                               I (&out)[kTiles][kRows][kVecs]) {
    const uint8_t* const codes = group.codes;
    const size_t apart = group.apart;
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t) {
      PLAIT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        PLAIT_UNROLL
        for (int v = 0; v < kVecs; ++v) {
          out[t][r][v] = kMins ? _mm256_setzero_si256() : broadcast(offsets + 4 * r);
        }
      }
    }
    constexpr size_t kStepBytes = kRows * step_bytes<kCodes, kRows, kMins>();
    PLAIT_UNROLL
    for (size_t s = 0; s < kSteps; s += kCodes == Codes::kNibbles ? 2 : 1, x += kStepBytes) {
      if constexpr (fetches_lines<Avx2Quant, kCodes>(kRows, kTiles)) {
        fetch_ahead<kTiles>(codes + 32 * s, kQuantLineBytes, apart);
      }
      if constexpr (kCodes == Codes::kNibbles) {
        add_nibbles<kTiles, kRows>(codes + 32 * s, apart, x, out);
        x += kStepBytes;
      } else if constexpr (kCodes == Codes::kSmall) {
        add_small<kTiles, kRows>(codes + 64 * s, apart, x, out);
      } else if constexpr (by_signs<kCodes, kRows, kMins>()) {
        add_signed<kTiles>(codes + 64 * s, apart, x, out);
      } else {
        add_bytes<kTiles, kRows>(codes + 64 * s, apart, x, out);
      }
    }
    if constexpr (kCodes == Codes::kBytes) return;
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t) {
      PLAIT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        PLAIT_UNROLL
        for (int v = 0; v < kVecs; ++v) {
          out[t][r][v] = _mm256_madd_epi16(out[t][r][v], _mm256_set1_epi16(1));
        }
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

  // Of the first two codes of each step.
  static int32_t sum_of_first_pairs(const int8_t* codes, size_t count) {
    __m128i sums = _mm_setzero_si128();
    for (size_t i = 0; i < count; i += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
      const __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), bytes);
      sums = _mm_add_epi32(sums, _mm_madd_epi16(pairs, _mm_set1_epi32(1)));
    }
    return sum(_mm256_zextsi128_si256(sums));
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
