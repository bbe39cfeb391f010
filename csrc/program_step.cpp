#include "program_step.h"

#include <algorithm>
#include <limits>

#include "attention_checks.h"
#include "checks.h"

namespace plait {
namespace {

constexpr const char* kOp = "program_step";

void check_positions(const Program& program, const Step& step) {
  if (program.tables.empty()) return;
  auto end = std::numeric_limits<int64_t>::max();
  for (const RopeTable& table : program.tables) {
    end = std::min(end, static_cast<int64_t>(table.num_positions));
    check(step.num_axes == 1 || table.axes != nullptr, kOp,
          "positions are of a grid, but the program's rope is not");
  }
  for (size_t i = 0; i < step.num_axes * step.rows; ++i) {
    check(step.positions[i] >= 0 && step.positions[i] < end, kOp, "position ", step.positions[i],
          " is not one of the ", end, " of the rope's table");
  }
}

void check_slots(const StepGroup& group, size_t index, size_t rows) {
  const int64_t num_slots = group.num_blocks * group.block_size;
  for (size_t i = 0; i < rows; ++i) {
    check(group.slots[i] < num_slots, kOp, "slot ", group.slots[i], " of row ", i,
          " is beyond the ", num_slots, " slots of KV group ", index);
  }
}

struct View {
  size_t group;
  int64_t window;
};

void check_attention(const Program& program, const Step& step, std::vector<int32_t>& key_ends) {
  std::vector<View> seen;
  for (size_t i = 0; i < program.code.size(); ++i) {
    const auto* op = std::get_if<AttentionOp>(&program.code[i].operation);
    if (op == nullptr) continue;
    const StepGroup& group = step.groups[op->group];
    const auto kv_heads = static_cast<int64_t>(op->key.num_heads);
    const auto head_size = static_cast<int64_t>(op->query.head_size);
    check(op->layer < group.num_layers && kv_heads == group.num_kv_heads &&
              head_size == group.head_size,
          kOp, place_of(program, i), " takes layer ", op->layer, " with ", kv_heads,
          " KV heads of ", head_size, "; the pages of KV group ", op->group, " have ",
          group.num_layers, " layers with ", group.num_kv_heads, " heads of ", group.head_size);
    const auto is_same = [op](const View& view) {
      return view.group == op->group && view.window == op->window;
    };
    if (std::any_of(seen.begin(), seen.end(), is_same)) continue;
    const AttentionProblem problem = attention_problem(program, *op, step);
    check_spans(problem, static_cast<int64_t>(step.rows), group.table_blocks, kOp);
    if (seen.empty() && step.num_ranges > 0) {
      find_key_ends(problem, step.ranges, step.num_ranges, kOp, key_ends);
    }
    seen.push_back({op->group, op->window});
  }
}

void check_embeds(const Program& program, const Step& step) {
  if (step.num_image_rows == 0) return;
  check(program.num_levels <= step.num_levels, kOp, "embeds have ", step.num_levels,
        " levels, the program adds ", program.num_levels);
  int64_t before = -1;
  for (size_t i = 0; i < step.num_image_rows; ++i) {
    const int64_t row = step.image_rows[i];
    check(row > before && row < static_cast<int64_t>(step.rows), kOp, "image row ", row,
          " is out of order, or not one of the ", step.rows, " rows");
    before = row;
  }
}

void check_taps(const Program& program, const Step& step) {
  for (const int64_t tap : step.taps) {
    const auto taps_it = [tap](const Instruction& instruction) {
      const auto* op = std::get_if<TapOp>(&instruction.operation);
      return op != nullptr && op->layer == tap;
    };
    check(std::any_of(program.code.begin(), program.code.end(), taps_it), kOp,
          "there is no tap after layer ", tap);
  }
}

}  // namespace

AttentionProblem attention_problem(const Program& program, const AttentionOp& op,
                                   const Step& step) {
  const StepGroup& group = step.groups[op.group];
  const int64_t bytes = group.stored_bytes(program.type);
  AttentionProblem p{};
  p.pages = group.pages + op.layer * 2 * group.half() * bytes;
  p.num_blocks = group.num_blocks;
  p.block_stride = group.block_stride();
  p.value_offset = group.half();
  p.slot_stride = group.slot_size();
  p.block_size = group.block_size;
  p.block_table = group.block_table;
  p.block_table_stride = group.table_stride;
  p.query_start = step.query_start;
  p.seq_lens = step.seq_lens;
  p.num_spans = step.num_spans;
  p.num_heads = static_cast<int64_t>(op.query.num_heads);
  p.num_kv_heads = group.num_kv_heads;
  p.head_size = group.head_size;
  p.scale = op.scale;
  p.window = op.window;
  p.softcap = op.softcap;
  p.sinks = op.sinks;
  p.is_bf16 = program.type == Element::kBfloat16;
  p.is_codes = group.is_codes;
  return p;
}

void check_step(const Program& program, const Step& step, std::vector<int32_t>& key_ends) {
  key_ends.clear();
  check(step.groups.size() >= program.num_groups, kOp, "there are ", step.groups.size(),
        " KV groups, the program takes ", program.num_groups);
  check_positions(program, step);
  for (size_t i = 0; i < step.groups.size(); ++i) check_slots(step.groups[i], i, step.rows);
  check_attention(program, step, key_ends);
  check_embeds(program, step);
  check_taps(program, step);
}

}  // namespace plait
