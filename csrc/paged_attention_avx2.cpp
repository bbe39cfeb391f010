#include "attention_transpose_avx.h"
#include "paged_attention_kernel.h"
#include "vec_avx2.h"

namespace plait {

AttentionKernels attention_kernels_avx2() {
  return make_attention_kernels<Avx2Vec, AvxTranspose>();
}

}  // namespace plait
