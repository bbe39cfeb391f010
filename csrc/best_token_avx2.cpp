#include "best_token_kernel.h"
#include "vec_avx2.h"

namespace plait {

BestToken best_token_avx2(const float* logits, size_t size) {
  return best_token<Avx2Vec>(logits, size);
}

}  // namespace plait
