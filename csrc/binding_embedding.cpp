// Binds a program's embedding: with it a step may name tokens instead of bringing their rows.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <vector>

#include "binding_quantized_weight.h"
#include "binding_sessions.h"
#include "linear.h"
#include "packed_rows.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kOp = "program_embedding";

// What the weight holds must be of the program's type, unless it is codes.
void check_numbers(const plait::Program& program, const Tensor& weight,
                   const std::vector<int64_t>& sizes) {
  const bool is_float = program.type == plait::Element::kFloat32;
  bool fits = weight.is_cpu() && weight.is_contiguous() &&
              weight.scalar_type() == (is_float ? ScalarType::Float : ScalarType::BFloat16) &&
              weight.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = weight.size(static_cast<int64_t>(i)) == sizes[i];
  }
  plait::check(fits, kOp, "the weight must be dense, of its form and the program's dtype");
}

// `form` is {width, tokens}, with bits, group, scales and zero point for codes. Numbers are a table
// [tokens, width], or packed as linear.h has them.
void program_embedding(int64_t handle, const Tensor& weight, std::vector<int64_t> form) {
  const plait::InUse session(handle, kOp);
  const plait::Program& program = session.runner().program();
  const auto width = program.widths[0];
  plait::check((form.size() == 2 || form.size() == 6) && form[0] == static_cast<int64_t>(width) &&
                   form[1] > 0,
               kOp, "rows must have ", width, " columns, as register 0");
  const plait::Element type = program.type;
  if (form.size() == 6) {
    const plait::QuantizedWeight codes =
        plait::check_quantized_weight(weight, form[0], form[1], form[2], form[3], form[4], form[5]);
    session->embed = [codes, type](const int64_t* tokens, size_t count, void* rows) {
      plait::quantized_rows(codes, tokens, count, type, rows);
    };
  } else if (weight.dim() == 3) {
    const int64_t per_step = type == plait::Element::kFloat32 ? 1 : 2;
    const auto outputs = static_cast<int64_t>(plait::kTileOutputs);
    check_numbers(program, weight,
                  {(form[1] + outputs - 1) / outputs, (form[0] + per_step - 1) / per_step,
                   outputs * per_step});
    session->embed = [tiles = weight.const_data_ptr(), width, type](const int64_t* tokens,
                                                                    size_t count, void* rows) {
      plait::packed_rows(tiles, type, width, tokens, count, rows);
    };
  } else {
    check_numbers(program, weight, {form[1], form[0]});
    const size_t row_bytes = width * plait::element_size(type);
    session->embed = [table = static_cast<const char*>(weight.const_data_ptr()), row_bytes](
                         const int64_t* tokens, size_t count, void* rows) {
      for (size_t i = 0; i < count; ++i) {
        std::memcpy(static_cast<char*>(rows) + i * row_bytes,
                    table + static_cast<size_t>(tokens[i]) * row_bytes, row_bytes);
      }
    };
  }
  session->num_embeddings = form[1];
  session->weights.push_back(weight);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def("program_embedding(int handle, Tensor weight, int[] form) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("program_embedding", TORCH_BOX(&program_embedding));
}
