#include "resample_kernel.h"

namespace plait {
namespace {

struct PlainSums {
  int32_t values[8];

  PlainSums() { std::fill_n(values, 8, 1 << (kWeightBits - 1)); }

  void add(int32_t weight, const uint8_t* bytes) {
    for (size_t i = 0; i < 8; ++i) values[i] += weight * bytes[i];
  }

  void store(uint8_t* out) const {
    for (size_t i = 0; i < 8; ++i) {
      out[i] = static_cast<uint8_t>(std::clamp(values[i] >> kWeightBits, 0, 255));
    }
  }
};

}  // namespace

void resample_plain(const ResampleArgs& args) { resample<PlainSums>(args); }

}  // namespace plait
