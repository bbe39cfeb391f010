#include "paged_attention_avx.h"
#include "vec_avx2.h"

namespace plait {

AttentionKernels attention_kernels_avx2() {
  return make_attention_kernels<FloatScores<Avx2Vec>, WidenScores<Avx2Vec>, AvxTranspose>();
}

}  // namespace plait
