#include "rms_norm_kernel.h"
#include "vec_avx2.h"

namespace plait {

void rms_norm_avx2(const RmsNormArgs& args, size_t begin, size_t end) {
  rms_norm<Avx2Vec>(args, begin, end);
}

}  // namespace plait
