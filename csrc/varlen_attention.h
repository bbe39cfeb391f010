// Attention of every row of a segment over every key of it, for vision towers. No torch in here.
//
// The order of computation. A segment's keys are taken in tiles of kTileKeys, counted from its
// first key, and the softmax is carried from tile to tile (online). Within a tile, a score is one
// chain of fused multiply-adds over d = 0, 1, 2, …, and an output one chain over the keys. So a
// row's bits depend on its query and its segment's keys alone: not on the rows computed beside it,
// the other segments or the threads. Only different instruction sets may differ.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "cpu_features.h"

namespace plait {

constexpr int64_t kVarlenItemRows = 384;  // rows that share their segment's packed keys, at most

// Rows of heads; strides count elements, and a head's values are dense.
struct VarlenRows {
  const void* data;  // [T, H, D]
  int64_t token_stride;
  int64_t head_stride;
};

struct VarlenProblem {
  VarlenRows query;
  VarlenRows key;
  VarlenRows value;
  const int32_t* query_bounds;  // [S + 1]: where each segment's rows begin
  const int32_t* key_bounds;    // [S + 1]: and its keys
  int64_t num_segments;
  int64_t num_heads;
  int64_t head_size;
  float scale;  // > 0
  void* out;    // [T, H, D], dense
  bool is_bf16;
};

// A unit of work: rows of one segment, for one head.
struct VarlenItem {
  int32_t head;
  int32_t first_row;  // of the query
  int32_t num_rows;
  int32_t first_key;
  int32_t num_keys;
};

using VarlenKernel = void (*)(const VarlenProblem&, const VarlenItem&, float* scratch);

struct VarlenKernels {
  VarlenKernel float32;
  VarlenKernel bfloat16;
};

VarlenKernels varlen_kernels_plain();
VarlenKernels varlen_kernels_avx2();
VarlenKernels varlen_kernels_avx512();
VarlenKernels varlen_kernels_avx512_bf16();

// Floats that a kernel needs at `scratch`.
size_t varlen_scratch_floats(int64_t head_size);

// Runs body(worker) for every worker in 0 … count, on as many threads as there are.
using RunVarlen = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

// Fills `problem.out`. The caller has checked the arguments; `num_threads` bounds the workers.
void varlen_attention(const VarlenProblem& problem, CpuIsa isa, int64_t num_threads,
                      const RunVarlen& run_workers);

}  // namespace plait
