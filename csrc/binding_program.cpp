// Binds layer programs to torch: programs have handles, and a step's tensors are checked and kept
// while its instructions run.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding_sessions.h"
#include "checks.h"
#include "program_decode.h"
#include "program_runner.h"

namespace {

using plait::check;
using plait::InUse;
using plait::Session;
using plait::sessions;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// --- tensors -------------------------------------------------------------------------------------

plait::ValueType value_type(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return plait::ValueType::kFloat32;
    case ScalarType::BFloat16:
      return plait::ValueType::kBfloat16;
    case ScalarType::Int:
      return plait::ValueType::kInt32;
    case ScalarType::Long:
      return plait::ValueType::kInt64;
    case ScalarType::Byte:
      return plait::ValueType::kUint8;
    default:
      return plait::ValueType::kOther;
  }
}

ScalarType scalar_type(plait::Element type) {
  return type == plait::Element::kFloat32 ? ScalarType::Float : ScalarType::BFloat16;
}

// What a step's tensor must be: dense, of a type, of sizes where -1 fits any.
void check_tensor(const Tensor& t, ScalarType type, const std::vector<int64_t>& sizes,
                  const char* name, const char* wanted) {
  bool fits = t.is_cpu() && t.scalar_type() == type && t.is_contiguous() &&
              t.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = sizes[i] < 0 || t.size(static_cast<int64_t>(i)) == sizes[i];
  }
  check(fits, "program_step", name, " must be ", wanted, ", dense, on the CPU");
}

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  size_t at = 0;
  for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', at)) {
    result.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return result;
}

// --- making and freeing --------------------------------------------------------------------------

// code int64 [n]; names: a line for each instruction
int64_t program_new(const Tensor& code, std::vector<Tensor> tensors, std::string names,
                    std::vector<int64_t> widths, int64_t output, ScalarType dtype,
                    int64_t num_threads, std::vector<int64_t> cores, int64_t spin_us) {
  constexpr const char* op = "program";
  check(code.is_cpu() && code.scalar_type() == ScalarType::Long && code.dim() == 1 &&
            code.is_contiguous(),
        op, "code must be int64 [n] and dense");
  check(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, op,
        "registers must be float32 or bfloat16");
  check(num_threads >= 1, op, num_threads, " threads cannot run it");
  check(spin_us >= 0 && spin_us <= 1'000'000, op, "threads cannot spin for ", spin_us, " µs");
  plait::EncodedProgram encoded{};
  encoded.type = dtype == ScalarType::Float ? plait::Element::kFloat32 : plait::Element::kBfloat16;
  encoded.widths = std::move(widths);
  encoded.output = output;
  encoded.code = data<int64_t>(code);
  encoded.code_size = static_cast<size_t>(code.size(0));
  encoded.names = lines(names);
  for (const Tensor& t : tensors) {
    check(t.is_cpu() && t.is_contiguous(), op, "weights must be dense, and on the CPU");
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < t.dim(); ++i) sizes.push_back(t.size(i));
    encoded.tensors.push_back({t.const_data_ptr(), value_type(t.scalar_type()), sizes});
  }
  auto session = std::make_shared<Session>();
  session->runner = std::make_unique<plait::ProgramRunner>(
      plait::decode_program(encoded), plait::cpu_isa(), static_cast<size_t>(num_threads),
      std::vector<int>(cores.begin(), cores.end()), std::chrono::microseconds(spin_us));
  session->weights = std::move(tensors);
  return sessions().add(std::move(session));
}

void program_free(int64_t handle) { sessions().remove(handle); }

int64_t program_count() { return sessions().count(); }

// --- a step --------------------------------------------------------------------------------------

std::vector<plait::StepGroup> step_groups(const std::vector<Tensor>& pages,
                                          const std::vector<Tensor>& slots,
                                          const std::vector<Tensor>& tables, ScalarType type,
                                          int64_t rows, int64_t num_spans) {
  check(pages.size() == slots.size() && pages.size() == tables.size(), "program_step",
        "pages, slot_mapping and block_tables must be of the same KV groups");
  std::vector<plait::StepGroup> groups;
  for (size_t i = 0; i < pages.size(); ++i) {
    const Tensor& p = pages[i];
    const bool is_codes = p.scalar_type() == ScalarType::Char;
    check_tensor(p, is_codes ? ScalarType::Char : type, {-1, -1, 2, -1, -1, -1}, "pages",
                 "[num_blocks, L, 2, Hkv, block_size, D] of the program's dtype, or int8");
    check_tensor(slots[i], ScalarType::Long, {rows}, "slot_mapping", "int64 [T]");
    check_tensor(tables[i], ScalarType::Int, {num_spans, -1}, "block_tables", "int32 [S, B]");
    plait::StepGroup group{};
    group.pages = static_cast<char*>(p.mutable_data_ptr());
    group.num_blocks = p.size(0);
    group.num_layers = p.size(1);
    group.num_kv_heads = p.size(3);
    group.block_size = p.size(4);
    group.is_codes = is_codes;
    group.head_size = is_codes ? p.size(5) - plait::kKvScaleBytes : p.size(5);
    check(group.half() > 0 && group.head_size > 0, "program_step", "pages must hold something");
    group.slots = data<int64_t>(slots[i]);
    group.block_table = data<int32_t>(tables[i]);
    group.table_blocks = tables[i].size(1);
    group.table_stride = group.table_blocks;
    groups.push_back(group);
  }
  return groups;
}

void add_embeds(plait::Step& step, const plait::Program& program,
                const std::optional<Tensor>& embeds, const std::optional<Tensor>& image_rows) {
  check(embeds.has_value() == image_rows.has_value(), "program_step",
        "embeds and image_rows belong together");
  if (!embeds.has_value()) return;
  check_tensor(*image_rows, ScalarType::Long, {-1}, "image_rows", "int64 [I]");
  check_tensor(*embeds, scalar_type(program.type), {image_rows->size(0), -1}, "embeds",
               "[I, levels * D] of the program's dtype");
  const auto width = static_cast<int64_t>(program.widths[0]);
  check(embeds->size(1) % width == 0, "program_step", "embeds have ", embeds->size(1),
        " columns, no multiple of ", width);
  step.embeds = data<char>(*embeds);
  step.embeds_stride = static_cast<size_t>(embeds->size(1));
  step.num_levels = static_cast<size_t>(embeds->size(1) / width);
  step.image_rows = data<int64_t>(*image_rows);
  step.num_image_rows = static_cast<size_t>(image_rows->size(0));
}

// Rows as they are, or those of the tokens that stand in their place.
const void* step_rows(Session& session, const Tensor& rows, int64_t count) {
  const plait::Program& program = session.runner->program();
  if (rows.dim() == 2) {
    check_tensor(rows, scalar_type(program.type), {count, static_cast<int64_t>(program.widths[0])},
                 "rows", "[T, width of register 0] of the program's dtype");
    return rows.const_data_ptr();
  }
  check(session.embed != nullptr, "program_step", "the program embeds no tokens: rows must be ",
        "[T, width of register 0]");
  check_tensor(rows, ScalarType::Long, {count}, "rows", "int64 [T] where they are tokens");
  const auto* tokens = data<int64_t>(rows);
  for (int64_t i = 0; i < count; ++i) {
    check(tokens[i] >= 0 && tokens[i] < session.num_embeddings, "program_step", "token ", tokens[i],
          " is not one of ", session.num_embeddings);
  }
  const auto size = static_cast<size_t>(count);
  session.embedded.resize(size * program.widths[0] * plait::element_size(program.type));
  session.embed(tokens, size, session.embedded.data());
  return session.embedded.data();
}

plait::Step make_step(Session& session, const Tensor& rows, const Tensor& positions,
                      const Tensor& query_start, const Tensor& seq_lens) {
  const int64_t count = rows.dim() == 1 || rows.dim() == 2 ? rows.size(0) : -1;
  if (positions.dim() == 2) {
    check_tensor(positions, ScalarType::Long, {3, count}, "positions", "int64 [T] or [3, T]");
  } else {
    check_tensor(positions, ScalarType::Long, {count}, "positions", "int64 [T] or [3, T]");
  }
  check_tensor(seq_lens, ScalarType::Int, {-1}, "seq_lens", "int32 [S]");
  check_tensor(query_start, ScalarType::Int, {seq_lens.size(0) + 1}, "query_start",
               "int32 [S + 1]");
  plait::Step step;
  step.rows = static_cast<size_t>(count);
  step.input = step_rows(session, rows, count);
  step.positions = data<int64_t>(positions);
  step.num_axes = positions.dim() == 2 ? 3 : 1;
  step.query_start = data<int32_t>(query_start);
  step.seq_lens = data<int32_t>(seq_lens);
  step.num_spans = seq_lens.size(0);
  return step;
}

// Begins a step and runs its instructions up to `end`. Returns the rows of the output and of taps,
// which are not filled before the last instruction has run.
std::tuple<Tensor, Tensor> program_step(
    int64_t handle, const Tensor& rows, const Tensor& positions, const Tensor& query_start,
    const Tensor& seq_lens, std::vector<Tensor> pages, std::vector<Tensor> slot_mapping,
    std::vector<Tensor> block_tables, const std::optional<Tensor>& ranges,
    const std::optional<Tensor>& lora, const std::optional<Tensor>& embeds,
    const std::optional<Tensor>& image_rows, std::vector<int64_t> taps, int64_t end) {
  const InUse session(handle, "program_step");
  const plait::Program& program = session.runner().program();
  plait::Step step = make_step(*session.get(), rows, positions, query_start, seq_lens);
  const auto count = static_cast<int64_t>(step.rows);
  step.groups = step_groups(pages, slot_mapping, block_tables, scalar_type(program.type), count,
                            step.num_spans);
  if (ranges.has_value()) {
    check_tensor(*ranges, ScalarType::Int, {-1, 3}, "ranges", "int32 [N, 3]");
    step.ranges = data<int32_t>(*ranges);
    step.num_ranges = ranges->size(0);
  }
  if (lora.has_value()) {
    check_tensor(*lora, ScalarType::Long, {-1, plait::kLoraSegmentFields}, "lora", "int64 [S, 8]");
    step.lora = {data<int64_t>(*lora), lora->size(0)};
  }
  add_embeds(step, program, embeds, image_rows);
  const auto width = static_cast<int64_t>(program.widths[program.output]);
  const ScalarType type = scalar_type(program.type);
  Tensor output = torch::stable::new_empty(rows, {count, width}, type);
  Tensor tapped =
      torch::stable::new_empty(rows, {count, static_cast<int64_t>(taps.size()) * width}, type);
  step.output = output.mutable_data_ptr();
  step.taps = std::move(taps);
  step.tapped = tapped.mutable_data_ptr();

  session->step.clear();
  session.runner().begin(std::move(step));
  const auto stop = static_cast<size_t>(end);
  if (stop < program.code.size()) {  // whoever computes in between may free what it gave us
    session->step = {positions, query_start, seq_lens, output, tapped};
    for (const auto* list : {&pages, &slot_mapping, &block_tables}) {
      session->step.insert(session->step.end(), list->begin(), list->end());
    }
    for (const auto* given : {&ranges, &lora, &embeds, &image_rows}) {
      if (given->has_value()) session->step.push_back(**given);
    }
  }
  session.runner().run(0, stop);
  return {output, tapped};
}

// Goes on with the step.
void program_resume(int64_t handle, int64_t first, int64_t end) {
  const InUse session(handle, "program_resume");
  check(first >= 0 && end >= first, "program_resume", "instructions ", first, " to ", end,
        " are no range");
  check(!session->step.empty(), "program_resume", "program ", handle, " is at no step");
  session.runner().run(static_cast<size_t>(first), static_cast<size_t>(end));
  if (static_cast<size_t>(end) == session.runner().program().code.size()) session->step.clear();
}

size_t register_of(const plait::ProgramRunner& runner, int64_t reg, const char* op) {
  const auto count = static_cast<int64_t>(runner.program().widths.size());
  check(reg >= 0 && reg < count, op, "there is no register ", reg);
  return static_cast<size_t>(reg);
}

// Copies a register of the step.
void program_read(int64_t handle, int64_t reg, Tensor rows) {
  const InUse session(handle, "program_read");
  check(!session->step.empty(), "program_read", "program ", handle, " is at no step");
  plait::ProgramRunner& runner = session.runner();
  const size_t index = register_of(runner, reg, "program_read");
  const plait::Program& program = runner.program();
  const auto width = static_cast<int64_t>(program.widths[index]);
  check_tensor(rows, scalar_type(program.type), {static_cast<int64_t>(runner.rows()), width},
               "rows", "[T, width] of the program's dtype");
  std::memcpy(rows.mutable_data_ptr(), runner.register_data(index),
              static_cast<size_t>(rows.numel()) * plait::element_size(program.type));
}

void program_write(int64_t handle, int64_t reg, const Tensor& rows) {
  const InUse session(handle, "program_write");
  check(!session->step.empty(), "program_write", "program ", handle, " is at no step");
  plait::ProgramRunner& runner = session.runner();
  const size_t index = register_of(runner, reg, "program_write");
  const plait::Program& program = runner.program();
  const auto width = static_cast<int64_t>(program.widths[index]);
  check_tensor(rows, scalar_type(program.type), {static_cast<int64_t>(runner.rows()), width},
               "rows", "[T, width] of the program's dtype");
  std::memcpy(runner.register_data(index), rows.const_data_ptr(),
              static_cast<size_t>(rows.numel()) * plait::element_size(program.type));
}

// --- counters ------------------------------------------------------------------------------------

constexpr int64_t kCountFields = sizeof(plait::Count) / sizeof(int64_t);

// Into counts int64 [phases and one of adapters, classes of rows, 4].
void program_counters(int64_t handle, Tensor counts, bool reset) {
  const InUse session(handle, "program_counters");
  const std::vector<plait::PhaseCounts>& phases = session.runner().counts();
  check_tensor(counts, ScalarType::Long,
               {static_cast<int64_t>(phases.size()), plait::kRowClasses, kCountFields}, "counts",
               "int64 [phases + 1, 4, 4]");
  static_assert(sizeof(plait::PhaseCounts) == plait::kRowClasses * sizeof(plait::Count));
  std::memcpy(counts.mutable_data_ptr(), phases.data(), phases.size() * sizeof(plait::PhaseCounts));
  if (reset) session.runner().reset_counts();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def(
      "program_new(Tensor code, Tensor[] tensors, str names, int[] widths, int output, "
      "ScalarType dtype, int num_threads, int[] cores, int spin_us) -> int");
  m.def("program_free(int handle) -> ()");
  m.def("program_count() -> int");
  m.def(
      "program_step(int handle, Tensor rows, Tensor positions, Tensor query_start, "
      "Tensor seq_lens, Tensor(a!)[] pages, Tensor[] slot_mapping, Tensor[] block_tables, "
      "Tensor? ranges, Tensor? lora, Tensor? embeds, Tensor? image_rows, int[] taps, int end) "
      "-> (Tensor, Tensor)");
  m.def("program_resume(int handle, int first, int end) -> ()");
  m.def("program_read(int handle, int register, Tensor(a!) rows) -> ()");
  m.def("program_write(int handle, int register, Tensor rows) -> ()");
  m.def("program_counters(int handle, Tensor(a!) counts, bool reset) -> ()");
}

// An op without a tensor argument has no device to be dispatched by.
STABLE_TORCH_LIBRARY_IMPL(plait, CompositeExplicitAutograd, m) {
  m.impl("program_free", TORCH_BOX(&program_free));
  m.impl("program_count", TORCH_BOX(&program_count));
  m.impl("program_resume", TORCH_BOX(&program_resume));
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("program_new", TORCH_BOX(&program_new));
  m.impl("program_step", TORCH_BOX(&program_step));
  m.impl("program_read", TORCH_BOX(&program_read));
  m.impl("program_write", TORCH_BOX(&program_write));
  m.impl("program_counters", TORCH_BOX(&program_counters));
}
