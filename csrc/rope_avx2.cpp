#include "rope_kernel.h"
#include "vec_avx2.h"

namespace plait {

void rope_avx2(const RopeArgs& args, size_t begin, size_t end) { rope<Avx2Vec>(args, begin, end); }

}  // namespace plait
