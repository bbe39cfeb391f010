// Binds varlen_attention: checks the arguments, hands pointers and sizes on.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>

#include "binding_parallel.h"
#include "cpu_features.h"
#include "varlen_attention.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

plait::VarlenRows rows_of(const Tensor& t, const Tensor& query, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == query.scalar_type(),
                  "plait::varlen_attention: ", name,
                  " must be on the CPU and of the query's dtype");
  STD_TORCH_CHECK(t.dim() == 3 && t.size(1) == query.size(1) && t.size(2) == query.size(2),
                  "plait::varlen_attention: ", name, " must be [T, H, D] with the query's H and D");
  STD_TORCH_CHECK(t.size(2) == 1 || t.stride(2) == 1, "plait::varlen_attention: heads of ", name,
                  " must be dense");
  return {t.const_data_ptr(), t.stride(0), t.stride(1)};
}

const int32_t* bounds_of(const Tensor& t, int64_t num_bounds, int64_t num_rows, const char* name) {
  STD_TORCH_CHECK(
      t.is_cpu() && t.scalar_type() == ScalarType::Int && t.dim() == 1 && t.is_contiguous(),
      "plait::varlen_attention: ", name, " must be dense int32 on the CPU");
  STD_TORCH_CHECK(t.size(0) == num_bounds && num_bounds > 0, "plait::varlen_attention: ", name,
                  " must be [S + 1]");
  const auto* const bounds = static_cast<const int32_t*>(t.const_data_ptr());
  STD_TORCH_CHECK(bounds[0] == 0 && bounds[num_bounds - 1] == num_rows,
                  "plait::varlen_attention: ", name, " must lead from 0 to ", num_rows);
  for (int64_t i = 1; i < num_bounds; ++i) {
    STD_TORCH_CHECK(bounds[i - 1] <= bounds[i], "plait::varlen_attention: ", name,
                    " falls at segment ", i - 1);
  }
  return bounds;
}

// query [T, H, D], key and value [K, H, D] → [T, H, D]
Tensor varlen_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& query_bounds, const Tensor& key_bounds, double scale) {
  STD_TORCH_CHECK(query.dim() == 3, "plait::varlen_attention: query must be [T, H, D]");
  STD_TORCH_CHECK(query.size(1) > 0 && query.size(2) > 0,
                  "plait::varlen_attention: query must have heads");
  const ScalarType type = query.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                  "plait::varlen_attention: query must be float32 or bfloat16");
  STD_TORCH_CHECK(key.dim() == 3 && value.dim() == 3 && key.size(0) == value.size(0),
                  "plait::varlen_attention: key and value must have as many rows");
  STD_TORCH_CHECK(scale > 0 && std::isfinite(scale),
                  "plait::varlen_attention: scale must be positive, it is ", scale);
  plait::VarlenProblem p{};
  p.query = rows_of(query, query, "query");
  p.key = rows_of(key, query, "key");
  p.value = rows_of(value, query, "value");
  p.query_bounds = bounds_of(query_bounds, query_bounds.size(0), query.size(0), "query_bounds");
  p.key_bounds = bounds_of(key_bounds, query_bounds.size(0), key.size(0), "key_bounds");
  p.num_segments = query_bounds.size(0) - 1;
  p.num_heads = query.size(1);
  p.head_size = query.size(2);
  p.scale = static_cast<float>(scale);
  p.is_bf16 = type == ScalarType::BFloat16;
  Tensor out = torch::stable::new_empty(query, query.sizes(), type);
  p.out = out.mutable_data_ptr();
  plait::varlen_attention(p, plait::cpu_isa(), plait::op_num_threads(), plait::op_run_workers);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def(
      "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor query_bounds, "
      "Tensor key_bounds, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention));
}
