// Ids of rows, checked before memory is read by them. Only for bindings.

#pragma once

#include <torch/csrc/stable/tensor.h>

namespace plait {
namespace {

inline void check_row_ids(const torch::stable::Tensor& ids, int64_t num_rows) {
  STD_TORCH_CHECK(ids.is_cpu() && ids.dim() == 1 && ids.is_contiguous() &&
                      ids.scalar_type() == torch::headeronly::ScalarType::Long,
                  "plait::packed_rows: ids must be int64 [n] and dense");
  const auto* values = static_cast<const int64_t*>(ids.const_data_ptr());
  for (int64_t i = 0; i < ids.size(0); ++i) {
    STD_TORCH_CHECK(values[i] >= 0 && values[i] < num_rows, "plait::packed_rows: there is no row ",
                    values[i], " among ", num_rows);
  }
}

}  // namespace
}  // namespace plait
