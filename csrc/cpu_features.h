// Which instruction set the kernels use, asked of the processor at run time.

#pragma once

namespace plait {

// In rising order: each includes those before it.
enum class CpuIsa {
  kPlain,       // whatever the compiler's baseline is
  kAvx2,        // AVX2, FMA, F16C
  kAvx512,      // AVX-512 F, BW, VL, DQ
  kAvx512Vnni,  // and its dot products of bytes
  kAvx512Bf16,  // and of bf16
};

// The best that this processor and this build have.
CpuIsa best_cpu_isa();

// The one to use: the best, or what the environment variable PLAIT_CPU_ISA names. Throws
// std::runtime_error where that is unknown or more than the processor has.
CpuIsa cpu_isa();

// As in PLAIT_CPU_ISA: generic, avx2, avx512, avx512_vnni, avx512_bf16.
const char* cpu_isa_name(CpuIsa isa);

}  // namespace plait
