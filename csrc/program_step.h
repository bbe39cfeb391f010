// What a program is given in a step, and whether it fits. No torch in here.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kv_write.h"
#include "lora_segments.h"
#include "paged_attention.h"
#include "program.h"

namespace plait {

// One KV group's pages, of the registers' type or codes, and where this step's rows lie in them.
struct StepGroup {
  char* pages;  // [num_blocks, num_layers, 2, num_kv_heads, block_size, head_size]
  int64_t num_blocks;
  int64_t num_layers;
  int64_t num_kv_heads;
  int64_t block_size;
  int64_t head_size;

  const int64_t* slots;        // [rows]
  const int32_t* block_table;  // [num_spans, table_blocks], rows table_stride apart
  int64_t table_blocks;
  int64_t table_stride;

  bool is_codes = false;  // the pages hold these, int8

  // Bytes of a code, or of a value of the registers' type.
  int64_t stored_bytes(Element type) const {
    return is_codes ? 1 : static_cast<int64_t>(element_size(type));
  }
  int64_t slot_size() const { return is_codes ? head_size + kKvScaleBytes : head_size; }
  int64_t half() const { return num_kv_heads * block_size * slot_size(); }  // K or V of a layer
  int64_t block_stride() const { return num_layers * 2 * half(); }
};

struct Step {
  size_t rows = 0;
  const void* input = nullptr;  // [rows, width of register 0]
  void* output = nullptr;       // [rows, width of the output]

  const int64_t* positions = nullptr;  // [num_axes, rows]
  size_t num_axes = 1;                 // or 3

  const int32_t* query_start = nullptr;  // [num_spans + 1]
  const int32_t* seq_lens = nullptr;     // [num_spans]
  int64_t num_spans = 0;
  std::vector<StepGroup> groups;
  const int32_t* ranges = nullptr;  // [num_ranges, 3], see attention_checks.h
  int64_t num_ranges = 0;

  LoraTable lora{nullptr, 0};

  const char* embeds = nullptr;  // [num_image_rows, num_levels * width], rows embeds_stride apart
  size_t embeds_stride = 0;      // in elements
  size_t num_levels = 0;
  const int64_t* image_rows = nullptr;  // [num_image_rows], ascending
  size_t num_image_rows = 0;

  std::vector<int64_t> taps;
  void* tapped = nullptr;  // [rows, taps, width of the output]
};

// What an attention instruction takes of the step; the query, the output and the layer are its own.
AttentionProblem attention_problem(const Program& program, const AttentionOp& op, const Step& step);

// Throws std::runtime_error where the step does not fit the program, or itself. `key_ends` is
// filled where there are ranges.
void check_step(const Program& program, const Step& step, std::vector<int32_t>& key_ends);

}  // namespace plait
