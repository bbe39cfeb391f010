// Quantised weights as kernels read them, and rows quantised to match. No torch in here.
//
//   weight[n][k] = scale[n][k / group] * code[n][k] + min[n][k / group]
//
// Outputs are cut into tiles of 16, and a weight is its tiles one after the other:
//
//   header   [groups][scale[16], min[16]] as fp16 or fp32, padded to whole lines of 64 bytes; the
//            minimums are left out where each is -zero_point * scale. Or (K-quants) in two levels:
//            [blocks of 256 inputs][factor[16], min factor[16]] as fp16, then [groups][16, 16] as
//            int8, each to be multiplied with the factor of its block
//   codes    lines of 64 bytes, [16 outputs][4 inputs], the way the dot instructions take them.
//            8 bits: a line is a step of 4 inputs. 4 bits: a line is two steps, the first one in
//            the low halves of its bytes.
//
// Inputs are padded with zero codes to whole groups (to whole row groups where an output has one
// scale), outputs to whole tiles. The layout is the same for every instruction set.

#pragma once

#include <cstddef>
#include <cstdint>

namespace plait {

constexpr size_t kQuantTileOutputs = 16;
constexpr size_t kQuantLineBytes = 64;
constexpr size_t kStepInputs = 4;
constexpr size_t kRowGroup = 32;  // inputs of a row that share a scale, at most

constexpr size_t kBlockInputs = 256;  // that share factors of scales

// Of 4-bit codes, where minimums are not stored: sixteen products with codes about it fit in int16.
constexpr int kMostPairZeroPoint = 16;

enum class ScaleType : uint8_t { kHalf, kFloat, kTwoLevels };

struct QuantizedWeight {
  const uint8_t* blob;
  size_t out_features;
  size_t in_features;
  size_t group;    // 16, 32, 64 or 128 inputs; 0: one scale an output
  int bits;        // 4 or 8
  int zero_point;  // where minimums are not stored; of 4 bits at most kMostPairZeroPoint
  bool has_mins;   // they are stored
  ScaleType scales;
  bool exact;  // rows stay as they are, else they are quantised

  size_t tiles() const { return (out_features + kQuantTileOutputs - 1) / kQuantTileOutputs; }
  // Inputs of a row that share a scale: a part of a group, or a group.
  size_t row_group() const { return group != 0 && group < kRowGroup ? group : kRowGroup; }
  size_t padded_inputs() const {
    const size_t unit = group == 0 ? kRowGroup : group;
    return (in_features + unit - 1) / unit * unit;
  }
  size_t groups() const { return group == 0 ? 1 : (in_features + group - 1) / group; }
  size_t row_groups() const { return padded_inputs() / row_group(); }
  size_t planes() const { return has_mins ? 2 : 1; }
  size_t plane_bytes() const {
    const size_t size = scales == ScaleType::kFloat ? 4 : scales == ScaleType::kHalf ? 2 : 1;
    return kQuantTileOutputs * size;
  }
  size_t group_header_bytes() const { return plane_bytes() * planes(); }
  // Of a block's factors, and of all of them, which come first.
  size_t block_header_bytes() const { return kQuantTileOutputs * 2 * planes(); }
  size_t factor_bytes() const {
    if (scales != ScaleType::kTwoLevels) return 0;
    return (padded_inputs() + kBlockInputs - 1) / kBlockInputs * block_header_bytes();
  }
  size_t header_bytes() const {
    const size_t bytes = factor_bytes() + groups() * group_header_bytes();
    return (bytes + kQuantLineBytes - 1) / kQuantLineBytes * kQuantLineBytes;
  }
  size_t code_bytes() const {
    return kQuantTileOutputs * padded_inputs() * (bits == 4 ? 1 : 2) / 2;
  }
  size_t tile_bytes() const { return header_bytes() + code_bytes(); }
};

// Rows rounded to whole numbers: x[k] is about scale[k / row_group] * code[k]. They serve every
// weight of the same in_features, padded_inputs and row_group.
struct QuantizedRows {
  const int8_t* codes;  // [rows][padded_inputs], -127 … 127, zeros at the end
  const float* scales;  // [rows][row_groups]
  const int32_t* sums;  // [rows][row_groups], of codes
  size_t rows;
  size_t row_bytes;  // = padded_inputs
  size_t row_groups;
};

}  // namespace plait
