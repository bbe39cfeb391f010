#include "layer_norm_kernel.h"
#include "vec.h"

namespace plait {

void layer_norm_plain(const LayerNormArgs& args, size_t begin, size_t end) {
  layer_norm<PlainVec>(args, begin, end);
}

}  // namespace plait
