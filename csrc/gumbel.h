// Finds the tokens that can win a Gumbel argmax, and leaves out nearly all that cannot. No torch in
// here.
//
// The noise of token v is -log(-log(1 - u)) with u from draw v of a splitmix64 stream; see
// platform/logits/noise.py. It is at most -log(u). With this bound, rounded upwards, one token is
// scored exactly and every token whose bound stays below that score drops out. What remains holds
// the winner, whatever the rounding; the caller scores it in fp64. So the result of a sample does
// not depend on the instruction set.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace plait {

struct GumbelArgs {
  const float* logits;  // [size], no NaN
  size_t size;
  uint64_t key;  // of the noise
  float top;     // the largest logit, finite
  double temperature;
};

// Appends the candidates, in rising order, to `found`.
using GumbelKernel = void (*)(const GumbelArgs& args, std::vector<int64_t>& found);

void gumbel_candidates_plain(const GumbelArgs& args, std::vector<int64_t>& found);
void gumbel_candidates_avx2(const GumbelArgs& args, std::vector<int64_t>& found);
void gumbel_candidates_avx512(const GumbelArgs& args, std::vector<int64_t>& found);

}  // namespace plait
