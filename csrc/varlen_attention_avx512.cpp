#include "vec_avx512.h"

#include "attention_scores_dot.h"
#include "varlen_attention_kernel.h"

namespace plait {

VarlenKernels varlen_kernels_avx512() { return make_varlen_kernels<Avx512Vec, AvxTranspose>(); }

VarlenKernels varlen_kernels_avx512_bf16() {
  return {make_varlen_kernels<Avx512Vec, AvxTranspose>().float32, &attend_varlen<DotScores>};
}

}  // namespace plait
