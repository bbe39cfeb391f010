// The likeliest token of a row of logits, and how likely it is. No torch in here.

#pragma once

#include <cstddef>

namespace plait {

struct BestToken {
  size_t index;  // the first of the largest
  float chance;  // its softmax; NaN where a logit is NaN, or the largest is infinite
};

BestToken best_token_plain(const float* logits, size_t size);
BestToken best_token_avx2(const float* logits, size_t size);
BestToken best_token_avx512(const float* logits, size_t size);

}  // namespace plait
