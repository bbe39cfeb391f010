#include "rms_norm_kernel.h"
#include "vec.h"

namespace plait {

void rms_norm_plain(const RmsNormArgs& args, size_t begin, size_t end) {
  rms_norm<PlainVec>(args, begin, end);
}

}  // namespace plait
