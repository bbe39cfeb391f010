// Binds linear layers to torch: checks every argument, hands pointers and sizes to linear.h.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "binding_element.h"
#include "binding_parallel.h"
#include "binding_row_ids.h"
#include "cpu_features.h"
#include "linear.h"
#include "packed_rows.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// x [T, K] · packed [⌈N / 16⌉, steps, 16 or 32] → [T, N]
Tensor linear(const Tensor& x, const Tensor& packed, int64_t in_features, int64_t out_features,
              const std::optional<Tensor>& bias, ScalarType out_dtype) {
  STD_TORCH_CHECK(x.dim() == 2, "plait::linear: x must be [T, K], it has ", x.dim(), " dimensions");
  STD_TORCH_CHECK(in_features > 0 && x.size(1) == in_features, "plait::linear: x has ", x.size(1),
                  " columns, the weight takes ", in_features);
  STD_TORCH_CHECK(x.size(0) <= 1 || x.stride(0) >= 0, "plait::linear: x must not run backwards");
  STD_TORCH_CHECK(x.stride(1) == 1 || in_features == 1, "plait::linear: rows of x must be dense");
  STD_TORCH_CHECK(x.scalar_type() == packed.scalar_type(),
                  "plait::linear: x and the packed weight must be of one dtype");
  const plait::Element type = plait::op_element(x.scalar_type(), "linear", "x");

  const int64_t width = type == plait::Element::kFloat32 ? 1 : 2;  // inputs in a step
  const int64_t steps = (in_features + width - 1) / width;
  STD_TORCH_CHECK(out_features >= 0 && packed.dim() == 3 && packed.is_contiguous() &&
                      packed.size(0) == (out_features + 15) / 16 && packed.size(1) == steps &&
                      packed.size(2) == 16 * width,
                  "plait::linear: the packed weight is not one of ", out_features, " x ",
                  in_features);

  plait::LinearArgs args{};
  if (bias.has_value()) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == out_features && bias->is_contiguous(),
                    "plait::linear: bias must be dense and have ", out_features, " values");
    args.bias_type = plait::op_element(bias->scalar_type(), "linear", "bias");
    args.bias = bias->const_data_ptr();
  }

  Tensor out = torch::stable::new_empty(x, {x.size(0), out_features}, out_dtype);
  args.x = x.const_data_ptr();
  args.rows = static_cast<size_t>(x.size(0));
  args.x_stride = static_cast<size_t>(x.stride(0));
  args.in_features = static_cast<size_t>(in_features);
  args.weight = packed.const_data_ptr();
  args.weight_type = type;
  args.out_features = static_cast<size_t>(out_features);
  args.out = out.mutable_data_ptr();
  args.out_stride = static_cast<size_t>(out_features);
  args.out_type = plait::op_element(out_dtype, "linear", "out_dtype");
  // Asked anew in every call: a test switches instruction sets by the environment.
  plait::linear(plait::linear_kernels(plait::cpu_isa()), args, plait::op_parallel_for);
  return out;
}

// Outputs `ids` int64 [n] of a packed weight [⌈N / 16⌉, steps, 16 or 32] → [n, K]
Tensor packed_rows(const Tensor& packed, const Tensor& ids, int64_t in_features,
                   int64_t out_features) {
  const plait::Element type = plait::op_element(packed.scalar_type(), "linear", "packed");
  const int64_t width = type == plait::Element::kFloat32 ? 1 : 2;
  STD_TORCH_CHECK(
      in_features > 0 && out_features >= 0 && packed.dim() == 3 && packed.is_contiguous() &&
          packed.size(0) == (out_features + 15) / 16 &&
          packed.size(1) == (in_features + width - 1) / width && packed.size(2) == 16 * width,
      "plait::packed_rows: the packed weight is not one of ", out_features, " x ", in_features);
  plait::check_row_ids(ids, out_features);
  Tensor out = torch::stable::new_empty(packed, {ids.size(0), in_features});
  plait::packed_rows(packed.const_data_ptr(), type, static_cast<size_t>(in_features),
                     static_cast<const int64_t*>(ids.const_data_ptr()),
                     static_cast<size_t>(ids.size(0)), out.mutable_data_ptr());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def(
      "linear(Tensor x, Tensor packed, int in_features, int out_features, Tensor? bias, "
      "ScalarType out_dtype) -> Tensor");
  m.def("packed_rows(Tensor packed, Tensor ids, int in_features, int out_features) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("packed_rows", TORCH_BOX(&packed_rows));
}
