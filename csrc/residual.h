// Sums and multiples of rows, value by value, in place. No torch in here.

#pragma once

#include <cstddef>

#include "element.h"

namespace plait {

struct AddArgs {
  void* out;  // out + scale · x, the product rounded to `type` before the sum
  const void* x;
  Element type;
  float scale;
};

struct ScaleArgs {
  void* out;  // scale · out
  Element type;
  float scale;
};

// Compute values begin … end.
using AddKernel = void (*)(const AddArgs& args, size_t begin, size_t end);
using ScaleKernel = void (*)(const ScaleArgs& args, size_t begin, size_t end);

struct ResidualKernels {
  AddKernel add;
  ScaleKernel scale;
};

ResidualKernels residual_kernels_plain();
ResidualKernels residual_kernels_avx2();
ResidualKernels residual_kernels_avx512();

}  // namespace plait
