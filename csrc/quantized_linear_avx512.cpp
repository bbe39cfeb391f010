#include "quantized_avx512.h"

namespace plait {
namespace {

// Without dot instructions, as quantized_linear_avx2.cpp tells.
struct WordQuant : Avx512Quant {
  static constexpr int kMaxRows = 8;
  static constexpr size_t kMostTiles = 3;
  static constexpr size_t kDirectRows = 8;
  static constexpr Codes kUnpacked = Codes::kSmall;

  static constexpr bool kPairs = true;
  static constexpr bool kFetchesInStep = false;

  template <Codes kCodes, int, bool>
  static constexpr size_t step_bytes() {
    return kCodes == Codes::kBytes ? 8 : 4;
  }

  template <int kRows>
  static PLAIT_INLINE void add_step16(I codes, const char* x, I (&sums)[kRows][kVecs]) {
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const I products = _mm512_maddubs_epi16(codes, broadcast(x + 4 * r));
      sums[r][0] = _mm512_add_epi16(sums[r][0], products);
      pin(sums[r][0]);
    }
  }

  template <int kRows>
  static PLAIT_INLINE void add_step32(I codes, const char* x, I (&sums)[kRows][kVecs]) {
    const I even = _mm512_and_si512(codes, _mm512_set1_epi16(0xff));
    const I odd = _mm512_srli_epi16(codes, 8);
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const I even_products = _mm512_madd_epi16(even, broadcast(x + 8 * r));
      const I odd_products = _mm512_madd_epi16(odd, broadcast(x + 8 * r + 4));
      sums[r][0] = _mm512_add_epi32(sums[r][0], even_products);
      sums[r][0] = _mm512_add_epi32(sums[r][0], odd_products);
      pin(sums[r][0]);
    }
  }

  template <Codes kCodes, int kSteps, int kRows>
  static PLAIT_INLINE void add(const uint8_t* codes, const char* x, I (&sums)[kRows][kVecs]) {
    PLAIT_UNROLL
    for (int s = 0; s < kSteps; s += 2) {
      if constexpr (kCodes == Codes::kBytes) {
        add_step32<kRows>(load_codes(codes + 64 * s), x + 8 * kRows * s, sums);
        add_step32<kRows>(load_codes(codes + 64 * s + 64), x + 8 * kRows * (s + 1), sums);
      } else if constexpr (kCodes == Codes::kNibbles) {
        const I line = load_codes(codes + 32 * s);
        add_step16<kRows>(low_nibbles(line), x + 4 * kRows * s, sums);
        add_step16<kRows>(high_nibbles(line), x + 4 * kRows * (s + 1), sums);
      } else {
        add_step16<kRows>(load_codes(codes + 64 * s), x + 4 * kRows * s, sums);
        add_step16<kRows>(load_codes(codes + 64 * s + 64), x + 4 * kRows * (s + 1), sums);
      }
    }
    if constexpr (kCodes != Codes::kBytes) {
      PLAIT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        sums[r][0] = _mm512_madd_epi16(sums[r][0], _mm512_set1_epi16(1));
      }
    }
  }

  template <Codes kCodes, int kSteps, bool kMins, int kTiles, int kRows>
  static PLAIT_INLINE void dot(const GroupCodes& group, const char* x, const char* offsets,
                               I (&out)[kTiles][kRows][kVecs]) {
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t) {
      begin<kMins, kRows>(offsets, out[t]);
      add<kCodes, kSteps, kRows>(group.codes + t * group.apart, x, out[t]);
    }
  }
};

}  // namespace

const QuantizedKernels& quantized_kernels_avx512() {
  static constexpr QuantizedKernels kKernels = make_quantized_kernels<WordQuant>();
  return kKernels;
}

}  // namespace plait
