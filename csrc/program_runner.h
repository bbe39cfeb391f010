// Runs a program on a step's rows: registers, threads and counters that stay from step to step. No
// torch in here.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "lora_weave.h"
#include "program.h"
#include "program_counters.h"
#include "program_kernels.h"
#include "program_step.h"
#include "thread_pool.h"

namespace plait {

class ProgramRunner {
 public:
  // Uses the kernels of `isa`. Throws as ThreadPool does.
  ProgramRunner(Program program, CpuIsa isa, size_t num_threads, std::vector<int> cores,
                std::chrono::microseconds spin);

  const Program& program() const { return program_; }
  const ProgramKernels& kernels() const { return kernels_; }
  const ParallelFor& parallel_for() const { return parallel_for_; }

  // Checks the step and puts its rows into register 0. What `step` points at must stay until the
  // last instruction has run, or another step begins. Throws std::runtime_error.
  void begin(Step step);

  // Runs instructions first … end of the step, none of them a call. Throws std::runtime_error.
  void run(size_t first, size_t end);

  size_t rows() const { return step_.rows; }
  char* register_data(size_t reg) { return registers_[reg]; }

  // By phase; that of adapters is the last.
  const std::vector<PhaseCounts>& counts() const { return counts_; }
  void reset_counts();

 private:
  friend struct Execution;

  void place_registers();
  void place_rope_rows();

  // Where rope of this step finds the rows of a table.
  struct RopeRows {
    const float* cos;
    const float* sin;
    const int64_t* positions;  // null: a row of its own for each
    std::vector<float> buffer;
  };

  struct Free {
    void operator()(char* p) const { ::operator delete(p, kAlignment); }
  };
  static constexpr std::align_val_t kAlignment{64};

  Program program_;
  ProgramKernels kernels_;
  std::shared_ptr<ThreadPool> pool_;
  ParallelFor parallel_for_;
  RunWorkers run_workers_;

  Step step_;
  std::vector<int32_t> key_ends_;
  std::vector<RopeRows> rope_rows_;
  std::unique_ptr<char, Free> memory_;
  size_t memory_bytes_ = 0;
  std::vector<char*> registers_;
  std::vector<char> wide_heads_;       // attention whose values are narrower than its keys
  std::vector<LoraSegment> segments_;  // of the linear at hand
  LoraArgs lora_{};
  LoraWeave weave_;
  std::vector<PhaseCounts> counts_;
};

}  // namespace plait
