// Causal attention over paged K and V, for decode rows, drafts and prompt chunks alike. No torch.
// Where a step has ranges whose tokens see each other, a row's keys end after its range.
//
// Pages of one KV group: [block][layer][K, V][KV head][slot][D]; a block table leads from a
// sequence's positions to blocks. Of K and V in whole numbers a slot holds D codes, int8, and their
// scale, see kv_write.h.
//
// The order of computation. A row's keys are taken in tiles of kTileKeys, cut at absolute
// positions, and the softmax is carried from tile to tile (online). Within a tile, a score is one
// chain of fused multiply-adds over d = 0, 1, 2, …, and an output one chain over the row's own
// keys. So a row's bits depend on its query and its keys alone: not on the rows computed beside it,
// the chunk, the block ids or the threads. Only different instruction sets may differ.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "cpu_features.h"

namespace plait {

constexpr int64_t kTileKeys = 128;  // keys of one softmax step
constexpr int64_t kPanelKeys = 32;  // keys packed side by side; a multiple of every vector's lanes
constexpr int64_t kTileRows = 48;   // rows (tokens × heads of a group) computed together, about
constexpr int64_t kMicroRows = 6;   // rows of a micro-kernel, at most
constexpr int64_t kMaxVecLanes = 16;

// One call: all spans of a step against one layer. Strides count elements.
struct AttentionProblem {
  const void* query;  // [T, Hq, D]
  int64_t query_token_stride;
  int64_t query_head_stride;

  const void* pages;  // at the layer's K in block 0
  int64_t num_blocks;
  int64_t block_stride;  // from block to block
  int64_t value_offset;  // from a K to its V
  int64_t slot_stride;   // from a slot to the next one
  int64_t block_size;

  const int32_t* block_table;  // [S, B]
  int64_t block_table_stride;
  const int32_t* query_start;  // [S + 1]
  const int32_t* seq_lens;     // [S]
  int64_t num_spans;
  // [T], where each row's keys end, falling nowhere within a span; null: after its own position.
  const int32_t* key_ends;

  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;

  float scale;         // > 0
  int64_t window;      // keys a row sees, itself included; 0: all
  float softcap;       // 0: none
  const float* sinks;  // [Hq], or null

  void* out;      // [T, Hq, D], dense
  bool is_bf16;   // query and output; and pages, unless these …
  bool is_codes;  // … are codes
};

// A unit of work: tokens of one span, for one KV head and the query heads that share it.
struct AttentionItem {
  int32_t span;
  int32_t kv_head;
  int32_t first_token;  // within the span
  int32_t num_tokens;
};

// Items that wait. Threads take them one by one, each a little before it computes it, so that it
// knows what to fetch.
class AttentionQueue {
 public:
  AttentionQueue(const AttentionItem* items, size_t count) : items_(items), count_(count) {}
  const AttentionItem* take();  // null: none is left

 private:
  const AttentionItem* items_;
  size_t count_;
  std::atomic<size_t> next_{0};
};

// One kernel: a dtype on one instruction set. Computes items until none is left.
using AttentionKernel = void (*)(const AttentionProblem&, AttentionQueue&, float* scratch);

struct AttentionKernels {
  AttentionKernel float32;
  AttentionKernel bfloat16;
  AttentionKernel float32_codes;
  AttentionKernel bfloat16_codes;
};

AttentionKernels attention_kernels_plain();
AttentionKernels attention_kernels_avx2();
AttentionKernels attention_kernels_avx512();
AttentionKernels attention_kernels_avx512_bf16();
AttentionKernels attention_kernels(CpuIsa isa);

// Floats that a kernel needs at `scratch`, which is aligned to 64 bytes.
size_t attention_scratch_floats(const AttentionProblem& problem);

// Runs body(worker) for every worker in 0 … count, on as many threads as there are.
using RunWorkers = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

// Work that is worth waking another thread for: about 20 µs.
constexpr double kAttentionGrain = 400'000;

// Fills `problem.out`. The caller has checked the arguments; `num_threads` bounds the workers, each
// of which has so many multiply-adds to do at least.
void paged_attention(const AttentionProblem& problem, CpuIsa isa, int64_t num_threads,
                     const RunWorkers& run_workers, double grain = kAttentionGrain);

}  // namespace plait
