#include "gumbel_kernel.h"

template class std::vector<float>;

namespace plait {

void gumbel_candidates_plain(const GumbelArgs& args, std::vector<int64_t>& found) {
  gumbel_candidates(args, found);
}

}  // namespace plait
