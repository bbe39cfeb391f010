#include "activation_kernel.h"
#include "vec_avx2.h"

namespace plait {

void activation_avx2(const ActivationArgs& args, size_t begin, size_t end) {
  activation<Avx2Vec>(args, begin, end);
}

}  // namespace plait
