// The first of the largest logits of each row. No torch in here.

#pragma once

#include <cstddef>
#include <cstdint>

namespace plait {

struct LikeliestArgs {
  const float* logits;
  size_t row_stride;  // in values
  size_t num_tokens;  // of a row that are looked at, at least one
  int64_t* tokens;    // one a row; -1 where a logit is NaN, or the largest is infinite
};

// Rows begin … end - 1.
using LikeliestKernel = void (*)(const LikeliestArgs& args, size_t begin, size_t end);

void likeliest_plain(const LikeliestArgs& args, size_t begin, size_t end);
void likeliest_avx2(const LikeliestArgs& args, size_t begin, size_t end);
void likeliest_avx512(const LikeliestArgs& args, size_t begin, size_t end);

}  // namespace plait
