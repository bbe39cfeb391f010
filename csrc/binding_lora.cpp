// Binds low-rank updates to torch: checks every argument, hands pointers and sizes to lora.h.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "binding_element.h"
#include "binding_parallel.h"
#include "cpu_features.h"
#include "lora_segments.h"

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
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == plait::kLoraSegmentFields &&
                      segments.is_contiguous() && segments.scalar_type() == ScalarType::Long,
                  "plait::lora_: segments must be int64 [S, ", plait::kLoraSegmentFields,
                  "] and dense");
  const plait::LoraTable table{static_cast<const int64_t*>(segments.const_data_ptr()),
                               segments.size(0)};
  thread_local std::vector<plait::LoraSegment> found;
  plait::find_lora_segments(table, leaf, out.size(0), inputs, out.size(1), found);
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
  args.out_type = plait::op_element(out, "lora_", "out");
  args.out_stride = static_cast<size_t>(out.stride(0));
  args.segments = found.data();
  args.num_segments = found.size();
  plait::lora(kernels(), args, plait::op_parallel_for);
}

// out [T, N], x [T, K], segments [S, 8]
void lora_(Tensor out, const Tensor& x, const Tensor& segments, int64_t leaf) {
  STD_TORCH_CHECK(x.dim() == 2, "plait::lora_: x must be [T, K]");
  STD_TORCH_CHECK(x.size(0) <= 1 || x.stride(0) >= 0, "plait::lora_: x must not run backwards");
  STD_TORCH_CHECK(x.stride(1) == 1 || x.size(1) <= 1, "plait::lora_: rows of x must be dense");
  plait::LoraArgs args{};
  args.x = x.const_data_ptr();
  args.x_type = plait::op_element(x, "lora_", "x");
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
