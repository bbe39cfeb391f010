#include "activation_kernel.h"
#include "vec.h"

namespace plait {

void activation_plain(const ActivationArgs& args, size_t begin, size_t end) {
  activation<PlainVec>(args, begin, end);
}

}  // namespace plait
