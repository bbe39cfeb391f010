#include "lora_codes_avx512.h"
#include "lora_kernel.h"

namespace plait {

LoraKernels lora_kernels_avx512() { return make_lora_kernels<Avx512Codes>(); }

}  // namespace plait
