#include "residual_kernel.h"
#include "vec_avx512.h"

namespace plait {

ResidualKernels residual_kernels_avx512() { return make_residual_kernels<Avx512Vec>(); }

}  // namespace plait
