// Binds likeliest, and a head with it in one call: checks the arguments, hands pointers and sizes
// on.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "binding_element.h"
#include "binding_parallel.h"
#include "binding_quantized_weight.h"
#include "cpu_features.h"
#include "likeliest.h"
#include "quantized_linear.h"
#include "thread_scratch.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

plait::LikeliestKernel choose_kernel() {
#if PLAIT_HAS_X86_SOURCES
  const plait::CpuIsa isa = plait::cpu_isa();
  if (isa >= plait::CpuIsa::kAvx512) return plait::likeliest_avx512;
  if (isa >= plait::CpuIsa::kAvx2) return plait::likeliest_avx2;
#endif
  return plait::likeliest_plain;
}

// A thread is worth starting for about so many values (20 µs).
constexpr int64_t kGrainValues = 100'000;

void run(const plait::LikeliestArgs& args, int64_t num_rows) {
  const plait::LikeliestKernel kernel = choose_kernel();
  plait::op_parallel_for(static_cast<size_t>(num_rows),
                         static_cast<size_t>(kGrainValues) / args.num_tokens + 1,
                         [&](size_t begin, size_t end) { kernel(args, begin, end); });
}

// logits [R, V] → [R], each below `num_tokens`
Tensor likeliest(const Tensor& logits, int64_t num_tokens) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == ScalarType::Float,
                  "plait::likeliest: logits must be [R, V] and float32");
  STD_TORCH_CHECK(num_tokens >= 1 && num_tokens <= logits.size(1), "plait::likeliest: rows of ",
                  logits.size(1), " logits do not have ", num_tokens, " tokens");
  STD_TORCH_CHECK((logits.size(1) <= 1 || logits.stride(1) == 1) && logits.stride(0) >= 0,
                  "plait::likeliest: rows of logits must be dense, one behind the other");
  const int64_t num_rows = logits.size(0);
  Tensor tokens = torch::stable::new_empty(logits, {num_rows}, ScalarType::Long);
  run({static_cast<const float*>(logits.const_data_ptr()), static_cast<size_t>(logits.stride(0)),
       static_cast<size_t>(num_tokens), static_cast<int64_t*>(tokens.mutable_data_ptr())},
      num_rows);
  return tokens;
}

// likeliest of x [R, K] · blob, [R, N] in fp32
Tensor quantized_likeliest(const Tensor& x, const Tensor& blob, int64_t in_features,
                           int64_t out_features, int64_t bits, int64_t group, int64_t scales,
                           int64_t zero_point, bool exact, const std::optional<Tensor>& bias,
                           int64_t num_tokens) {
  STD_TORCH_CHECK(num_tokens >= 1 && num_tokens <= out_features,
                  "plait::quantized_likeliest: a head of ", out_features, " outputs does not have ",
                  num_tokens, " tokens");
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == in_features && x.is_contiguous(),
                  "plait::quantized_likeliest: x must be [R, ", in_features, "] and dense");
  plait::QuantizedLinearArgs args{};
  args.weight = plait::check_quantized_weight(blob, in_features, out_features, bits, group, scales,
                                              zero_point);
  args.weight.exact = exact;
  if (bias.has_value()) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == out_features && bias->is_contiguous(),
                    "plait::quantized_likeliest: bias must be dense and have ", out_features,
                    " values");
    args.bias_type = plait::op_element(*bias, "quantized_likeliest", "bias");
    args.bias = bias->const_data_ptr();
  }
  args.x = x.const_data_ptr();
  args.x_type = plait::op_element(x, "quantized_likeliest", "x");
  args.rows = static_cast<size_t>(x.size(0));
  args.x_stride = static_cast<size_t>(in_features);
  static thread_local plait::ThreadScratch scratch;
  float* const logits = scratch.at_least(args.rows * static_cast<size_t>(out_features));
  args.out = logits;
  args.out_stride = static_cast<size_t>(out_features);
  args.out_type = plait::Element::kFloat32;
  plait::quantized_linear(plait::quantized_kernels(plait::cpu_isa()), args, plait::op_parallel_for);
  Tensor tokens = torch::stable::new_empty(x, {x.size(0)}, ScalarType::Long);
  run({logits, args.out_stride, static_cast<size_t>(num_tokens),
       static_cast<int64_t*>(tokens.mutable_data_ptr())},
      x.size(0));
  return tokens;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def("likeliest(Tensor logits, int num_tokens) -> Tensor");
  m.def(
      "quantized_likeliest(Tensor x, Tensor blob, int in_features, int out_features, int bits, int "
      "group, int scales, int zero_point, bool exact, Tensor? bias, int num_tokens) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("likeliest", TORCH_BOX(&likeliest));
  m.impl("quantized_likeliest", TORCH_BOX(&quantized_likeliest));
}
