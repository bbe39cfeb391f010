#include "residual_kernel.h"
#include "vec.h"

namespace plait {

ResidualKernels residual_kernels_plain() { return make_residual_kernels<PlainVec>(); }

}  // namespace plait
