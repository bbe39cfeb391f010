// The algorithm of token_mask.h, compiled once for each instruction set: plain loops over a word's
// 32 tokens, which the compiler turns into vectors.

#pragma once

#include <bit>

#include "token_mask.h"

namespace plait {
namespace {

constexpr size_t kWordBits = 32;
constexpr uint32_t kForbidden = 0xFF800000u;  // minus infinity

// Bits and not floats are chosen between, so that an allowed NaN stays the NaN it was.
inline void mask_word(uint32_t word, float* logits, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(logits[i]);
    const uint32_t allowed = 0u - ((word >> i) & 1u);
    logits[i] = std::bit_cast<float>((bits & allowed) | (kForbidden & ~allowed));
  }
}

inline void mask_row(const uint32_t* mask, float* logits, size_t size) {
  const size_t whole = size / kWordBits;
  for (size_t w = 0; w < whole; ++w) {
    if (mask[w] != 0xFFFFFFFFu) mask_word(mask[w], logits + w * kWordBits, kWordBits);
  }
  if (const size_t rest = size % kWordBits; rest != 0) {
    mask_word(mask[whole], logits + whole * kWordBits, rest);
  }
}

inline void token_mask(const TokenMaskArgs& args, size_t begin, size_t end) {
  for (size_t row = begin; row < end; ++row) {
    const int32_t from = args.mask_rows[row];
    if (from < 0) continue;
    mask_row(args.mask + static_cast<size_t>(from) * args.num_words,
             args.logits + row * args.row_stride, args.vocab_size);
  }
}

}  // namespace
}  // namespace plait
