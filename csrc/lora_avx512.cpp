#include "lora_kernel.h"
#include "vec_avx512.h"

namespace plait {

LoraKernels lora_kernels_avx512() { return make_lora_kernels<Avx512Vec>(); }

}  // namespace plait
