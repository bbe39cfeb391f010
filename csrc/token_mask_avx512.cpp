#include "token_mask_kernel.h"

namespace plait {

void token_mask_avx512(const TokenMaskArgs& args, size_t begin, size_t end) {
  token_mask(args, begin, end);
}

}  // namespace plait
