#include "gated_activation_kernel.h"
#include "vec_avx2.h"

namespace plait {

void gated_activation_avx2(const GatedActivationArgs& args, size_t begin, size_t end) {
  gated_activation<Avx2Vec>(args, begin, end);
}

}  // namespace plait
