// Binds what draft heads do to torch: checks every argument, hands pointers and sizes to
// draft_follow.h and draft_round.h.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <memory>
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

// A head with all that stays the same from call to call: an argument more costs a call as much as
// a small kernel does, where each step reads all of a model in between.
struct Head {
  int64_t program;
  std::vector<Tensor> kept;
  plait::DraftHead logits;
  plait::DraftMatrix fusing;
  plait::Vector tap_norm;
  plait::StepGroup group;
  ScalarType type;
  int64_t width;
};

plait::Handles<Head>& heads() {
  static auto* const all = new plait::Handles<Head>("draft head");
  return *all;
}

plait::StepGroup page_group(const Tensor& pages, ScalarType type) {
  expect(pages, type, {-1, 1, 2, -1, -1, -1}, "pages [N, 1, 2, H, B, D] of the program's dtype");
  plait::StepGroup group{};
  group.pages = static_cast<char*>(pages.mutable_data_ptr());
  group.num_blocks = pages.size(0);
  group.num_layers = 1;
  group.num_kv_heads = pages.size(3);
  group.block_size = pages.size(4);
  group.head_size = pages.size(5);
  plait::check(group.half() > 0, kOp, "pages must hold something");
  return group;
}

plait::StepGroup with_table(const Head& head, const Tensor& block_table, int64_t num_sequences) {
  expect(block_table, ScalarType::Int, {num_sequences, -1}, "a block_table int32 [S, B]");
  plait::StepGroup group = head.group;
  group.block_table = static_cast<const int32_t*>(block_table.const_data_ptr());
  group.table_blocks = block_table.size(1);
  group.table_stride = group.table_blocks;
  return group;
}

// Of a program, which must outlive it. Without `embeddings`, of its own tokens, there are no
// rounds.
int64_t draft_head_new(int64_t program_handle, const Tensor& pages,
                       const std::optional<Tensor>& embeddings,
                       const std::optional<Tensor>& tap_norm, const Tensor& fusing,
                       std::vector<int64_t> fusing_form, const Tensor& norm, double eps,
                       const Tensor& weight, std::vector<int64_t> form) {
  const plait::InUse session(program_handle, kOp);
  const plait::Program& program = session.runner().program();
  auto head = std::make_shared<Head>();
  head->program = program_handle;
  head->type = type_of(program);
  head->width = static_cast<int64_t>(program.widths[program.output]);
  head->kept = {pages, fusing, norm, weight};
  head->group = page_group(pages, head->type);
  head->fusing = draft_matrix(program, fusing, fusing_form);
  head->logits.logits = draft_matrix(program, weight, form);
  plait::check(form[0] == head->width, kOp, "the weight must take ", head->width, " inputs");
  expect(norm, head->type, {head->width}, "a norm [D] of the program's dtype");
  head->logits.num_tokens = static_cast<size_t>(form[1]);
  head->logits.norm = {norm.const_data_ptr(), program.type};
  head->logits.eps = static_cast<float>(eps);
  if (embeddings.has_value()) {
    expect(*embeddings, head->type, {form[1], head->width},
           "embeddings [N, D] of the program's dtype");
    head->logits.embeddings = embeddings->const_data_ptr();
    head->kept.push_back(*embeddings);
  }
  if (tap_norm.has_value()) {
    expect(*tap_norm, head->type, {fusing_form[0]}, "a norm of the taps, of the program's dtype");
    head->tap_norm = {tap_norm->const_data_ptr(), program.type};
    head->kept.push_back(*tap_norm);
  }
  return heads().add(std::move(head));
}

void draft_head_free(int64_t handle) { heads().remove(handle); }

// → tokens int64 [S, most], chances fp32 [S, most], {runs, rows} int64 [2]
std::tuple<Tensor, Tensor, Tensor> draft_round(
    int64_t handle, const Tensor& hidden, std::vector<int64_t> starts, std::vector<int64_t> depths,
    std::vector<int64_t> sure, std::vector<int64_t> first_tokens, std::vector<double> first_chances,
    double floor, const Tensor& block_table) {
  const std::shared_ptr<Head> head = heads().find(handle, kOp);
  const plait::InUse session(head->program, kOp);
  const int64_t count = hidden.dim() == 2 ? hidden.size(0) : -1;
  plait::check(head->logits.embeddings != nullptr, kOp, "there are no rounds without embeddings");
  expect(hidden, head->type, {count, head->width}, "hidden [S, D] of the program's dtype");
  for (const auto* list : {&starts, &depths, &sure}) {
    plait::check(static_cast<int64_t>(list->size()) == count, kOp, list->size(),
                 " starts, depths or sure ones for ", count, " sequences");
  }
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
      plait::check(token >= 0 && token < static_cast<int64_t>(head->logits.num_tokens), kOp,
                   "there is no token ", token);
    }
    round.first_tokens = first_tokens.data();
    round.first_chances = first_chances.data();
  }
  round.floor = static_cast<float>(floor);
  round.group = with_table(*head, block_table, count);
  int64_t most = 0;
  for (const int64_t depth : depths) {
    plait::check(depth >= 1 && depth <= 4096, kOp, "a depth of ", depth);
    most = std::max(most, depth);
  }
  round.most = static_cast<size_t>(most);
  Tensor tokens = torch::stable::new_empty(hidden, {count, most}, ScalarType::Long);
  Tensor chances = torch::stable::new_empty(hidden, {count, most}, ScalarType::Float);
  Tensor counts = torch::stable::new_empty(hidden, {2}, ScalarType::Long);
  round.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
  round.chances = static_cast<float*>(chances.mutable_data_ptr());
  std::fill_n(round.tokens, count * most, -1);
  std::fill_n(round.chances, count * most, 0.0f);
  const plait::DraftCounts taken = plait::draft_round(session.runner(), head->logits, round);
  auto* const found = static_cast<int64_t*>(counts.mutable_data_ptr());
  found[0] = taken.runs;
  found[1] = taken.rows;
  return {tokens, chances, counts};
}

// → hidden [S, D], and where `drafts` what it says comes next, fp64 [S, 2]: a token and its chance.
// `tokens` are rows of `embeddings`; without these, of the head's own.
std::tuple<Tensor, Tensor> draft_follow(int64_t handle, const Tensor& taps,
                                        std::vector<int64_t> tokens, std::vector<int64_t> starts,
                                        std::vector<int64_t> counts, const Tensor& block_table,
                                        const std::optional<Tensor>& embeddings, bool drafts) {
  const std::shared_ptr<Head> head = heads().find(handle, kOp);
  const plait::InUse session(head->program, kOp);
  const auto count = static_cast<int64_t>(starts.size());
  const auto rows = static_cast<int64_t>(tokens.size());
  plait::check(counts.size() == starts.size() &&
                   std::accumulate(counts.begin(), counts.end(), int64_t{0}) == rows,
               kOp, "counts must be of the same sequences as starts, and of the ", rows, " tokens");
  plait::DraftFollow follow{};
  follow.fusing = head->fusing;
  expect(taps, head->type, {-1, static_cast<int64_t>(head->fusing.in_features)},
         "taps [T, taps * D] of the program's dtype");
  plait::check(taps.size(0) >= rows, kOp, "taps must have the ", rows, " rows of tokens");
  follow.embeddings = head->logits.embeddings;
  follow.num_embeddings = head->logits.num_tokens;
  if (embeddings.has_value()) {
    expect(*embeddings, head->type, {-1, head->width}, "embeddings [N, D] of the program's dtype");
    follow.embeddings = embeddings->const_data_ptr();
    follow.num_embeddings = static_cast<size_t>(embeddings->size(0));
  }
  plait::check(follow.embeddings != nullptr, kOp, "the head has no embeddings of its own");
  follow.norm = head->tap_norm;
  follow.eps = head->logits.eps;
  follow.num_sequences = starts.size();
  follow.starts = starts.data();
  follow.counts = counts.data();
  follow.group = with_table(*head, block_table, count);
  follow.taps = taps.const_data_ptr();
  follow.tokens = tokens.data();
  Tensor hidden = torch::stable::new_empty(taps, {count, head->width});
  Tensor next = torch::stable::new_empty(taps, {drafts ? count : 0, 2}, ScalarType::Double);
  follow.hidden = hidden.mutable_data_ptr();
  if (drafts) {
    follow.head = &head->logits;
    follow.next = static_cast<double*>(next.mutable_data_ptr());
  }
  plait::draft_follow(session.runner(), follow);
  return {hidden, next};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def(
      "draft_head_new(int program, Tensor pages, Tensor? embeddings, Tensor? tap_norm, "
      "Tensor fusing, int[] fusing_form, Tensor norm, float eps, Tensor weight, int[] form) "
      "-> int");
  m.def("draft_head_free(int handle) -> ()");
  m.def(
      "draft_round(int handle, Tensor hidden, int[] starts, int[] depths, int[] sure, "
      "int[] first_tokens, float[] first_chances, float floor, Tensor block_table) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "draft_follow(int handle, Tensor taps, int[] tokens, int[] starts, int[] counts, "
      "Tensor block_table, Tensor? embeddings, bool drafts) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CompositeExplicitAutograd, m) {
  m.impl("draft_head_free", TORCH_BOX(&draft_head_free));
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("draft_head_new", TORCH_BOX(&draft_head_new));
  m.impl("draft_round", TORCH_BOX(&draft_round));
  m.impl("draft_follow", TORCH_BOX(&draft_follow));
}
