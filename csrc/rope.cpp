#include "rope_kernel.h"
#include "vec.h"

namespace plait {

void rope_plain(const RopeArgs& args, size_t begin, size_t end) {
  rope<PlainVec>(args, begin, end);
}

}  // namespace plait
