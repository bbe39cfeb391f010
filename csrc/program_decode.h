// Reads a program from the integers that encoding.py writes, and checks it. No torch in here.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "program.h"

namespace plait {

enum class ValueType : uint8_t { kFloat32, kBfloat16, kInt32, kInt64, kUint8, kOther };

// A dense tensor in memory.
struct TensorView {
  const void* data;
  ValueType type;
  std::vector<int64_t> sizes;
};

struct EncodedProgram {
  Element type;
  std::vector<int64_t> widths;
  int64_t output;
  const int64_t* code;  // instruction after instruction: kind, phase, number of fields, fields
  size_t code_size;
  std::vector<TensorView> tensors;  // that fields name by their number
  std::vector<std::string> names;   // of the instructions
};

// Throws std::runtime_error, naming the instruction, where a register, a shape or a type does not
// fit, or a register is read before it is written.
Program decode_program(const EncodedProgram& encoded);

}  // namespace plait
