#include "paged_attention.h"

#include <algorithm>
#include <vector>

#include "paged_attention_kernel.h"
#include "thread_scratch.h"

namespace plait {
namespace {

thread_local ThreadScratch thread_scratch;

thread_local std::vector<AttentionItem> thread_items;  // of this thread's call

// Cuts the spans into items; those of one sequence and its heads stand together, as their pages do.
// Returns about how many multiply-adds they are.
double cut(const AttentionProblem& p, std::vector<AttentionItem>& items) {
  items.clear();
  double multiply_adds = 0;
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t tile_tokens = std::max<int64_t>(1, kTileRows / group);
  for (int64_t s = 0; s < p.num_spans; ++s) {
    const int64_t tokens = p.query_start[s + 1] - p.query_start[s];
    for (int64_t first = 0; first < tokens; first += tile_tokens) {
      AttentionItem item;
      item.span = static_cast<int32_t>(s);
      item.first_token = static_cast<int32_t>(first);
      item.num_tokens = static_cast<int32_t>(std::min(tile_tokens, tokens - first));
      for (int64_t head = 0; head < p.num_kv_heads; ++head) {
        item.kv_head = static_cast<int32_t>(head);
        items.push_back(item);
      }
    }
    const int64_t keys = p.window == 0 ? p.seq_lens[s] : std::min<int64_t>(p.seq_lens[s], p.window);
    multiply_adds +=
        2.0 * static_cast<double>(tokens * p.num_heads) * static_cast<double>(keys * p.head_size);
  }
  return multiply_adds;
}

}  // namespace

const AttentionItem* AttentionQueue::take() {
  const size_t i = next_++;
  return i < count_ ? items_ + i : nullptr;
}

AttentionKernels attention_kernels_plain() {
  return make_attention_kernels<PlainVec, PlainTranspose>();
}

AttentionKernels attention_kernels(CpuIsa isa) {
#if PLAIT_HAS_X86_SOURCES
  switch (isa) {
    case CpuIsa::kAvx512Bf16:
      return attention_kernels_avx512_bf16();
    case CpuIsa::kAvx512Vnni:
    case CpuIsa::kAvx512:
      return attention_kernels_avx512();
    case CpuIsa::kAvx2:
      return attention_kernels_avx2();
    case CpuIsa::kPlain:
      break;
  }
#else
  (void)isa;
#endif
  return attention_kernels_plain();
}

size_t attention_scratch_floats(const AttentionProblem& p) {
  const int64_t rows = std::max(kTileRows, p.num_heads / p.num_kv_heads);
  return static_cast<size_t>(AttentionScratch(nullptr, rows, p.head_size).size);
}

void paged_attention(const AttentionProblem& problem, CpuIsa isa, int64_t num_threads,
                     const RunWorkers& run_workers, double grain) {
  std::vector<AttentionItem>& items = thread_items;
  const double multiply_adds = cut(problem, items);
  if (items.empty()) return;
  const AttentionKernels kernels = attention_kernels(isa);
  const AttentionKernel kernel =
      problem.is_codes ? (problem.is_bf16 ? kernels.bfloat16_codes : kernels.float32_codes)
                       : (problem.is_bf16 ? kernels.bfloat16 : kernels.float32);
  const size_t scratch_floats = attention_scratch_floats(problem);

  // Items are taken one by one: causal ones differ in size, and cores in speed.
  AttentionQueue queue(items.data(), items.size());
  const auto worker = [&](int64_t) {
    kernel(problem, queue, thread_scratch.at_least(scratch_floats));
  };
  const auto worth = static_cast<int64_t>(multiply_adds / grain);
  const int64_t workers =
      std::min({num_threads, static_cast<int64_t>(items.size()), std::max<int64_t>(1, worth)});
  if (workers == 1) {
    worker(0);
  } else {
    run_workers(workers, worker);
  }
}

}  // namespace plait
