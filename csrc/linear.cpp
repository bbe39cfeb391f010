#include "linear.h"

#include <algorithm>
#include <memory>
#include <new>

#include "linear_kernel.h"

namespace plait {
namespace {

// A thread's buffer, kept between calls: it grows to the largest layer's need and stays.
class Buffer {
 public:
  void* at_least(size_t bytes) {
    if (bytes > size_) {
      data_.reset();  // the old one first, so that both are never held at once
      size_ = 0;
      data_.reset(static_cast<char*>(::operator new(bytes, kAlignment)));
      size_ = bytes;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(char* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
};

thread_local Buffer panels_buffer;
thread_local Buffer scratch_buffer;

constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// Work shorter than this runs on the calling thread: about 20 µs at 50 Gflop/s and at 20 GB/s.
constexpr size_t kGrainFlops = 1'000'000;
constexpr size_t kGrainBytes = 400'000;

// So many groups are worth a thread.
size_t grain_groups(size_t rows, size_t in_features, size_t weight_bytes_per_group) {
  const size_t flops = 2 * rows * in_features * kGroupTiles * kTileOutputs;
  return std::max<size_t>(
      1, std::min(ceil_div(kGrainFlops, flops), ceil_div(kGrainBytes, weight_bytes_per_group)));
}

void pack_rows(const LinearKernel& kernel, const LinearArgs& args, size_t first_row, size_t rows,
               size_t steps, char* panels, const ParallelFor& parallel_for) {
  const Panels split(rows, kernel.max_panel_rows);
  const auto* x = static_cast<const char*>(args.x);
  const size_t x_bytes = args.x_stride * element_size(args.weight_type);
  const size_t grain = ceil_div(20'000, args.in_features * kernel.max_panel_rows);
  parallel_for(split.count, grain, [&](size_t begin, size_t end) {
    for (size_t p = begin; p < end; ++p) {
      const size_t row = split.first_row(p);
      kernel.pack(x + (first_row + row) * x_bytes, args.x_stride, split.height(p), args.in_features,
                  panels + row * steps * kernel.row_step_bytes);
    }
  });
}

}  // namespace

LinearKernels linear_kernels_plain() {
  return {make_kernel<FloatFormat<PlainVec>>(), make_kernel<WidenFormat<PlainVec>>()};
}

LinearKernels linear_kernels([[maybe_unused]] CpuIsa isa) {
#if PLAIT_HAS_X86_SOURCES
  if (isa >= CpuIsa::kAvx512Bf16) return linear_kernels_avx512_bf16();
  if (isa >= CpuIsa::kAvx512) return linear_kernels_avx512();
  if (isa >= CpuIsa::kAvx2) return linear_kernels_avx2();
#endif
  return linear_kernels_plain();
}

void linear(const LinearKernels& kernels, const LinearArgs& args, const ParallelFor& parallel_for) {
  if (args.rows == 0 || args.out_features == 0) return;
  const bool wide = args.weight_type == Element::kFloat32;
  const LinearKernel& kernel = wide ? kernels.float32 : kernels.bfloat16;
  const size_t steps = wide ? args.in_features : ceil_div(args.in_features, 2);
  const size_t groups = ceil_div(args.out_features, kGroupTiles * kTileOutputs);
  const size_t chunk = ceil_div(args.rows, ceil_div(args.rows, kChunkRows));

  for (size_t first_row = 0; first_row < args.rows; first_row += chunk) {
    const size_t rows = std::min(chunk, args.rows - first_row);
    auto* panels = static_cast<char*>(panels_buffer.at_least(rows * steps * kernel.row_step_bytes));
    pack_rows(kernel, args, first_row, rows, steps, panels, parallel_for);

    LinearJob job{};
    job.panels = panels;
    job.rows = rows;
    job.weight = args.weight;
    job.steps = steps;
    job.out_features = args.out_features;
    job.bias = args.bias;
    job.bias_type = args.bias_type;
    job.out =
        static_cast<char*>(args.out) + first_row * args.out_stride * element_size(args.out_type);
    job.out_stride = args.out_stride;
    job.out_type = args.out_type;
    const size_t grain = grain_groups(rows, args.in_features, steps * kStepBytes * kGroupTiles);
    const Body run = [&](size_t begin, size_t end) {
      auto* scratch = scratch_buffer.at_least(scratch_floats(rows) * sizeof(float));
      kernel.run(job, begin, end, static_cast<float*>(scratch));
    };
    if (args.companion != nullptr && chunk == args.rows) {
      run_with(*args.companion, job, groups, [&](size_t group) {
        job.fetch->most_bytes = kStepBytes;  // the kernel fetches a line a step
        run(group, group + 1);
      });
    } else {
      parallel_for(groups, grain, run);
    }
  }
}

}  // namespace plait
