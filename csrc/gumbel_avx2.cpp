#include "gumbel_kernel.h"

namespace plait {

void gumbel_candidates_avx2(const GumbelArgs& args, std::vector<int64_t>& found) {
  gumbel_candidates(args, found);
}

}  // namespace plait
