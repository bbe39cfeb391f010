#include "quantized_avx512.h"

namespace plait {
namespace {

// By the dot products of bytes (VNNI): codes unsigned, rows signed, four inputs of sixteen outputs
// in an instruction.
struct VnniQuant : Avx512Quant {
  static constexpr int kMaxRows = 8;
  static constexpr size_t kMostTiles = 3;
  static constexpr size_t kDirectRows = 8;
  static constexpr Codes kUnpacked = Codes::kBytes;

  static constexpr bool kPairs = false;
  static constexpr bool kFetchesInStep = false;

  template <Codes, int, bool>
  static constexpr size_t step_bytes() {
    return kStepInputs;
  }

  template <int kRows>
  static PLAIT_INLINE void add_step(I codes, const char* x, I (&sums)[kRows][kVecs]) {
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], codes, broadcast(x + 4 * r));
    }
  }

  template <Codes kCodes, int kSteps, int kRows>
  static PLAIT_INLINE void add(const uint8_t* codes, const char* x, I (&sums)[kRows][kVecs]) {
    PLAIT_UNROLL
    for (int s = 0; s < kSteps; s += 2) {
      I first, second;
      if constexpr (kCodes == Codes::kNibbles) {
        const I line = load_codes(codes + 32 * s);
        first = low_nibbles(line);
        second = high_nibbles(line);
      } else {
        first = load_codes(codes + 64 * s);
        second = load_codes(codes + 64 * s + 64);
      }
      add_step<kRows>(first, x + 4 * kRows * s, sums);
      add_step<kRows>(second, x + 4 * kRows * (s + 1), sums);
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

const QuantizedKernels& quantized_kernels_vnni() {
  static constexpr QuantizedKernels kKernels = make_quantized_kernels<VnniQuant>();
  return kKernels;
}

}  // namespace plait
