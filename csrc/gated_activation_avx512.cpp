#include "gated_activation_kernel.h"
#include "vec_avx512.h"

namespace plait {

void gated_activation_avx512(const GatedActivationArgs& args, size_t begin, size_t end) {
  gated_activation<Avx512Vec>(args, begin, end);
}

}  // namespace plait
