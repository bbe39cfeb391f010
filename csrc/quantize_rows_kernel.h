// Rows to whole numbers, see quantized_linear.h, as templates over the vector type.

#pragma once

#include "quantized_linear.h"
#include "vec.h"

namespace plait {
namespace {

// The row group's values, zeros beyond `count`.
template <class V, class T>
void widen_group(const T* x, size_t count, size_t group, float* out) {
  if (count >= group) {
    for (size_t i = 0; i < group; i += V::kLanes) V::store(out + i, V::load(x + i));
    return;
  }
  for (size_t i = 0; i < group; i += V::kLanes) {
    V::store(out + i, i < count ? load_some<V>(x + i, count - i) : V::zero());
  }
}

template <class Q, class T>
void quantize_row(const QuantizeRowsArgs& args, const T* x, size_t row) {
  const size_t groups = args.padded_inputs / args.row_group;
  int8_t* codes = args.codes + row * args.padded_inputs;
  for (size_t g = 0; g < groups; ++g) {
    const size_t first = g * args.row_group;
    const size_t count = first < args.in_features ? args.in_features - first : 0;
    float values[kRowGroup];
    widen_group<typename Q::V>(x + (count > 0 ? first : 0), count, args.row_group, values);

    const float most = Q::largest(values, args.row_group);
    const bool is_finite = most < __builtin_inff();  // neither infinite nor NaN
    const bool is_zero = !(most > 1e-30f);           // where 127 / most could overflow
    const float inverse = is_zero || !is_finite ? 0.0f : 127.0f / most;
    const float scale = is_finite ? most * (1.0f / 127.0f) : __builtin_nanf("");
    const size_t place = row * groups + g;
    args.sums[place] = is_finite ? Q::round_group(values, inverse, args.row_group, codes + first)
                                 : Q::round_group(Q::kZeros, 0.0f, args.row_group, codes + first);
    args.scales[place] = is_finite && is_zero ? 0.0f : scale;
  }
}

template <class Q>
void quantize_rows_of(const QuantizeRowsArgs& args, size_t begin, size_t end) {
  for (size_t row = begin; row < end; ++row) {
    if (args.x_type == Element::kFloat32) {
      quantize_row<Q>(args, static_cast<const float*>(args.x) + row * args.x_stride, row);
    } else {
      quantize_row<Q>(args, static_cast<const uint16_t*>(args.x) + row * args.x_stride, row);
    }
  }
}

}  // namespace
}  // namespace plait
