// 8-bit pixels to the numbers that a vision tower takes, by a table of 256 values for each channel:
// scaling and normalising cost nothing more than a look-up, and round as whoever made the table.
// No torch in here.

#pragma once

#include <cstddef>
#include <cstdint>

namespace plait {

struct PixelArgs {
  const uint8_t* in;  // pixel (y, x), channel c at y * row_stride + x * column_stride + c * ...
  size_t row_stride, column_stride, channel_stride;
  size_t height, width;
  const float* table;  // [3][256]
  float* out;          // dense
};

// out [3][height][width]
void planes_of_pixels(const PixelArgs& args);

// out [height · width / size²][3][times][size][size]: squares of `size` pixels, each `times` times
// for as many moments of a film; `merge` by `merge` squares that become one embedding follow each
// other.
void patches_of_pixels(const PixelArgs& args, size_t size, size_t merge, size_t times);

}  // namespace plait
