// The table of a step's adapters: which rows have which weights. No torch in here.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lora.h"

namespace plait {

constexpr int64_t kLoraSegmentFields = 8;

// Rows [num_segments, kLoraSegmentFields] of int64: start, end, address of the weights, address of
// the adapter's table, leaves in it, values in it, type (of LoraType), scale (bits of a
// double).
struct LoraTable {
  const int64_t* rows;
  int64_t num_segments;
};

// Fills `found` with the segments that change `leaf`. Throws std::runtime_error where the table
// does not fit the step's rows or the leaf's sizes; inputs < 0 fit any.
void find_lora_segments(const LoraTable& table, int64_t leaf, int64_t num_rows, int64_t inputs,
                        int64_t outputs, std::vector<LoraSegment>& found);

}  // namespace plait
