// How each kind of instruction is run. No torch in here.

#pragma once

#include <cstddef>
#include <cstdint>

#include "program_runner.h"

namespace plait {

// What an instruction read of weights, or of K and V, and computed.
struct Work {
  int64_t bytes = 0;
  int64_t operations = 0;
};

// A visitor of operations, over the registers and the step of a runner.
struct Execution {
  ProgramRunner& runner;
  Count lora{};  // of adapters, within the last instruction

  Work operator()(const LinearOp& op);
  Work operator()(const RmsNormOp& op);
  Work operator()(const LayerNormOp& op);
  Work operator()(const HeadNormOp& op);
  Work operator()(const RopeOp& op);
  Work operator()(const AttentionOp& op);
  Work operator()(const GatedActivationOp& op);
  Work operator()(const ActivationOp& op);
  Work operator()(const AddOp& op);
  Work operator()(const ScaleOp& op);
  Work operator()(const CopyOp& op);
  Work operator()(const TapOp& op);
  Work operator()(const AddEmbedsOp& op);
  Work operator()(const CallOp& op);
  Work operator()(const QuantizedLinearOp& op);

  // Books what adapters took under `count`; returns their nanoseconds.
  int64_t take_lora(Count& count);

 private:
  char* at(size_t reg) const { return runner.registers_[reg]; }
  char* at(const Columns& columns) const;
  size_t width(size_t reg) const { return runner.program_.widths[reg]; }
  size_t rows() const { return runner.step_.rows; }
  size_t values(size_t reg) const { return rows() * width(reg); }
  Element type() const { return runner.program_.type; }
  size_t value_bytes() const { return element_size(type()); }

  // Calls kernel(args, begin, end) over parts of 0 … count, each of so many values.
  template <class Args>
  void in_parts(void (*kernel)(const Args&, size_t, size_t), const Args& args, size_t count,
                size_t values_each) const;
  // Around a linear: finds what adapters change there, perhaps between its tiles, and does the
  // rest.
  Companion* begin_adapters(int64_t leaf, size_t input, size_t output);
  void finish_adapters(const Companion* companion);
  void write_kv(const AttentionOp& op) const;
  Work attention_work(const AttentionProblem& problem, const AttentionOp& op) const;
};

}  // namespace plait
