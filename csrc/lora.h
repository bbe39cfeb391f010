// Low-rank updates of a linear layer, in place, for rows of many adapters. No torch in here.
//
// A leaf is one linear layer as the model runs it. An adapter changes ranges of its outputs, parts:
//
//   t = a · x                             shrink, by all parts of the leaf at once
//   d = scale · (b · t + b_bias)          expand, part by part
//   y = y + d                             or with g: y = g · (y - bias + d) + bias
//
// Weights. An adapter's weights are one buffer, leaf by leaf: the a of all parts as one matrix
// [Σ rank, inputs], then each part's b [outputs, rank] and its vectors in fp32. A matrix [N, K] is
// in tiles of 16 outputs, and the last tile has only the N % 16 that are left:
//
//   fp32   [tile][k][16]
//   bf16   [tile][k / 2][16][2], and [16] for the last k of an odd number
//
//   int8   [tile][k / 2][16][2], with a zero for the last partner of an odd number
//
// So nothing is padded, and one row's work reads the leaf from front to back, once. Kernels load
// whole vectors and ignore what lies beyond a narrow tile; 64 bytes follow the last value for that.
//
// In int8, a's codes follow fp32 factors, one for each rank: a row of a and a column of b have a
// scale each, and t takes both at once. Inputs and t become whole numbers too, of 16 bits with a
// scale for every 256 of them, and products are summed exactly:
//
//   t = factor · Σ groups (scale · Σ code · x)       b · t = Σ groups (scale · Σ code · t)
//
// The order of summation. t is four chains of fused multiply-adds, chain c over the inputs c, c +
// 4, c + 8, …, added as (0 + 1) + (2 + 3); b · t is one chain. In int8 both are one chain over the
// groups. No chain depends on the number of rows, their blocking, or the threads. Only different
// instruction sets may differ.

#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"

namespace plait {

constexpr size_t kLoraChains = 4;
constexpr size_t kLoraSlack = 64;   // bytes after the last weight
constexpr size_t kCodeGroup = 256;  // inputs, or ranks of a part, that share a scale in int8

// Of an adapter's weights.
enum class LoraType : uint8_t { kFloat32, kBfloat16, kInt8 };

constexpr size_t lora_even(size_t n) { return (n + 1) / 2 * 2; }

// Of so many values in a row of a matrix.
constexpr size_t lora_row_bytes(LoraType type, size_t values) {
  return type == LoraType::kFloat32    ? 4 * values
         : type == LoraType::kBfloat16 ? 2 * values
                                       : lora_even(values);
}

// Rows of the tables, as int64 values; offsets are bytes from the start of the weights.
struct LoraLeaf {
  int64_t a;
  int64_t inputs;
  int64_t ranks;
  int64_t first_part;
  int64_t num_parts;
};
struct LoraPart {
  int64_t b;
  int64_t start;  // of its outputs in the leaf's
  int64_t outputs;
  int64_t rank;
  int64_t b_bias;  // negative: none, and for the others
  int64_t g;
  int64_t bias;
  double scale;
};

// Some rows and the adapter that changes them.
struct LoraSegment {
  size_t start;
  size_t end;
  const char* weights;
  LoraType type;
  LoraLeaf leaf;
  const LoraPart* parts;
  double scale;  // the request's own
};

struct LoraArgs {
  const void* x;             // rows of inputs, or
  const int64_t* token_ids;  // for each row the one input that is 1, where x is null
  Element x_type;
  size_t x_stride;  // in elements
  size_t inputs;

  void* out;
  Element out_type;
  size_t out_stride;

  // In the order of rows: two that share a row are of the same rows, and follow each other.
  const LoraSegment* segments;
  size_t num_segments;
};

// A block of rows of one segment.
struct LoraJob {
  const float* x;
  size_t x_stride;
  const int64_t* token_ids;  // where x is null
  size_t rows;
  const LoraSegment* segment;
  void* out;  // of the first row
  Element out_type;
  size_t out_stride;
  float* t;          // lora_t_stride() values a row: what shrink computes and expand reads
  const char* next;  // weights that are needed after these, or null
};

constexpr size_t lora_rank_stride(size_t ranks) {
  return (ranks + kTileOutputs - 1) / kTileOutputs * kTileOutputs;
}

// Values of t of a row. In int8 its codes follow, see lora_codes.h.
constexpr size_t lora_t_stride(LoraType type, const LoraLeaf& leaf) {
  const auto ranks = static_cast<size_t>(leaf.ranks);
  const size_t codes = ranks + static_cast<size_t>(leaf.num_parts);
  return lora_rank_stride(ranks) + (type == LoraType::kInt8 ? lora_rank_stride(codes) : 0);
}

// Without a name outside its file, as Panels.
namespace {
// Where a part is cut at output n of the leaf: between tiles, at n or before.
inline size_t lora_cut(const LoraPart& part, size_t n) {
  const auto start = static_cast<size_t>(part.start);
  const auto outputs = static_cast<size_t>(part.outputs);
  if (n >= start + outputs) return outputs;
  return n <= start ? 0 : (n - start) / kTileOutputs * kTileOutputs;
}
}  // namespace

struct LoraKernel {
  void (*shrink)(const LoraJob& job);
  // Of the leaf's outputs, those between two cuts.
  void (*expand)(const LoraJob& job, size_t begin, size_t end);
};

struct LoraKernels {
  void (*widen)(const uint16_t* x, size_t count, float* out);
  LoraKernel float32;  // by the type of the weights
  LoraKernel bfloat16;
  LoraKernel int8;

  const LoraKernel& of(LoraType weights) const {
    return weights == LoraType::kFloat32    ? float32
           : weights == LoraType::kBfloat16 ? bfloat16
                                            : int8;
  }
};

LoraKernels lora_kernels_plain();
LoraKernels lora_kernels_avx2();
LoraKernels lora_kernels_avx512();

void lora(const LoraKernels& kernels, const LoraArgs& args, const ParallelFor& parallel_for);

// Of what a segment reads.
size_t lora_a_bytes(const LoraSegment& segment);
size_t lora_b_bytes(const LoraSegment& segment);
size_t lora_values(const LoraSegment& segment);  // that a row is multiplied with

// A job of rows `row` … row + rows - 1, without a segment, t or next: outputs, and inputs in fp32,
// where they are or converted to `widened` (rows * lora_widened_inputs() values).
LoraJob make_lora_job(const LoraKernels& kernels, const LoraArgs& args, size_t row, size_t rows,
                      float* widened);
size_t lora_widened_inputs(const LoraArgs& args);

// Rows of a job at most: their inputs in fp32 should stay in cache.
size_t lora_job_rows(const LoraArgs& args);

}  // namespace plait
