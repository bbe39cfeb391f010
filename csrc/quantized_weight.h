// Quantised weights as kernels read them, and rows quantised to match. No torch in here.
//
//   weight[n][k] = scale[n][k / group] * code[n][k] + min[n][k / group]
//
// Outputs are cut into tiles of 16, and a weight is its tiles one after the other:
//
//   unit     a header, then codes; the last one may have fewer codes
//   header   of a group: [scale[16], min[16]] as fp16 or fp32; the minimums are left out where each
//            is -zero_point * scale. Or (K-quants) in two levels, of a block of 256 inputs:
//            [factor[16], min factor[16]] as fp16, then [groups][16, 16] as int8, each to be
//            multiplied with the factor. A unit has one of them, or two where one is half a line
//            too long: so codes begin with a line. One scale an output is a single unit.
//   codes    lines of 64 bytes, [16 outputs][4 inputs], the way the dot instructions take them.
//            8 bits: a line is a step of 4 inputs. 4 bits: a line is two steps, the first one in
//            the low halves of its bytes.
//
// So all that a row needs of a tile is read in order, line by line.
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
  bool has_factors() const { return scales == ScaleType::kTwoLevels; }
  size_t factor_bytes() const { return has_factors() ? kQuantTileOutputs * 2 * planes() : 0; }

  // What a header is for, and what it takes.
  size_t span_inputs() const {
    return group == 0 ? padded_inputs() : has_factors() ? kBlockInputs : group;
  }
  size_t span_bytes() const {
    return factor_bytes() + (has_factors() ? kBlockInputs / group : 1) * group_header_bytes();
  }
  size_t unit_spans() const { return group != 0 && span_bytes() % kQuantLineBytes != 0 ? 2 : 1; }
  size_t unit_inputs() const { return unit_spans() * span_inputs(); }
  size_t unit_groups() const { return group == 0 ? 1 : unit_inputs() / group; }
  size_t units() const { return (padded_inputs() + unit_inputs() - 1) / unit_inputs(); }
  size_t unit_header_bytes() const {
    const size_t bytes = unit_spans() * span_bytes();
    return (bytes + kQuantLineBytes - 1) / kQuantLineBytes * kQuantLineBytes;
  }
  size_t code_bytes(size_t inputs) const {
    return kQuantTileOutputs * inputs * (bits == 4 ? 1 : 2) / 2;
  }
  size_t tile_bytes() const { return units() * unit_header_bytes() + code_bytes(padded_inputs()); }

  // Where in a tile all that is for an input begins, and for those after it: the first one of a
  // unit, or of a line where an output has one scale, or one behind the last.
  size_t begin_at(size_t input) const {
    if (input >= padded_inputs()) return tile_bytes();
    return group == 0 && input > 0 ? codes_at(input) : span_at(input);
  }
  // Where in a tile there are the header of an input's group or block, its group's part of that,
  // and its line of codes.
  size_t span_at(size_t input) const {
    const size_t unit = input / unit_inputs();
    return unit * (unit_header_bytes() + code_bytes(unit_inputs())) +
           input % unit_inputs() / span_inputs() * span_bytes();
  }
  size_t group_at(size_t input) const {
    const size_t in_span = has_factors() ? input % kBlockInputs / group : 0;
    return span_at(input) + factor_bytes() + in_span * group_header_bytes();
  }
  size_t codes_at(size_t input) const {
    const size_t line_inputs = bits == 4 ? 2 * kStepInputs : kStepInputs;
    return (input / unit_inputs() + 1) * unit_header_bytes() +
           input / line_inputs * kQuantLineBytes;
  }
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
