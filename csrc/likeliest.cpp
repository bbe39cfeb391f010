#include "likeliest_kernel.h"

namespace plait {

void likeliest_plain(const LikeliestArgs& args, size_t begin, size_t end) {
  likeliest<PlainVec>(args, begin, end);
}

}  // namespace plait
