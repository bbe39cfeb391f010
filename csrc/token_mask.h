// Sets what a grammar forbids to minus infinity, by rows of bits. No torch in here.
//
// Nearly all of a row is forbidden or nearly all is allowed, so words of bits that are all set or
// all clear are the common ones and cost no work, or a plain fill.

#pragma once

#include <cstddef>
#include <cstdint>

namespace plait {

struct TokenMaskArgs {
  float* logits;         // row r at r * row_stride, `vocab_size` values each
  size_t row_stride;     // in values
  size_t vocab_size;     // at most 32 * num_words
  const uint32_t* mask;  // [M][num_words]; bit v % 32 of word v / 32 allows token v
  size_t num_words;
  const int32_t* mask_rows;  // for each row of logits the row of `mask`; negative: stays as it is
};

// Works on rows begin … end of the logits.
using TokenMaskKernel = void (*)(const TokenMaskArgs& args, size_t begin, size_t end);

void token_mask_plain(const TokenMaskArgs& args, size_t begin, size_t end);
void token_mask_avx2(const TokenMaskArgs& args, size_t begin, size_t end);
void token_mask_avx512(const TokenMaskArgs& args, size_t begin, size_t end);

}  // namespace plait
