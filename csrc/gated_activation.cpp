#include "gated_activation_kernel.h"
#include "vec.h"

namespace plait {

void gated_activation_plain(const GatedActivationArgs& args, size_t begin, size_t end) {
  gated_activation<PlainVec>(args, begin, end);
}

}  // namespace plait
