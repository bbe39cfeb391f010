#include "likeliest_kernel.h"
#include "vec_avx512.h"

namespace plait {

void likeliest_avx512(const LikeliestArgs& args, size_t begin, size_t end) {
  likeliest<Avx512Vec>(args, begin, end);
}

}  // namespace plait
