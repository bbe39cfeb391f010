// RMS norm: each row divided by the root of its mean square, times a weight. No torch in here.
//
// The sum of squares runs over four vectors of partial sums in an order that depends on the row's
// length alone, so a row has the same bits in any batch.

#pragma once

#include <cstddef>

#include "element.h"

namespace plait {

// Rows stand in `outer` groups of `inner`, as the heads of tokens do: x[outer][inner][size].
struct RmsNormArgs {
  const void* x;
  Element type;  // of x and out
  size_t outer;
  size_t inner;
  size_t size;
  size_t outer_stride;  // of x, in elements; out is dense
  size_t inner_stride;

  const void* weight;  // [size]
  Element weight_type;
  float weight_offset;  // added to the weight
  float eps;
  bool round_first;  // round to x's type before multiplying by the weight

  void* out;
};

// Computes groups begin … end of the outer ones.
using RmsNormKernel = void (*)(const RmsNormArgs& args, size_t begin, size_t end);

void rms_norm_plain(const RmsNormArgs& args, size_t begin, size_t end);
void rms_norm_avx2(const RmsNormArgs& args, size_t begin, size_t end);
void rms_norm_avx512(const RmsNormArgs& args, size_t begin, size_t end);

}  // namespace plait
