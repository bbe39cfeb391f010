#include "best_token_kernel.h"
#include "vec_avx512.h"

namespace plait {

BestToken best_token_avx512(const float* logits, size_t size) {
  return best_token<Avx512Vec>(logits, size);
}

}  // namespace plait
