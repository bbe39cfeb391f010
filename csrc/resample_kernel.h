// The algorithm of resample.h. `Sums` are eight sums of an instruction set, `half()` at first; all
// are whole numbers, so each set gives the same bits.

#pragma once

#include <algorithm>
#include <cstring>

#include "resample.h"

namespace plait {
namespace {

constexpr size_t kRows = 8;          // that go across together: side by side they fill vectors
constexpr size_t kTile = kRows * 3;  // bytes of one column of them
constexpr size_t kTileSums = kTile / 8;
constexpr size_t kRunSums = 4;  // that go down together

struct RgbView {
  const uint8_t* data;
  size_t row_stride, height, width;
};

// Lays rows side by side: tile[x][row][channel].
inline void lay_out(const uint8_t* const* rows, size_t width, uint8_t* tile) {
  for (size_t x = 0; x < width; ++x) {
    for (size_t r = 0; r < kRows; ++r) std::memcpy(tile + x * kTile + r * 3, rows[r] + x * 3, 3);
  }
}

// Makes each row `out_width` wide.
template <class Sums>
void resample_across(const RgbView& in, size_t out_width, ResampleFilter filter, uint8_t* out) {
  const ResampleAxis axis = resample_axis(in.width, out_width, filter);
  std::vector<uint8_t> tile(in.width * kTile);
  const size_t out_stride = out_width * 3;
  for (size_t top = 0; top < in.height; top += kRows) {
    const uint8_t* rows[kRows];
    for (size_t r = 0; r < kRows; ++r) {
      rows[r] = in.data + std::min(top + r, in.height - 1) * in.row_stride;
    }
    lay_out(rows, in.width, tile.data());
    const size_t num_rows = std::min(kRows, in.height - top);
    uint8_t* to = out + top * out_stride;
    for (size_t x = 0; x < out_width; ++x, to += 3) {
      const uint8_t* from = tile.data() + axis.first[x] * kTile;
      const int32_t* weights = axis.weights.data() + x * axis.num_taps;
      Sums sums[kTileSums];
      for (size_t k = 0; k < axis.count[x]; ++k, from += kTile) {
        for (size_t v = 0; v < kTileSums; ++v) sums[v].add(weights[k], from + v * 8);
      }
      uint8_t made[kTile];
      for (size_t v = 0; v < kTileSums; ++v) sums[v].store(made + v * 8);
      for (size_t r = 0; r < num_rows; ++r) std::memcpy(to + r * out_stride, made + r * 3, 3);
    }
  }
}

// Bytes `begin` … `end` of one row of the result, of rows that lie below each other.
template <class Sums, size_t N>
size_t run_down(const uint8_t* from, size_t stride, const int32_t* weights, size_t count,
                size_t begin, size_t end, uint8_t* out) {
  size_t i = begin;
  for (; i + N * 8 <= end; i += N * 8) {
    Sums sums[N];
    for (size_t k = 0; k < count; ++k) {
      for (size_t v = 0; v < N; ++v) sums[v].add(weights[k], from + k * stride + i + v * 8);
    }
    for (size_t v = 0; v < N; ++v) sums[v].store(out + i + v * 8);
  }
  return i;
}

// Makes `out_height` rows.
template <class Sums>
void resample_down(const RgbView& in, size_t out_height, ResampleFilter filter, uint8_t* out) {
  const ResampleAxis axis = resample_axis(in.height, out_height, filter);
  const size_t row_bytes = in.width * 3;
  for (size_t y = 0; y < out_height; ++y, out += row_bytes) {
    const uint8_t* from = in.data + axis.first[y] * in.row_stride;
    const int32_t* weights = axis.weights.data() + y * axis.num_taps;
    const size_t count = axis.count[y];
    size_t i = run_down<Sums, kRunSums>(from, in.row_stride, weights, count, 0, row_bytes, out);
    i = run_down<Sums, 1>(from, in.row_stride, weights, count, i, row_bytes, out);
    for (; i < row_bytes; ++i) {
      int32_t sum = 1 << (kWeightBits - 1);
      for (size_t k = 0; k < count; ++k) sum += weights[k] * from[k * in.row_stride + i];
      out[i] = static_cast<uint8_t>(std::clamp(sum >> kWeightBits, 0, 255));
    }
  }
}

template <class Sums>
void resample(const ResampleArgs& args) {
  const RgbView in{args.in, args.row_stride, args.height, args.width};
  const bool across = args.out_width != args.width, down = args.out_height != args.height;
  if (across && down) {
    if (args.goes_down_first) {
      std::vector<uint8_t> between(args.out_height * args.width * 3);
      resample_down<Sums>(in, args.out_height, args.filter, between.data());
      const RgbView low{between.data(), args.width * 3, args.out_height, args.width};
      resample_across<Sums>(low, args.out_width, args.filter, args.out);
    } else {
      std::vector<uint8_t> between(args.height * args.out_width * 3);
      resample_across<Sums>(in, args.out_width, args.filter, between.data());
      const RgbView wide{between.data(), args.out_width * 3, args.height, args.out_width};
      resample_down<Sums>(wide, args.out_height, args.filter, args.out);
    }
  } else if (across) {
    resample_across<Sums>(in, args.out_width, args.filter, args.out);
  } else if (down) {
    resample_down<Sums>(in, args.out_height, args.filter, args.out);
  } else {
    for (size_t y = 0; y < args.height; ++y) {
      std::memcpy(args.out + y * args.width * 3, args.in + y * args.row_stride, args.width * 3);
    }
  }
}

}  // namespace
}  // namespace plait
