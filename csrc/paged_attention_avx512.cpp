#include "vec_avx512.h"

#include "attention_scores_dot.h"
#include "paged_attention_kernel.h"

namespace plait {

AttentionKernels attention_kernels_avx512() {
  return make_attention_kernels<Avx512Vec, AvxTranspose>();
}

AttentionKernels attention_kernels_avx512_bf16() {
  AttentionKernels kernels = make_attention_kernels<Avx512Vec, AvxTranspose>();
  kernels.bfloat16 = &attend<DotScores>;
  return kernels;
}

}  // namespace plait
