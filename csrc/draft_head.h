// What a draft head computes outside of its program, by the program's kernels and threads. No torch
// in here.

#pragma once

#include <cstddef>
#include <vector>

#include "best_token.h"
#include "element.h"
#include "program_runner.h"
#include "quantized_weight.h"

namespace plait {

struct DraftMatrix {
  size_t in_features;
  size_t out_features;
  bool is_quantized;   // which of the next two it is
  const void* weight;  // of the registers' type, see linear.h
  QuantizedWeight quantized;
};

// What stands around a head's program. Tokens are numbered as the head has them.
struct DraftHead {
  size_t num_tokens;
  const void* embeddings;  // [num_tokens, width of the output], of the registers' type
  Vector norm;             // before the logits
  float eps;
  DraftMatrix logits;
};

// out = x · weightᵀ; `x` of the registers' type and dense, rows of `out` out_stride elements apart.
void multiply(const ProgramRunner& runner, const DraftMatrix& matrix, const void* x, size_t rows,
              void* out, size_t out_stride, Element out_type);

// Norms of dense rows, of the registers' type.
void norm_rows(const ProgramRunner& runner, const Vector& weight, float eps, size_t width,
               const void* x, size_t rows, void* out);

// The likeliest token behind each of some dense rows that the program gave. One whose chance is not
// finite is none.
std::vector<BestToken> likeliest(const ProgramRunner& runner, const DraftHead& head,
                                 const void* hidden, size_t rows);

}  // namespace plait
