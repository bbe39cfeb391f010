// Binds linear layers over quantised weights to torch: checks every argument, hands pointers and
// sizes to quantized_linear.h.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "binding_element.h"
#include "binding_parallel.h"
#include "binding_quantized_weight.h"
#include "binding_row_ids.h"
#include "cpu_features.h"
#include "packed_rows.h"
#include "quantized_linear.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// x [T, K] · blob → [T, N]; zero_point is -1 where minimums are stored.
Tensor quantized_linear(const Tensor& x, const Tensor& blob, int64_t in_features,
                        int64_t out_features, int64_t bits, int64_t group, int64_t scales,
                        int64_t zero_point, bool exact, const std::optional<Tensor>& bias,
                        ScalarType out_dtype) {
  plait::QuantizedLinearArgs args{};
  args.weight = plait::check_quantized_weight(blob, in_features, out_features, bits, group, scales,
                                              zero_point);
  args.weight.exact = exact;
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == in_features,
                  "plait::quantized_linear: x must be [T, ", in_features, "]");
  STD_TORCH_CHECK(x.size(0) <= 1 || x.stride(0) >= 0,
                  "plait::quantized_linear: x must not run backwards");
  STD_TORCH_CHECK(x.stride(1) == 1 || in_features == 1,
                  "plait::quantized_linear: rows of x must be dense");
  if (bias.has_value()) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == out_features && bias->is_contiguous(),
                    "plait::quantized_linear: bias must be dense and have ", out_features,
                    " values");
    args.bias_type = plait::op_element(bias->scalar_type(), "quantized_linear", "bias");
    args.bias = bias->const_data_ptr();
  }
  args.x = x.const_data_ptr();
  args.x_type = plait::op_element(x.scalar_type(), "quantized_linear", "x");
  args.rows = static_cast<size_t>(x.size(0));
  args.x_stride = static_cast<size_t>(x.stride(0));
  Tensor out = torch::stable::new_empty(x, {x.size(0), out_features}, out_dtype);
  args.out = out.mutable_data_ptr();
  args.out_stride = static_cast<size_t>(out_features);
  args.out_type = plait::op_element(out_dtype, "quantized_linear", "out_dtype");
  plait::quantized_linear(plait::quantized_kernels(plait::cpu_isa()), args, plait::op_parallel_for);
  return out;
}

// Outputs `ids` int64 [n] of the weight → [n, K]
Tensor quantized_rows(const Tensor& blob, const Tensor& ids, int64_t in_features,
                      int64_t out_features, int64_t bits, int64_t group, int64_t scales,
                      int64_t zero_point, ScalarType out_dtype) {
  const plait::QuantizedWeight weight = plait::check_quantized_weight(
      blob, in_features, out_features, bits, group, scales, zero_point);
  plait::check_row_ids(ids, out_features);
  Tensor out = torch::stable::new_empty(blob, {ids.size(0), in_features}, out_dtype);
  plait::quantized_rows(
      weight, static_cast<const int64_t*>(ids.const_data_ptr()), static_cast<size_t>(ids.size(0)),
      plait::op_element(out_dtype, "quantized_linear", "out_dtype"), out.mutable_data_ptr());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def(
      "quantized_linear(Tensor x, Tensor blob, int in_features, int out_features, int bits, int "
      "group, int scales, int zero_point, bool exact, Tensor? bias, ScalarType out_dtype) -> "
      "Tensor");
  m.def(
      "quantized_rows(Tensor blob, Tensor ids, int in_features, int out_features, int bits, int "
      "group, int scales, int zero_point, ScalarType out_dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("quantized_linear", TORCH_BOX(&quantized_linear));
  m.impl("quantized_rows", TORCH_BOX(&quantized_rows));
}
