#include "residual_kernel.h"
#include "vec_avx2.h"

namespace plait {

ResidualKernels residual_kernels_avx2() { return make_residual_kernels<Avx2Vec>(); }

}  // namespace plait
