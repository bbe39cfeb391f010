// Binds token_mask_: checks every argument, hands pointers and sizes on.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "binding_parallel.h"
#include "cpu_features.h"
#include "token_mask.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

plait::TokenMaskKernel kernel() {
#if PLAIT_HAS_X86_SOURCES
  const plait::CpuIsa isa = plait::cpu_isa();
  if (isa >= plait::CpuIsa::kAvx512) return plait::token_mask_avx512;
  if (isa >= plait::CpuIsa::kAvx2) return plait::token_mask_avx2;
#endif
  return plait::token_mask_plain;
}

// A thread is worth starting for about so many values (20 µs).
constexpr int64_t kGrainValues = 200'000;

// logits [R, V], mask [M, W], mask_rows [R]; changes logits in place
void token_mask(const Tensor& logits, const Tensor& mask, const Tensor& mask_rows) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == ScalarType::Float,
                  "plait::token_mask_: logits must be [R, V] and float32");
  STD_TORCH_CHECK(logits.size(1) <= 1 || logits.stride(1) == 1,
                  "plait::token_mask_: rows of logits must be dense");
  // Rows that overlap would be masked by each other's bits.
  STD_TORCH_CHECK(logits.size(0) <= 1 || logits.stride(0) >= logits.size(1),
                  "plait::token_mask_: rows of logits must not overlap");
  STD_TORCH_CHECK(mask.dim() == 2 && mask.scalar_type() == ScalarType::Int && mask.is_contiguous(),
                  "plait::token_mask_: mask must be [M, W], int32 and dense");
  STD_TORCH_CHECK(logits.size(1) <= 32 * mask.size(1), "plait::token_mask_: ", mask.size(1),
                  " words of mask do not cover ", logits.size(1), " logits");
  STD_TORCH_CHECK(mask_rows.dim() == 1 && mask_rows.scalar_type() == ScalarType::Int &&
                      mask_rows.is_contiguous() && mask_rows.size(0) == logits.size(0),
                  "plait::token_mask_: mask_rows must be [R], int32 and dense");
  const int64_t num_rows = logits.size(0);
  const auto* rows = static_cast<const int32_t*>(mask_rows.const_data_ptr());
  for (int64_t i = 0; i < num_rows; ++i) {
    STD_TORCH_CHECK(rows[i] < mask.size(0), "plait::token_mask_: row ", i, " wants mask row ",
                    rows[i], " of ", mask.size(0));
  }
  const plait::TokenMaskArgs args{static_cast<float*>(logits.mutable_data_ptr()),
                                  static_cast<size_t>(logits.stride(0)),
                                  static_cast<size_t>(logits.size(1)),
                                  static_cast<const uint32_t*>(mask.const_data_ptr()),
                                  static_cast<size_t>(mask.size(1)),
                                  rows};
  const plait::TokenMaskKernel run = kernel();
  const int64_t grain = kGrainValues / (logits.size(1) + 1) + 1;
  plait::op_parallel_for(static_cast<size_t>(num_rows), static_cast<size_t>(grain),
                         [&](size_t begin, size_t end) { run(args, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def("token_mask_(Tensor(a!) logits, Tensor mask, Tensor mask_rows) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) { m.impl("token_mask_", TORCH_BOX(&token_mask)); }
