#include "likeliest_kernel.h"
#include "vec_avx2.h"

namespace plait {

void likeliest_avx2(const LikeliestArgs& args, size_t begin, size_t end) {
  likeliest<Avx2Vec>(args, begin, end);
}

}  // namespace plait
