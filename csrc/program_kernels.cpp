#include "program_kernels.h"

namespace plait {

ProgramKernels program_kernels(CpuIsa isa) {
#if PLAIT_HAS_X86_SOURCES
  if (isa >= CpuIsa::kAvx512) {
    const bool has_bf16 = isa == CpuIsa::kAvx512Bf16;
    return {isa,
            has_bf16 ? linear_kernels_avx512_bf16() : linear_kernels_avx512(),
            &quantized_kernels(isa),
            lora_kernels_avx512(),
            &rms_norm_avx512,
            &layer_norm_avx512,
            &rope_avx512,
            &gated_activation_avx512,
            &activation_avx512,
            residual_kernels_avx512(),
            &best_token_avx512};
  }
  if (isa == CpuIsa::kAvx2) {
    return {isa,
            linear_kernels_avx2(),
            &quantized_kernels(isa),
            lora_kernels_avx2(),
            &rms_norm_avx2,
            &layer_norm_avx2,
            &rope_avx2,
            &gated_activation_avx2,
            &activation_avx2,
            residual_kernels_avx2(),
            &best_token_avx2};
  }
#endif
  return {isa,
          linear_kernels_plain(),
          &quantized_kernels(isa),
          lora_kernels_plain(),
          &rms_norm_plain,
          &layer_norm_plain,
          &rope_plain,
          &gated_activation_plain,
          &activation_plain,
          residual_kernels_plain(),
          &best_token_plain};
}

}  // namespace plait
