#include "rms_norm_kernel.h"
#include "vec_avx512.h"

namespace plait {

void rms_norm_avx512(const RmsNormArgs& args, size_t begin, size_t end) {
  rms_norm<Avx512Vec>(args, begin, end);
}

}  // namespace plait
