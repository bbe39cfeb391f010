#include "linear_kernel.h"
#include "vec_avx2.h"

namespace plait {

LinearKernels linear_kernels_avx2() {
  return {make_kernel<FloatFormat<Avx2Vec>>(), make_kernel<WidenFormat<Avx2Vec>>()};
}

}  // namespace plait
