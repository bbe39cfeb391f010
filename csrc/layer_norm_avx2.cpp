#include "layer_norm_kernel.h"
#include "vec_avx2.h"

namespace plait {

void layer_norm_avx2(const LayerNormArgs& args, size_t begin, size_t end) {
  layer_norm<Avx2Vec>(args, begin, end);
}

}  // namespace plait
