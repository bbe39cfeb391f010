// Linear layers over packed weights: out = x · weightᵀ + bias. No torch in here.
//
// Packed weights. Outputs are cut into tiles of 16, inputs into steps; a step of a tile is one
// cache line, and the steps of a tile follow each other:
//
//   fp32   weight[tile][k][16]            a step is one input
//   bf16   weight[tile][k / 2][16][2]     a step is a pair of inputs
//
// so that a kernel reads its weights from front to back, once. The ends of the last tile and of an
// odd k are zeros. The layout is the same for every instruction set.
//
// The order of summation. Each output is one chain of fused multiply-adds (or of bf16 dot
// instructions) over the steps 0, 1, 2, …, whatever the number of rows, the blocking or the
// threads: blocks of steps hand the chain on through memory in fp32. So a row has the same bits
// alone and in any batch. Only different instruction sets may differ.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "companion.h"
#include "cpu_features.h"
#include "element.h"

namespace plait {

constexpr size_t kTileOutputs = 16;
constexpr size_t kStepBytes = 64;     // of one tile's weights
constexpr size_t kGroupTiles = 4;     // the unit in which work is split among threads
constexpr size_t kChunkRows = 192;    // rows packed and multiplied together at most
constexpr size_t kUnpackSteps = 256;  // fp32 steps of unpacked weights kept at a time

// Cuts rows into panels of nearly equal height. Without a name outside its file: a member compiled
// for one instruction set must not serve another's code.
namespace {
struct Panels {
  size_t rows;
  size_t count;

  Panels(size_t num_rows, size_t max_panel_rows)
      : rows(num_rows), count((num_rows + max_panel_rows - 1) / max_panel_rows) {}
  size_t height(size_t panel) const { return rows / count + (panel < rows % count ? 1 : 0); }
  size_t first_row(size_t panel) const {
    const size_t extra = rows % count;
    return panel * (rows / count) + (panel < extra ? panel : extra);
  }
};
}  // namespace

// What a kernel computes: a chunk of rows, already in panels, against some of the tiles.
struct LinearJob {
  const void* panels;
  size_t rows;

  const void* weight;
  size_t steps;
  size_t out_features;

  const void* bias;  // out_features values, or null
  Element bias_type;

  void* out;
  size_t out_stride;  // in elements
  Element out_type;

  bool goes_on;      // tiles after these are computed next
  FetchList* fetch;  // for somebody else, meanwhile; or null
};

// One kernel: a type of weights on one instruction set.
struct LinearKernel {
  size_t max_panel_rows;
  size_t row_step_bytes;  // of one row in a panel, for one step

  // Copies rows into one panel, [step][row][…], the way the kernel reads them.
  void (*pack)(const void* x, size_t row_stride, size_t rows, size_t in_features, void* panel);
  // Computes the tiles of groups begin … end. `scratch` holds scratch_floats(rows) values.
  void (*run)(const LinearJob& job, size_t begin, size_t end, float* scratch);
};

constexpr size_t scratch_floats(size_t rows) {
  return (rows + kUnpackSteps) * kGroupTiles * kTileOutputs;
}

struct LinearKernels {
  LinearKernel float32;
  LinearKernel bfloat16;
};

LinearKernels linear_kernels_plain();
LinearKernels linear_kernels_avx2();
LinearKernels linear_kernels_avx512();
LinearKernels linear_kernels_avx512_bf16();
LinearKernels linear_kernels(CpuIsa isa);

struct LinearArgs {
  const void* x;
  size_t rows;
  size_t x_stride;  // in elements
  size_t in_features;

  const void* weight;
  Element weight_type;  // and x's
  size_t out_features;

  const void* bias;
  Element bias_type;

  void* out;
  size_t out_stride;
  Element out_type;

  Companion* companion;  // or null; one that does not advance was not taken along
};

// Calls body(begin, end) over parts of 0 … count, none shorter than `grain` but the last.
using Body = std::function<void(size_t begin, size_t end)>;
using ParallelFor = std::function<void(size_t count, size_t grain, const Body& body)>;

void linear(const LinearKernels& kernels, const LinearArgs& args, const ParallelFor& parallel_for);

// Calls run(group) for all groups of tiles on this thread, and lets the companion work in between.
template <class Run>
void run_with(Companion& companion, LinearJob& job, size_t groups, const Run& run) {
  for (size_t group = 0; group < groups; ++group) {
    job.fetch = &companion.ahead(groups - group);
    job.goes_on = group + 1 < groups;
    run(group);
    const size_t outputs = (group + 1) * kGroupTiles * kTileOutputs;
    companion.advance(outputs < job.out_features ? outputs : job.out_features);
  }
}

}  // namespace plait
