#include "vec_avx512.h"

#include "paged_attention_dot.h"

namespace plait {

AttentionKernels attention_kernels_avx512() {
  return make_attention_kernels<Avx512Vec, AvxTranspose>();
}

AttentionKernels attention_kernels_avx512_bf16() {
  return {make_attention_kernels<Avx512Vec, AvxTranspose>().float32, &attend<DotScores>};
}

}  // namespace plait
