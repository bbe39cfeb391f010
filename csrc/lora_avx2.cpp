#include "lora_kernel.h"
#include "vec_avx2.h"

namespace plait {

LoraKernels lora_kernels_avx2() { return make_lora_kernels<Avx2Vec>(); }

}  // namespace plait
