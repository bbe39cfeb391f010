#include "cpu_features.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace plait {
namespace {

constexpr CpuIsa kAll[] = {CpuIsa::kPlain, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Vnni,
                           CpuIsa::kAvx512Bf16};

CpuIsa detect() {
#if PLAIT_HAS_X86_SOURCES
  __builtin_cpu_init();  // these ask the operating system too, whether it saves the registers
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return CpuIsa::kPlain;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return CpuIsa::kAvx2;
  }
  if (!__builtin_cpu_supports("avx512vnni")) return CpuIsa::kAvx512;
  return __builtin_cpu_supports("avx512bf16") ? CpuIsa::kAvx512Bf16 : CpuIsa::kAvx512Vnni;
#else
  return CpuIsa::kPlain;
#endif
}

CpuIsa parse(const std::string& name) {
  for (CpuIsa isa : kAll) {
    if (name == cpu_isa_name(isa)) return isa;
  }
  throw std::runtime_error("PLAIT_CPU_ISA=" + name +
                           " is unknown: use generic, avx2, avx512, avx512_vnni or avx512_bf16");
}

}  // namespace

CpuIsa best_cpu_isa() {
  static const CpuIsa best = detect();
  return best;
}

// The environment is read anew each time, so that a test can compare instruction sets.
CpuIsa cpu_isa() {
  const char* wish = std::getenv("PLAIT_CPU_ISA");
  if (wish == nullptr || *wish == '\0') return best_cpu_isa();
  const CpuIsa isa = parse(wish);
  if (isa > best_cpu_isa()) {
    throw std::runtime_error(std::string("PLAIT_CPU_ISA=") + wish +
                             ": this processor has no more than " + cpu_isa_name(best_cpu_isa()));
  }
  return isa;
}

const char* cpu_isa_name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPlain:
      return "generic";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
    case CpuIsa::kAvx512Vnni:
      return "avx512_vnni";
    case CpuIsa::kAvx512Bf16:
      return "avx512_bf16";
  }
  return "unknown";
}

}  // namespace plait
