// Binds low-rank updates to torch: checks every argument, hands pointers and sizes to lora.h.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <bit>
#include <vector>

#include "cpu_features.h"
#include "lora.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

plait::LoraKernels kernels() {
#if PLAIT_HAS_X86_SOURCES
  const plait::CpuIsa isa = plait::cpu_isa();
  if (isa >= plait::CpuIsa::kAvx512) return plait::lora_kernels_avx512();
  if (isa >= plait::CpuIsa::kAvx2) return plait::lora_kernels_avx2();
#endif
  return plait::lora_kernels_plain();
}

plait::Element element(const Tensor& t, const char* name) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, "plait::lora_: ", name,
                  " must be float32 or bfloat16");
  return type == ScalarType::Float ? plait::Element::kFloat32 : plait::Element::kBfloat16;
}

void parallel_for(size_t count, size_t grain, const plait::Body& body) {
  torch::stable::parallel_for(0, static_cast<int64_t>(count), static_cast<int64_t>(grain),
                              [&body](int64_t begin, int64_t end) {
                                if (begin < end)
                                  body(static_cast<size_t>(begin), static_cast<size_t>(end));
                              });
}

// A row of `segments`.
struct SegmentRow {
  int64_t start;
  int64_t end;
  int64_t weights;  // addresses
  int64_t table;
  int64_t num_leaves;
  int64_t table_size;
  int64_t type;  // 0: fp32, 1: bf16
  int64_t scale;
};
constexpr int64_t kRowFields = sizeof(SegmentRow) / sizeof(int64_t);
constexpr int64_t kLeafFields = sizeof(plait::LoraLeaf) / sizeof(int64_t);
constexpr int64_t kPartFields = sizeof(plait::LoraPart) / sizeof(int64_t);

template <class T>
T* at_address(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

void check_leaf(const SegmentRow& row, const plait::LoraLeaf& leaf, const plait::LoraPart* parts,
                int64_t inputs, int64_t outputs) {
  STD_TORCH_CHECK(inputs < 0 || leaf.inputs == inputs, "plait::lora_: x has ", inputs,
                  " columns, the adapter takes ", leaf.inputs);
  const int64_t end = leaf.first_part + leaf.num_parts;
  STD_TORCH_CHECK(
      leaf.first_part >= 0 && row.num_leaves * kLeafFields + end * kPartFields <= row.table_size,
      "plait::lora_: an adapter's table is too short");
  int64_t ranks = 0;
  for (int64_t p = 0; p < leaf.num_parts; ++p) {
    STD_TORCH_CHECK(parts[p].start >= 0 && parts[p].start + parts[p].outputs <= outputs,
                    "plait::lora_: outputs ", parts[p].start, " to ",
                    parts[p].start + parts[p].outputs, " are not inside the leaf's ", outputs);
    ranks += parts[p].rank;
  }
  STD_TORCH_CHECK(ranks == leaf.ranks, "plait::lora_: an adapter's table is not consistent");
}

// Those that change the leaf.
void find_segments(const Tensor& segments, int64_t leaf, int64_t rows, int64_t inputs,
                   int64_t outputs, std::vector<plait::LoraSegment>& found) {
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == kRowFields &&
                      segments.is_contiguous() && segments.scalar_type() == ScalarType::Long,
                  "plait::lora_: segments must be int64 [S, ", kRowFields, "] and dense");
  const auto* row = static_cast<const SegmentRow*>(segments.const_data_ptr());
  int64_t before_start = 0;
  int64_t before_end = 0;
  for (const auto* end = row + segments.size(0); row != end; ++row) {
    const bool is_same = row->start == before_start && row->end == before_end;
    STD_TORCH_CHECK((is_same || row->start >= before_end) && row->start <= row->end,
                    "plait::lora_: segments are not in the order of rows");
    STD_TORCH_CHECK(row->end <= rows, "plait::lora_: out has ", rows, " rows, a segment ends at ",
                    row->end);
    STD_TORCH_CHECK(leaf >= 0 && leaf < row->num_leaves, "plait::lora_: there is no leaf ", leaf);
    before_start = row->start;
    before_end = row->end;
    const auto* leaves = at_address<const plait::LoraLeaf>(row->table);
    if (leaves[leaf].num_parts == 0 || row->start == row->end) continue;
    const plait::LoraPart* parts =
        reinterpret_cast<const plait::LoraPart*>(leaves + row->num_leaves) +
        leaves[leaf].first_part;
    check_leaf(*row, leaves[leaf], parts, inputs, outputs);
    found.push_back({static_cast<size_t>(row->start), static_cast<size_t>(row->end),
                     at_address<const char>(row->weights),
                     row->type == 0 ? plait::Element::kFloat32 : plait::Element::kBfloat16,
                     leaves[leaf], parts, std::bit_cast<double>(row->scale)});
  }
}

void check_out(const Tensor& out) {
  STD_TORCH_CHECK(out.dim() == 2, "plait::lora_: out must be [T, N]");
  STD_TORCH_CHECK(out.size(0) <= 1 || out.stride(0) >= out.size(1),
                  "plait::lora_: rows of out must not overlap");
  STD_TORCH_CHECK(out.stride(1) == 1 || out.size(1) <= 1,
                  "plait::lora_: rows of out must be dense");
}

void run(Tensor& out, const Tensor& input, const Tensor& segments, int64_t leaf, int64_t inputs,
         plait::LoraArgs& args) {
  check_out(out);
  STD_TORCH_CHECK(input.size(0) == out.size(0), "plait::lora_: out has ", out.size(0),
                  " rows, the input ", input.size(0));
  thread_local std::vector<plait::LoraSegment> found;
  found.clear();
  find_segments(segments, leaf, out.size(0), inputs, out.size(1), found);
  if (args.x == nullptr) {
    for (const plait::LoraSegment& segment : found) {
      for (size_t row = segment.start; row < segment.end; ++row) {
        STD_TORCH_CHECK(args.token_ids[row] >= 0 && args.token_ids[row] < segment.leaf.inputs,
                        "plait::lora_: token ", args.token_ids[row], " is not one of the ",
                        segment.leaf.inputs);
      }
    }
  }
  args.inputs = static_cast<size_t>(inputs < 0 ? 0 : inputs);
  args.out = out.mutable_data_ptr();
  args.out_type = element(out, "out");
  args.out_stride = static_cast<size_t>(out.stride(0));
  args.segments = found.data();
  args.num_segments = found.size();
  plait::lora(kernels(), args, parallel_for);
}

// out [T, N], x [T, K], segments [S, 8]
void lora_(Tensor out, const Tensor& x, const Tensor& segments, int64_t leaf) {
  STD_TORCH_CHECK(x.dim() == 2, "plait::lora_: x must be [T, K]");
  STD_TORCH_CHECK(x.size(0) <= 1 || x.stride(0) >= 0, "plait::lora_: x must not run backwards");
  STD_TORCH_CHECK(x.stride(1) == 1 || x.size(1) <= 1, "plait::lora_: rows of x must be dense");
  plait::LoraArgs args{};
  args.x = x.const_data_ptr();
  args.x_type = element(x, "x");
  args.x_stride = static_cast<size_t>(x.stride(0));
  run(out, x, segments, leaf, x.size(1), args);
}

// out [T, H], token_ids int64 [T], segments [S, 8]
void lora_embedding_(Tensor out, const Tensor& token_ids, const Tensor& segments, int64_t leaf) {
  STD_TORCH_CHECK(token_ids.dim() == 1 && token_ids.is_contiguous() &&
                      token_ids.scalar_type() == ScalarType::Long,
                  "plait::lora_embedding_: token_ids must be int64 [T] and dense");
  plait::LoraArgs args{};
  args.token_ids = static_cast<const int64_t*>(token_ids.const_data_ptr());
  run(out, token_ids, segments, leaf, -1, args);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def("lora_(Tensor(a!) out, Tensor x, Tensor segments, int leaf) -> ()");
  m.def("lora_embedding_(Tensor(a!) out, Tensor token_ids, Tensor segments, int leaf) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("lora_", TORCH_BOX(&lora_));
  m.impl("lora_embedding_", TORCH_BOX(&lora_embedding_));
}
