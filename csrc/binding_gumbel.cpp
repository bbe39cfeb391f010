// Binds gumbel_candidates: checks the arguments, hands pointers and sizes on.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu_features.h"
#include "gumbel.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

plait::GumbelKernel kernel() {
#if PLAIT_HAS_X86_SOURCES
  const plait::CpuIsa isa = plait::cpu_isa();
  if (isa >= plait::CpuIsa::kAvx512) return plait::gumbel_candidates_avx512;
  if (isa >= plait::CpuIsa::kAvx2) return plait::gumbel_candidates_avx2;
#endif
  return plait::gumbel_candidates_plain;
}

Tensor gumbel_candidates(const Tensor& logits, int64_t key, double top, double temperature) {
  STD_TORCH_CHECK(logits.dim() == 1 && logits.size(0) > 0,
                  "plait::gumbel_candidates: logits must be [V], not empty");
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float,
                  "plait::gumbel_candidates: logits must be float32");
  STD_TORCH_CHECK(logits.is_contiguous(), "plait::gumbel_candidates: logits must be dense");
  STD_TORCH_CHECK(std::isfinite(top), "plait::gumbel_candidates: top must be finite");
  STD_TORCH_CHECK(temperature >= 1e-6 && std::isfinite(temperature),
                  "plait::gumbel_candidates: temperature must be at least 1e-6");
  const plait::GumbelArgs args{static_cast<const float*>(logits.const_data_ptr()),
                               static_cast<size_t>(logits.size(0)), static_cast<uint64_t>(key),
                               static_cast<float>(top), temperature};
  std::vector<int64_t> found;
  kernel()(args, found);
  Tensor out =
      torch::stable::new_empty(logits, {static_cast<int64_t>(found.size())}, ScalarType::Long);
  std::copy(found.begin(), found.end(), static_cast<int64_t*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def("gumbel_candidates(Tensor logits, int key, float top, float temperature) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("gumbel_candidates", TORCH_BOX(&gumbel_candidates));
}
