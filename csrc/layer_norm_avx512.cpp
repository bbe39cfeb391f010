#include "layer_norm_kernel.h"
#include "vec_avx512.h"

namespace plait {

void layer_norm_avx512(const LayerNormArgs& args, size_t begin, size_t end) {
  layer_norm<Avx512Vec>(args, begin, end);
}

}  // namespace plait
