#include "activation_kernel.h"
#include "vec_avx512.h"

namespace plait {

void activation_avx512(const ActivationArgs& args, size_t begin, size_t end) {
  activation<Avx512Vec>(args, begin, end);
}

}  // namespace plait
