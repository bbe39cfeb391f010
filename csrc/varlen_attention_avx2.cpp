#include "attention_transpose_avx.h"
#include "varlen_attention_kernel.h"
#include "vec_avx2.h"

namespace plait {

VarlenKernels varlen_kernels_avx2() { return make_varlen_kernels<Avx2Vec, AvxTranspose>(); }

}  // namespace plait
