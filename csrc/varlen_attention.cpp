#include "varlen_attention.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "thread_scratch.h"
#include "varlen_attention_kernel.h"

namespace plait {
namespace {

thread_local ThreadScratch thread_scratch;

struct Work {
  std::vector<VarlenItem> items;
  double multiply_adds = 0;  // about
};

// Cuts the segments into items of nearly equal size.
Work cut(const VarlenProblem& p) {
  Work work;
  for (int64_t s = 0; s < p.num_segments; ++s) {
    const int64_t rows = p.query_bounds[s + 1] - p.query_bounds[s];
    const int64_t keys = p.key_bounds[s + 1] - p.key_bounds[s];
    const int64_t count = (rows + kVarlenItemRows - 1) / kVarlenItemRows;
    for (int64_t head = 0; head < p.num_heads; ++head) {
      for (int64_t i = 0; i < count; ++i) {
        VarlenItem item;
        item.head = static_cast<int32_t>(head);
        item.first_row = p.query_bounds[s] + static_cast<int32_t>(rows * i / count);
        item.num_rows = static_cast<int32_t>(rows * (i + 1) / count - rows * i / count);
        item.first_key = p.key_bounds[s];
        item.num_keys = static_cast<int32_t>(keys);
        work.items.push_back(item);
      }
    }
    work.multiply_adds +=
        2.0 * static_cast<double>(rows * p.num_heads) * static_cast<double>(keys * p.head_size);
  }
  return work;
}

// Less than this is not worth another thread: about 20 µs.
constexpr double kMultiplyAddsPerThread = 400'000;

VarlenKernels varlen_kernels(CpuIsa isa) {
#if PLAIT_HAS_X86_SOURCES
  switch (isa) {
    case CpuIsa::kAvx512Bf16:
      return varlen_kernels_avx512_bf16();
    case CpuIsa::kAvx512Vnni:
    case CpuIsa::kAvx512:
      return varlen_kernels_avx512();
    case CpuIsa::kAvx2:
      return varlen_kernels_avx2();
    case CpuIsa::kPlain:
      break;
  }
#else
  (void)isa;
#endif
  return varlen_kernels_plain();
}

}  // namespace

VarlenKernels varlen_kernels_plain() { return make_varlen_kernels<PlainVec, PlainTranspose>(); }

size_t varlen_scratch_floats(int64_t head_size) {
  return static_cast<size_t>(VarlenScratch(nullptr, head_size).size);
}

void varlen_attention(const VarlenProblem& problem, CpuIsa isa, int64_t num_threads,
                      const RunVarlen& run_workers) {
  const Work work = cut(problem);
  if (work.items.empty()) return;
  const VarlenKernels kernels = varlen_kernels(isa);
  const VarlenKernel kernel = problem.is_bf16 ? kernels.bfloat16 : kernels.float32;
  const size_t scratch_floats = varlen_scratch_floats(problem.head_size);

  // Workers take items one by one: segments differ in size, and cores in speed.
  std::atomic<size_t> next{0};
  const auto worker = [&](int64_t) {
    float* const scratch = thread_scratch.at_least(scratch_floats);
    for (size_t i = next++; i < work.items.size(); i = next++) {
      kernel(problem, work.items[i], scratch);
    }
  };
  const auto worth = static_cast<int64_t>(work.multiply_adds / kMultiplyAddsPerThread);
  const int64_t workers =
      std::min({num_threads, static_cast<int64_t>(work.items.size()), std::max<int64_t>(1, worth)});
  if (workers == 1) {
    worker(0);
  } else {
    run_workers(workers, worker);
  }
}

}  // namespace plait
