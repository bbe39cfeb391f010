#include "lora_segments.h"

#include <bit>

#include "checks.h"

namespace plait {
namespace {

struct SegmentRow {
  int64_t start;
  int64_t end;
  int64_t weights;  // addresses
  int64_t table;
  int64_t num_leaves;
  int64_t table_size;
  int64_t type;  // of LoraType
  int64_t scale;
};
static_assert(sizeof(SegmentRow) == kLoraSegmentFields * sizeof(int64_t));
constexpr int64_t kLeafFields = sizeof(LoraLeaf) / sizeof(int64_t);
constexpr int64_t kPartFields = sizeof(LoraPart) / sizeof(int64_t);

template <class T>
T* at_address(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

void check_leaf(const SegmentRow& row, const LoraLeaf& leaf, const LoraPart* parts, int64_t inputs,
                int64_t outputs) {
  check(inputs < 0 || leaf.inputs == inputs, "lora_", "x has ", inputs,
        " columns, the adapter takes ", leaf.inputs);
  const int64_t end = leaf.first_part + leaf.num_parts;
  check(leaf.first_part >= 0 && row.num_leaves * kLeafFields + end * kPartFields <= row.table_size,
        "lora_", "an adapter's table is too short");
  int64_t ranks = 0;
  for (int64_t p = 0; p < leaf.num_parts; ++p) {
    check(parts[p].start >= 0 && parts[p].start + parts[p].outputs <= outputs, "lora_", "outputs ",
          parts[p].start, " to ", parts[p].start + parts[p].outputs, " are not inside the leaf's ",
          outputs);
    ranks += parts[p].rank;
  }
  check(ranks == leaf.ranks, "lora_", "an adapter's table is not consistent");
}

}  // namespace

void find_lora_segments(const LoraTable& table, int64_t leaf, int64_t num_rows, int64_t inputs,
                        int64_t outputs, std::vector<LoraSegment>& found) {
  found.clear();
  const auto* row = reinterpret_cast<const SegmentRow*>(table.rows);
  int64_t before_start = 0;
  int64_t before_end = 0;
  for (const auto* end = row + table.num_segments; row != end; ++row) {
    const bool is_same = row->start == before_start && row->end == before_end;
    check((is_same || row->start >= before_end) && row->start <= row->end, "lora_",
          "segments are not in the order of rows");
    check(row->end <= num_rows, "lora_", "out has ", num_rows, " rows, a segment ends at ",
          row->end);
    check(row->type >= 0 && row->type <= static_cast<int64_t>(LoraType::kInt8), "lora_",
          "an adapter's weights are of no known type");
    check(leaf >= 0 && leaf < row->num_leaves, "lora_", "there is no leaf ", leaf);
    before_start = row->start;
    before_end = row->end;
    const auto* leaves = at_address<const LoraLeaf>(row->table);
    if (leaves[leaf].num_parts == 0 || row->start == row->end) continue;
    const auto* parts =
        reinterpret_cast<const LoraPart*>(leaves + row->num_leaves) + leaves[leaf].first_part;
    check_leaf(*row, leaves[leaf], parts, inputs, outputs);
    found.push_back({static_cast<size_t>(row->start), static_cast<size_t>(row->end),
                     at_address<const char>(row->weights), static_cast<LoraType>(row->type),
                     leaves[leaf], parts, std::bit_cast<double>(row->scale)});
  }
}

}  // namespace plait
