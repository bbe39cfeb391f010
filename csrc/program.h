// A decoder as a list of instructions over registers of rows, ready to be run. No torch in here.
//
// platform/model/native/instructions.py tells what each instruction means; encoding.py writes them
// as integers, which program_decode.h reads and checks. Weights belong to whoever made the program.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "element.h"
#include "gated_activation.h"
#include "quantized_weight.h"

namespace plait {

// Columns of a register from `start` on, as heads that begin `stride` columns apart.
struct Columns {
  size_t reg;
  size_t start;
  size_t num_heads;
  size_t head_size;
  size_t stride;

  size_t width() const { return (num_heads - 1) * stride + head_size; }
};

// A dense vector of a known length, or none.
struct Vector {
  const void* data = nullptr;
  Element type = Element::kFloat32;
};

struct LinearOp {
  size_t output;
  size_t input;
  const void* weight;  // of the registers' type, see linear.h
  size_t weight_bytes;
  size_t in_features;
  size_t out_features;
  Vector bias;
  int64_t leaf;  // among those that adapters change; negative: they cannot
};

struct QuantizedLinearOp {
  size_t output;
  size_t input;
  QuantizedWeight weight;
  Vector bias;
  int64_t leaf;
};

struct RmsNormOp {
  size_t output;
  size_t input;
  Vector weight;
  float eps;
  float weight_offset;
  bool round_first;
};

struct LayerNormOp {
  size_t output;
  size_t input;
  Vector weight;
  Vector bias;
  float eps;
};

struct HeadNormOp {
  Columns heads;
  Vector weight;
  float eps;
  float weight_offset;
  bool round_first;
};

struct RopeTable {
  const float* cos;  // [num_positions, rotary]
  const float* sin;
  const int32_t* axes;  // [rotary], which of three positions a column goes by; or null
  size_t num_positions;
  size_t rotary;
};

struct RopeOp {
  Columns heads;
  size_t table;
  bool is_interleaved;
  bool round_products;
};

struct AttentionOp {
  size_t output;
  Columns query;
  Columns key;
  Columns value;
  size_t group;
  int64_t layer;
  float scale;
  int64_t window;  // 0: all
  float softcap;   // 0: none
  const float* sinks;
};

struct GatedActivationOp {
  size_t output;
  size_t input;
  Activation activation;
};

struct ActivationOp {
  size_t output;
  size_t input;
  Activation activation;
};

struct AddOp {
  size_t output;
  size_t input;
  float scale;
};

struct ScaleOp {
  size_t output;
  float scale;
};

struct CopyOp {
  size_t output;
  size_t input;
  size_t start;  // the first column of the input that is copied
};

struct TapOp {
  size_t input;
  int64_t layer;
};

struct AddEmbedsOp {
  size_t output;
  size_t level;
};

// What somebody else computes between two runs.
struct CallOp {
  size_t output;
  size_t input;
};

using Operation = std::variant<LinearOp, RmsNormOp, LayerNormOp, HeadNormOp, RopeOp, AttentionOp,
                               GatedActivationOp, ActivationOp, AddOp, ScaleOp, CopyOp, TapOp,
                               AddEmbedsOp, CallOp, QuantizedLinearOp>;

struct Instruction {
  Operation operation;
  size_t phase;  // the counter it is booked under
  std::string name;
};

struct Program {
  Element type;  // of the registers
  std::vector<size_t> widths;
  size_t output;
  std::vector<Instruction> code;
  std::vector<RopeTable> tables;
  size_t num_phases;  // of instructions; adapters are booked under one more
  size_t num_groups;  // of KV that attention goes by
  size_t num_levels;  // of image embeddings, the first included
};

// "instruction 12 (layers.3.qkv_proj)"
std::string place_of(const Program& program, size_t index);

}  // namespace plait
