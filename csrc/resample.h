// Resizes 8-bit RGB as Pillow does, to the last bit: filters that widen when an image shrinks,
// weights of 22 bits, one direction after the other, rounded to 8 bits between them. No torch in
// here.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace plait {

constexpr int kWeightBits = 22;

// Pillow's numbers.
enum class ResampleFilter { kLanczos = 1, kBilinear = 2, kBicubic = 3 };

// What each output of one direction is made of.
struct ResampleAxis {
  size_t num_taps;               // room for weights of one output
  std::vector<size_t> first;     // the first input of each output
  std::vector<size_t> count;     // and how many there are
  std::vector<int32_t> weights;  // [outputs][num_taps]
};

ResampleAxis resample_axis(size_t size, size_t out_size, ResampleFilter filter);

struct ResampleArgs {
  const uint8_t* in;  // [height] rows of [width][3], `row_stride` bytes apart
  size_t row_stride;
  size_t height, width;
  uint8_t* out;  // [out_height][out_width][3], dense
  size_t out_height, out_width;
  ResampleFilter filter;
  bool goes_down_first;  // columns before rows: other bits, and which Pillow takes is its choice
};

using ResampleKernel = void (*)(const ResampleArgs& args);

void resample_plain(const ResampleArgs& args);
void resample_avx2(const ResampleArgs& args);

}  // namespace plait
