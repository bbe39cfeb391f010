// How many rows and vectors a micro-kernel of attention takes at once, as constants: what it sums
// stays in registers.

#pragma once

#include "paged_attention.h"
#include "vec.h"

namespace plait {
namespace {

// Vectors beside each other in a micro-kernel of so many rows: the sums must fit the registers.
template <class V>
constexpr int vectors_beside(int rows) {
  const int sums = V::kRegisters == 32 ? 24 : 12;
  const int vectors = sums / rows;
  return vectors >= 8 ? 8 : vectors >= 4 ? 4 : vectors >= 2 ? 2 : 1;
}

// Calls f.template operator()<n>(first vector) over `count` vectors, widest pieces first.
template <int kVecs, class F>
inline void in_pieces(int64_t count, int64_t first, const F& f) {
  for (; first + kVecs <= count; first += kVecs) f.template operator()<kVecs>(first);
  if constexpr (kVecs > 1) {
    if (first < count) in_pieces<kVecs / 2>(count, first, f);
  }
}

// Calls f.template operator()<rows>() with the count as a constant.
template <class F>
inline void with_rows(int64_t rows, const F& f) {
  switch (rows) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    case 4:
      return f.template operator()<4>();
    case 5:
      return f.template operator()<5>();
    default:
      return f.template operator()<6>();
  }
}

// Splits rows into micro-kernels of nearly equal height: f(first row, rows).
template <class F>
inline void each_micro(int64_t num_rows, const F& f) {
  const int64_t count = (num_rows + kMicroRows - 1) / kMicroRows;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = num_rows * i / count;
    f(row, num_rows * (i + 1) / count - row);
  }
}

}  // namespace
}  // namespace plait
