// Binds the probes of the machine. Torch lets other Python threads run meanwhile, so several
// threads can read at a time.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "cpu_features.h"
#include "probe.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// words int64, dense → xor of all
int64_t probe_read(const Tensor& words) {
  STD_TORCH_CHECK(words.scalar_type() == ScalarType::Long && words.is_contiguous(),
                  "plait::probe_read: words must be int64 and dense");
  plait::ProbeReadKernel kernel = plait::probe_read_plain;
#if PLAIT_HAS_X86_SOURCES
  const plait::CpuIsa isa = plait::cpu_isa();
  if (isa >= plait::CpuIsa::kAvx2) kernel = plait::probe_read_avx2;
  if (isa >= plait::CpuIsa::kAvx512) kernel = plait::probe_read_avx512;
#endif
  return static_cast<int64_t>(kernel(static_cast<const uint64_t*>(words.const_data_ptr()),
                                     static_cast<size_t>(words.numel())));
}

plait::ProbeDot dot_of(const std::string& name) {
  if (name == "float32") return plait::ProbeDot::kFloat32;
  if (name == "bfloat16") return plait::ProbeDot::kBfloat16;
  STD_TORCH_CHECK(name == "int8", "plait::probe_dot: no such type as ", name);
  return plait::ProbeDot::kInt8;
}

// The number of multiply-adds that were done, by one thread.
int64_t probe_dot(std::string type, int64_t rounds) {
  STD_TORCH_CHECK(rounds >= 0 && rounds <= 1 << 22,
                  "plait::probe_dot: rounds must be 0 to 2^22, not ", rounds);
  const plait::ProbeDot kind = dot_of(type);
  const auto count = static_cast<size_t>(rounds);
#if PLAIT_HAS_X86_SOURCES
  const plait::CpuIsa isa = plait::cpu_isa();
  if (isa >= plait::CpuIsa::kAvx512) {
    if (kind == plait::ProbeDot::kBfloat16 && isa >= plait::CpuIsa::kAvx512Bf16) {
      return plait::probe_dot_avx512_bf16(count);
    }
    if (kind == plait::ProbeDot::kInt8 && __builtin_cpu_supports("avx512vnni")) {
      return plait::probe_dot_avx512_vnni(count);
    }
    return plait::probe_dot_avx512(kind, count);
  }
  if (isa >= plait::CpuIsa::kAvx2) return plait::probe_dot_avx2(kind, count);
#endif
  return plait::probe_dot_plain(kind, count);
}

// Fills samples, int64 nanoseconds, from its start → how many
int64_t probe_barrier(const Tensor& samples, double seconds, int64_t partner) {
  STD_TORCH_CHECK(samples.scalar_type() == ScalarType::Long && samples.is_contiguous(),
                  "plait::probe_barrier_: samples must be int64 and dense");
  STD_TORCH_CHECK(seconds >= 0 && seconds <= 10, "plait::probe_barrier_: seconds must be 0 to 10");
  return static_cast<int64_t>(plait::probe_barrier(
      static_cast<int64_t*>(samples.mutable_data_ptr()), static_cast<size_t>(samples.numel()),
      seconds, static_cast<int>(partner)));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def("probe_read(Tensor words) -> int");
  m.def("probe_dot(str type, int rounds) -> int");
  m.def("probe_barrier_(Tensor(a!) samples, float seconds, int partner) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CompositeExplicitAutograd, m) {
  m.impl("probe_dot", TORCH_BOX(&probe_dot));
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("probe_read", TORCH_BOX(&probe_read));
  m.impl("probe_barrier_", TORCH_BOX(&probe_barrier));
}
