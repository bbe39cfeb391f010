#include "pixels.h"

#include <cstring>

namespace plait {
namespace {

inline float* look_up(const uint8_t* from, size_t stride, size_t count, const float* table,
                      float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = table[from[i * stride]];
  return out + count;
}

}  // namespace

void planes_of_pixels(const PixelArgs& args) {
  const size_t plane = args.height * args.width;
  for (size_t y = 0; y < args.height; ++y) {
    for (size_t c = 0; c < 3; ++c) {
      look_up(args.in + y * args.row_stride + c * args.channel_stride, args.column_stride,
              args.width, args.table + c * 256, args.out + c * plane + y * args.width);
    }
  }
}

void patches_of_pixels(const PixelArgs& args, size_t size, size_t merge, size_t times) {
  const size_t side = size * merge;
  float* out = args.out;
  const auto patch = [&](size_t top, size_t left) {
    for (size_t c = 0; c < 3; ++c) {
      const float* made = out;
      for (size_t y = top; y < top + size; ++y) {
        out = look_up(
            args.in + y * args.row_stride + left * args.column_stride + c * args.channel_stride,
            args.column_stride, size, args.table + c * 256, out);
      }
      for (size_t t = 1; t < times; ++t, out += size * size) {
        std::memcpy(out, made, size * size * sizeof(float));
      }
    }
  };
  for (size_t top = 0; top < args.height; top += side) {
    for (size_t left = 0; left < args.width; left += side) {
      for (size_t y = top; y < top + side; y += size) {
        for (size_t x = left; x < left + side; x += size) patch(y, x);
      }
    }
  }
}

}  // namespace plait
