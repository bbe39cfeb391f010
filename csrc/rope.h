// Rotary position embeddings: pairs of a head's first values are rotated in place. No torch in
// here.
//
//   out = x · cos + rotated · sin      rotated: of a pair (a, b), (-b, a)
//
// Products and the sum are rounded separately, as torch rounds them: to the type of x where
// `round_products`, else to fp32.

#pragma once

#include <cstddef>
#include <cstdint>

#include "element.h"

namespace plait {

struct RopeArgs {
  void* x;  // the first head of row 0
  Element type;
  size_t row_stride;  // in elements
  size_t num_heads;
  size_t head_stride;  // in elements

  const float* cos;  // [positions or rows, rotary]
  const float* sin;
  size_t rotary;             // even
  const int64_t* positions;  // of the rows, or null: tables have a row for each
  bool is_interleaved;       // pairs are neighbours, else halves
  bool round_products;
};

// Rotates rows begin … end.
using RopeKernel = void (*)(const RopeArgs& args, size_t begin, size_t end);

void rope_plain(const RopeArgs& args, size_t begin, size_t end);
void rope_avx2(const RopeArgs& args, size_t begin, size_t end);
void rope_avx512(const RopeArgs& args, size_t begin, size_t end);

}  // namespace plait
