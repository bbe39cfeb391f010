#include "lora_codes_avx2.h"
#include "lora_kernel.h"

namespace plait {

LoraKernels lora_kernels_avx2() { return make_lora_kernels<Avx2Codes>(); }

}  // namespace plait
