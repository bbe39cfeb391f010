#include "best_token_kernel.h"

namespace plait {

BestToken best_token_plain(const float* logits, size_t size) {
  return best_token<PlainVec>(logits, size);
}

}  // namespace plait
