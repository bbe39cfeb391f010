#include "rope_kernel.h"
#include "vec_avx512.h"

namespace plait {

void rope_avx512(const RopeArgs& args, size_t begin, size_t end) {
  rope<Avx512Vec>(args, begin, end);
}

}  // namespace plait
