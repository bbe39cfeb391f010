// Binds rounds of drafts to torch: checks every argument, hands pointers and sizes to
// draft_round.h.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "binding_quantized_weight.h"
#include "binding_sessions.h"
#include "draft_round.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kOp = "draft_round";

ScalarType type_of(const plait::Program& program) {
  return program.type == plait::Element::kFloat32 ? ScalarType::Float : ScalarType::BFloat16;
}

void expect(const Tensor& t, ScalarType type, const std::vector<int64_t>& sizes,
            const char* wanted) {
  bool fits = t.is_cpu() && t.scalar_type() == type && t.is_contiguous() &&
              t.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = sizes[i] < 0 || t.size(static_cast<int64_t>(i)) == sizes[i];
  }
  plait::check(fits, kOp, wanted, " is wanted, dense, on the CPU");
}

// `form` is {inputs, outputs} for packed numbers, with bits, group, scales, zero point and whether
// its rows stay exact for codes.
plait::DraftHead draft_head(const plait::Program& program, const Tensor& embeddings,
                            const Tensor& norm, double eps, const Tensor& weight,
                            const std::vector<int64_t>& form) {
  const auto width = static_cast<int64_t>(program.widths[program.output]);
  const ScalarType type = type_of(program);
  plait::check((form.size() == 2 || form.size() == 7) && form[0] == width && form[1] > 0, kOp,
               "the weight must take ", width, " inputs");
  expect(embeddings, type, {form[1], width}, "embeddings [N, D] of the program's dtype");
  expect(norm, type, {width}, "a norm [D] of the program's dtype");
  plait::DraftHead head{};
  head.num_tokens = static_cast<size_t>(form[1]);
  head.embeddings = embeddings.const_data_ptr();
  head.norm = {norm.const_data_ptr(), program.type};
  head.eps = static_cast<float>(eps);
  head.is_quantized = form.size() == 7;
  if (head.is_quantized) {
    head.quantized =
        plait::check_quantized_weight(weight, form[0], form[1], form[2], form[3], form[4], form[5]);
    head.quantized.exact = form[6] != 0;
    return head;
  }
  const int64_t per_step = program.type == plait::Element::kFloat32 ? 1 : 2;
  const auto outputs = static_cast<int64_t>(plait::kTileOutputs);
  expect(weight, type,
         {(form[1] + outputs - 1) / outputs, (width + per_step - 1) / per_step, outputs * per_step},
         "a packed weight of the program's dtype");
  head.weight = weight.const_data_ptr();
  return head;
}

plait::StepGroup page_group(const Tensor& pages, const Tensor& block_table, ScalarType type,
                            int64_t num_sequences) {
  expect(pages, type, {-1, 1, 2, -1, -1, -1}, "pages [N, 1, 2, H, B, D] of the program's dtype");
  expect(block_table, ScalarType::Int, {num_sequences, -1}, "a block_table int32 [S, B]");
  plait::StepGroup group{};
  group.pages = static_cast<char*>(pages.mutable_data_ptr());
  group.num_blocks = pages.size(0);
  group.num_layers = 1;
  group.num_kv_heads = pages.size(3);
  group.block_size = pages.size(4);
  group.head_size = pages.size(5);
  group.block_table = static_cast<const int32_t*>(block_table.const_data_ptr());
  group.table_blocks = block_table.size(1);
  group.table_stride = group.table_blocks;
  plait::check(group.half() > 0, kOp, "pages must hold something");
  return group;
}

// → tokens int64 [S, most], chances fp32 [S, most], {runs, rows} int64 [2]
std::tuple<Tensor, Tensor, Tensor> draft_round(int64_t handle, const Tensor& hidden,
                                               const Tensor& starts, const Tensor& depths,
                                               const Tensor& sure, double floor,
                                               const Tensor& pages, const Tensor& block_table,
                                               const Tensor& embeddings, const Tensor& norm,
                                               double eps, const Tensor& weight,
                                               std::vector<int64_t> form) {
  const plait::InUse session(handle, kOp);
  const plait::Program& program = session.runner().program();
  const ScalarType type = type_of(program);
  const int64_t count = hidden.dim() == 2 ? hidden.size(0) : -1;
  expect(hidden, type, {count, static_cast<int64_t>(program.widths[program.output])},
         "hidden [S, D] of the program's dtype");
  expect(starts, ScalarType::Long, {count}, "starts int64 [S]");
  expect(depths, ScalarType::Long, {count}, "depths int64 [S]");
  expect(sure, ScalarType::Long, {count}, "sure int64 [S]");
  const plait::DraftHead head = draft_head(program, embeddings, norm, eps, weight, form);
  plait::DraftRound round{};
  round.num_sequences = static_cast<size_t>(count);
  round.hidden = hidden.const_data_ptr();
  round.starts = static_cast<const int64_t*>(starts.const_data_ptr());
  round.depths = static_cast<const int64_t*>(depths.const_data_ptr());
  round.sure = static_cast<const int64_t*>(sure.const_data_ptr());
  round.floor = static_cast<float>(floor);
  round.group = page_group(pages, block_table, type, count);
  int64_t most = 0;
  for (int64_t s = 0; s < count; ++s) {
    plait::check(round.depths[s] >= 1 && round.depths[s] <= 4096, kOp, "a depth of ",
                 round.depths[s]);
    most = std::max(most, round.depths[s]);
  }
  round.most = static_cast<size_t>(most);
  Tensor tokens = torch::stable::new_empty(starts, {count, most}, ScalarType::Long);
  Tensor chances = torch::stable::new_empty(starts, {count, most}, ScalarType::Float);
  Tensor counts = torch::stable::new_empty(starts, {2}, ScalarType::Long);
  round.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
  round.chances = static_cast<float*>(chances.mutable_data_ptr());
  std::fill_n(round.tokens, count * most, -1);
  std::fill_n(round.chances, count * most, 0.0f);
  const plait::DraftCounts taken = plait::draft_round(session.runner(), head, round);
  auto* const found = static_cast<int64_t*>(counts.mutable_data_ptr());
  found[0] = taken.runs;
  found[1] = taken.rows;
  return {tokens, chances, counts};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def(
      "draft_round(int handle, Tensor hidden, Tensor starts, Tensor depths, Tensor sure, float "
      "floor, "
      "Tensor(a!) pages, Tensor block_table, Tensor embeddings, Tensor norm, float eps, "
      "Tensor weight, int[] form) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) { m.impl("draft_round", TORCH_BOX(&draft_round)); }
