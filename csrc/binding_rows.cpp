// Binds the ops that work on each row by itself: checks every argument, hands pointers and sizes
// on.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "activation.h"
#include "binding_element.h"
#include "binding_parallel.h"
#include "cpu_features.h"
#include "gated_activation.h"
#include "layer_norm.h"
#include "rms_norm.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The function for the instruction set in use; BF16 adds nothing to these.
template <class Kernel>
Kernel choose([[maybe_unused]] Kernel avx512, [[maybe_unused]] Kernel avx2, Kernel plain) {
#if PLAIT_HAS_X86_SOURCES
  const plait::CpuIsa isa = plait::cpu_isa();
  if (isa >= plait::CpuIsa::kAvx512) return avx512;
  if (isa >= plait::CpuIsa::kAvx2) return avx2;
#endif
  return plain;
}

#if PLAIT_HAS_X86_SOURCES
#define PLAIT_CHOOSE(op) choose(&plait::op##_avx512, &plait::op##_avx2, &plait::op##_plain)
#else
#define PLAIT_CHOOSE(op) choose(&plait::op##_plain, &plait::op##_plain, &plait::op##_plain)
#endif

// A thread is worth starting for about so many values (20 µs).
constexpr int64_t kGrainValues = 40'000;

template <class Args>
void run_rows(void (*kernel)(const Args&, size_t, size_t), const Args& args, int64_t rows,
              int64_t values_per_row) {
  const int64_t grain = kGrainValues / (values_per_row > 0 ? values_per_row : 1) + 1;
  plait::op_parallel_for(static_cast<size_t>(rows), static_cast<size_t>(grain),
                         [&](size_t begin, size_t end) { kernel(args, begin, end); });
}

// x [T, D] or [T, H, D] → the same
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double weight_offset,
                bool round_first) {
  const int64_t dims = x.dim();
  STD_TORCH_CHECK(dims == 2 || dims == 3, "plait::rms_norm: x must be [T, D] or [T, H, D]");
  const int64_t size = x.size(dims - 1);
  STD_TORCH_CHECK(size <= 1 || x.stride(dims - 1) == 1, "plait::rms_norm: rows of x must be dense");
  STD_TORCH_CHECK(x.stride(0) >= 0 && x.stride(dims - 2) >= 0,
                  "plait::rms_norm: x must not run backwards");
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == size && weight.is_contiguous(),
                  "plait::rms_norm: the weight must be dense and have ", size, " values");

  plait::RmsNormArgs args{};
  args.x = x.const_data_ptr();
  args.type = plait::op_element(x, "rms_norm", "x");
  args.outer = static_cast<size_t>(x.size(0));
  args.inner = static_cast<size_t>(dims == 3 ? x.size(1) : 1);
  args.size = static_cast<size_t>(size);
  args.outer_stride = static_cast<size_t>(x.stride(0));
  args.inner_stride = static_cast<size_t>(dims == 3 ? x.stride(1) : 0);
  args.weight = weight.const_data_ptr();
  args.weight_type = plait::op_element(weight, "rms_norm", "the weight");
  args.weight_offset = static_cast<float>(weight_offset);
  args.eps = static_cast<float>(eps);
  args.round_first = round_first;
  Tensor out = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  args.out = out.mutable_data_ptr();
  run_rows(PLAIT_CHOOSE(rms_norm), args, x.size(0), static_cast<int64_t>(args.inner) * size);
  return out;
}

// x [T, D] → the same
Tensor layer_norm(const Tensor& x, const std::optional<Tensor>& weight,
                  const std::optional<Tensor>& bias, double eps) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(),
                  "plait::layer_norm: x must be [T, D] and dense");
  plait::LayerNormArgs args{};
  args.x = x.const_data_ptr();
  args.type = plait::op_element(x, "layer_norm", "x");
  args.size = static_cast<size_t>(x.size(1));
  args.row_stride = args.size;
  args.eps = static_cast<float>(eps);
  for (const auto* vector : {&weight, &bias}) {
    if (!vector->has_value()) continue;
    const Tensor& values = **vector;
    STD_TORCH_CHECK(values.dim() == 1 && values.size(0) == x.size(1) && values.is_contiguous(),
                    "plait::layer_norm: weight and bias must be dense and have ", x.size(1),
                    " values");
    const bool is_weight = vector == &weight;
    (is_weight ? args.weight : args.bias) = values.const_data_ptr();
    (is_weight ? args.weight_type : args.bias_type) =
        plait::op_element(values, "layer_norm", is_weight ? "the weight" : "the bias");
  }
  Tensor out = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  args.out = out.mutable_data_ptr();
  run_rows(PLAIT_CHOOSE(layer_norm), args, x.size(0), x.size(1));
  return out;
}

plait::Activation activation_of(const std::string& name, const char* op) {
  if (name == "silu") return plait::Activation::kSilu;
  if (name == "gelu_tanh") return plait::Activation::kGeluTanh;
  if (name == "quick_gelu") return plait::Activation::kQuickGelu;
  STD_TORCH_CHECK(name == "gelu", "plait::", op, ": no such activation as ", name);
  return plait::Activation::kGelu;
}

// x of any shape, dense → the same
Tensor activation(const Tensor& x, std::string name) {
  STD_TORCH_CHECK(x.is_contiguous(), "plait::activation: x must be dense");
  plait::ActivationArgs args{};
  args.x = x.const_data_ptr();
  args.type = plait::op_element(x, "activation", "x");
  args.activation = activation_of(name, "activation");
  Tensor out = torch::stable::new_empty(x, x.sizes(), x.scalar_type());
  args.out = out.mutable_data_ptr();
  run_rows(PLAIT_CHOOSE(activation), args, x.numel(), 2);
  return out;
}

// x [T, 2 I] → [T, I]
Tensor gated_activation(const Tensor& x, std::string activation) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0,
                  "plait::gated_activation: x must be [T, 2 I], gates and then ups");
  STD_TORCH_CHECK(x.stride(1) == 1 && x.stride(0) >= 0,
                  "plait::gated_activation: rows of x must be dense");
  plait::GatedActivationArgs args{};
  args.x = x.const_data_ptr();
  args.type = plait::op_element(x, "gated_activation", "x");
  args.size = static_cast<size_t>(x.size(1) / 2);
  args.row_stride = static_cast<size_t>(x.stride(0));
  args.activation = activation_of(activation, "gated_activation");
  Tensor out = torch::stable::new_empty(x, {x.size(0), x.size(1) / 2}, x.scalar_type());
  args.out = out.mutable_data_ptr();
  run_rows(PLAIT_CHOOSE(gated_activation), args, x.size(0), 2 * x.size(1));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def(
      "rms_norm(Tensor x, Tensor weight, float eps, float weight_offset, bool round_first) -> "
      "Tensor");
  m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  m.def("gated_activation(Tensor x, str activation) -> Tensor");
  m.def("activation(Tensor x, str name) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("gated_activation", TORCH_BOX(&gated_activation));
  m.impl("activation", TORCH_BOX(&activation));
}
