// Layer norm: each row less its mean, divided by its standard deviation, times a weight, plus a
// bias; computed in fp32 and rounded once. No torch in here.
//
// The sums run over four vectors of partial sums in an order that depends on the row's length
// alone, so a row has the same bits in any batch.

#pragma once

#include <cstddef>

#include "element.h"

namespace plait {

struct LayerNormArgs {
  const void* x;
  Element type;  // of x and out
  size_t size;
  size_t row_stride;  // of x, in elements; out is dense

  const void* weight;  // [size], or null
  const void* bias;    // [size], or null
  Element weight_type;
  Element bias_type;
  float eps;

  void* out;
};

// Computes rows begin … end. `out` may be x.
using LayerNormKernel = void (*)(const LayerNormArgs& args, size_t begin, size_t end);

void layer_norm_plain(const LayerNormArgs& args, size_t begin, size_t end);
void layer_norm_avx2(const LayerNormArgs& args, size_t begin, size_t end);
void layer_norm_avx512(const LayerNormArgs& args, size_t begin, size_t end);

}  // namespace plait
