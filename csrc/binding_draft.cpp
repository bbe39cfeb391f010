// Binds what draft heads do to torch: checks every argument, hands pointers and sizes to
// draft_follow.h and draft_round.h.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "binding_quantized_weight.h"
#include "binding_sessions.h"
#include "draft_follow.h"
#include "draft_round.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kOp = "draft head";

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
plait::DraftMatrix draft_matrix(const plait::Program& program, const Tensor& weight,
                                const std::vector<int64_t>& form) {
  plait::check((form.size() == 2 || form.size() == 7) && form[0] > 0 && form[1] > 0, kOp,
               "a weight's form has ", form.size(), " numbers");
  plait::DraftMatrix matrix{};
  matrix.in_features = static_cast<size_t>(form[0]);
  matrix.out_features = static_cast<size_t>(form[1]);
  matrix.is_quantized = form.size() == 7;
  if (matrix.is_quantized) {
    matrix.quantized =
        plait::check_quantized_weight(weight, form[0], form[1], form[2], form[3], form[4], form[5]);
    matrix.quantized.exact = form[6] != 0;
    return matrix;
  }
  const int64_t per_step = program.type == plait::Element::kFloat32 ? 1 : 2;
  const auto outputs = static_cast<int64_t>(plait::kTileOutputs);
  expect(
      weight, type_of(program),
      {(form[1] + outputs - 1) / outputs, (form[0] + per_step - 1) / per_step, outputs * per_step},
      "a packed weight of the program's dtype");
  matrix.weight = weight.const_data_ptr();
  return matrix;
}

plait::DraftHead draft_head(const plait::Program& program, const Tensor& norm, double eps,
                            const Tensor& weight, const std::vector<int64_t>& form) {
  const auto width = static_cast<int64_t>(program.widths[program.output]);
  const ScalarType type = type_of(program);
  plait::DraftHead head{};
  head.logits = draft_matrix(program, weight, form);
  plait::check(form[0] == width, kOp, "the weight must take ", width, " inputs");
  expect(norm, type, {width}, "a norm [D] of the program's dtype");
  head.num_tokens = static_cast<size_t>(form[1]);
  head.norm = {norm.const_data_ptr(), program.type};
  head.eps = static_cast<float>(eps);
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
                                               std::vector<int64_t> starts,
                                               std::vector<int64_t> depths,
                                               std::vector<int64_t> sure,
                                               std::vector<int64_t> first_tokens,
                                               std::vector<double> first_chances, double floor,
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
  for (const auto* list : {&starts, &depths, &sure}) {
    plait::check(static_cast<int64_t>(list->size()) == count, kOp, list->size(),
                 " starts, depths or sure ones for ", count, " sequences");
  }
  plait::DraftHead head = draft_head(program, norm, eps, weight, form);
  expect(embeddings, type, {form[1], form[0]}, "embeddings [N, D] of the program's dtype");
  head.embeddings = embeddings.const_data_ptr();
  plait::DraftRound round{};
  round.num_sequences = static_cast<size_t>(count);
  round.hidden = hidden.const_data_ptr();
  round.starts = starts.data();
  round.depths = depths.data();
  round.sure = sure.data();
  if (!first_tokens.empty()) {
    plait::check(static_cast<int64_t>(first_tokens.size()) == count &&
                     first_chances.size() == first_tokens.size(),
                 kOp, "first tokens and their chances must be of all sequences");
    for (const int64_t token : first_tokens) {
      plait::check(token >= 0 && token < form[1], kOp, "there is no token ", token);
    }
    round.first_tokens = first_tokens.data();
    round.first_chances = first_chances.data();
  }
  round.floor = static_cast<float>(floor);
  round.group = page_group(pages, block_table, type, count);
  int64_t most = 0;
  for (int64_t s = 0; s < count; ++s) {
    plait::check(round.depths[s] >= 1 && round.depths[s] <= 4096, kOp, "a depth of ",
                 round.depths[s]);
    most = std::max(most, round.depths[s]);
  }
  round.most = static_cast<size_t>(most);
  Tensor tokens = torch::stable::new_empty(hidden, {count, most}, ScalarType::Long);
  Tensor chances = torch::stable::new_empty(hidden, {count, most}, ScalarType::Float);
  Tensor counts = torch::stable::new_empty(hidden, {2}, ScalarType::Long);
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

// → hidden [S, D], and what it says comes next: tokens int64 [S], chances fp32 [S], where `drafts`
std::tuple<Tensor, Tensor, Tensor> draft_follow(int64_t handle, const Tensor& taps, std::vector<int64_t> tokens,
                    std::vector<int64_t> starts, std::vector<int64_t> counts, const Tensor& pages,
                    const Tensor& block_table, const Tensor& embeddings,
                    const std::optional<Tensor>& tap_norm, const Tensor& fusing,
                    std::vector<int64_t> fusing_form, bool drafts, const Tensor& norm, double eps,
                    const Tensor& weight, std::vector<int64_t> form) {
  const plait::InUse session(handle, kOp);
  const plait::Program& program = session.runner().program();
  const ScalarType type = type_of(program);
  const auto width = static_cast<int64_t>(program.widths[program.output]);
  const auto count = static_cast<int64_t>(starts.size());
  const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  plait::check(counts.size() == starts.size(), kOp, "starts and counts are of the same sequences");
  plait::check(static_cast<int64_t>(tokens.size()) == rows, kOp, tokens.size(), " tokens for ",
               rows, " rows");
  plait::DraftFollow follow{};
  follow.fusing = draft_matrix(program, fusing, fusing_form);
  expect(taps, type, {rows, fusing_form[0]}, "taps [T, taps * D] of the program's dtype");
  expect(embeddings, type, {-1, width}, "embeddings [N, D] of the program's dtype");
  if (tap_norm.has_value()) {
    expect(*tap_norm, type, {fusing_form[0]}, "a norm of the taps, of the program's dtype");
    follow.norm = {tap_norm->const_data_ptr(), program.type};
  }
  follow.eps = static_cast<float>(eps);
  follow.num_sequences = starts.size();
  follow.starts = starts.data();
  follow.counts = counts.data();
  follow.group = page_group(pages, block_table, type, count);
  follow.taps = taps.const_data_ptr();
  follow.tokens = tokens.data();
  follow.embeddings = embeddings.const_data_ptr();
  follow.num_embeddings = static_cast<size_t>(embeddings.size(0));
  Tensor hidden = torch::stable::new_empty(taps, {count, width});
  follow.hidden = hidden.mutable_data_ptr();
  const plait::DraftHead head = draft_head(program, norm, eps, weight, form);
  Tensor tokens_next = torch::stable::new_empty(taps, {drafts ? count : 0}, ScalarType::Long);
  Tensor chances_next = torch::stable::new_empty(taps, {drafts ? count : 0}, ScalarType::Float);
  if (drafts) {
    follow.head = &head;
    follow.next_tokens = static_cast<int64_t*>(tokens_next.mutable_data_ptr());
    follow.next_chances = static_cast<float*>(chances_next.mutable_data_ptr());
  }
  plait::draft_follow(session.runner(), follow);
  return {hidden, tokens_next, chances_next};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def(
      "draft_round(int handle, Tensor hidden, int[] starts, int[] depths, int[] sure, int[] first_tokens, float[] first_chances, float floor, "
      "Tensor(a!) pages, Tensor block_table, Tensor embeddings, Tensor norm, float eps, "
      "Tensor weight, int[] form) -> (Tensor, Tensor, Tensor)");
  m.def(
      "draft_follow(int handle, Tensor taps, int[] tokens, int[] starts, int[] counts, "
      "Tensor(a!) pages, Tensor block_table, Tensor embeddings, Tensor? tap_norm, Tensor fusing, "
      "int[] fusing_form, bool drafts, Tensor norm, float eps, Tensor weight, int[] form) "
      "-> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("draft_round", TORCH_BOX(&draft_round));
  m.impl("draft_follow", TORCH_BOX(&draft_follow));
}
