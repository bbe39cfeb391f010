#include "program_runner.h"

#include <cstring>
#include <utility>

#include "checks.h"
#include "program_execution.h"

namespace plait {
namespace {

constexpr const char* kOp = "program_step";
constexpr size_t kLine = 64;

using Clock = std::chrono::steady_clock;

int64_t nanoseconds(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

}  // namespace

ProgramRunner::ProgramRunner(Program program, CpuIsa isa, size_t num_threads,
                             std::vector<int> cores, std::chrono::microseconds spin)
    : program_(std::move(program)),
      kernels_(program_kernels(isa)),
      pool_(std::make_shared<ThreadPool>(num_threads, std::move(cores), spin)),
      parallel_for_([this](size_t count, size_t grain, const Body& body) {
        pool_->parallel_for(count, grain, body);
      }),
      run_workers_([this](int64_t count, const std::function<void(int64_t)>& body) {
        pool_->run_workers(count, body);
      }),
      rope_rows_(program_.tables.size()),
      registers_(program_.widths.size(), nullptr),
      counts_(program_.num_phases + 1) {}

void ProgramRunner::reset_counts() { counts_.assign(counts_.size(), {}); }

void ProgramRunner::begin(Step step) {
  step_.rows = 0;  // nothing runs where this step is refused
  check_step(program_, step, key_ends_);
  step_ = std::move(step);
  place_registers();
  place_rope_rows();
  const size_t bytes = step_.rows * program_.widths[0] * element_size(program_.type);
  if (bytes > 0) std::memcpy(registers_[0], step_.input, bytes);
}

// One behind the other, so that a small step's registers stay in the nearest cache.
void ProgramRunner::place_registers() {
  const size_t row_bytes = step_.rows * element_size(program_.type);
  const auto lines = [&](size_t reg) {
    return (program_.widths[reg] * row_bytes + kLine - 1) / kLine * kLine;
  };
  size_t needed = 0;
  for (size_t reg = 0; reg < registers_.size(); ++reg) needed += lines(reg);
  if (needed > memory_bytes_) {
    memory_.reset();
    memory_bytes_ = 0;
    memory_.reset(static_cast<char*>(::operator new(needed, kAlignment)));
    memory_bytes_ = needed;
  }
  char* at = memory_.get();
  for (size_t reg = 0; reg < registers_.size(); at += lines(reg), ++reg) registers_[reg] = at;
  registers_[program_.output] = static_cast<char*>(step_.output);
}

void ProgramRunner::place_rope_rows() {
  for (size_t t = 0; t < rope_rows_.size(); ++t) {
    const RopeTable& table = program_.tables[t];
    RopeRows& rows = rope_rows_[t];
    if (step_.num_axes == 1) {
      rows.cos = table.cos;
      rows.sin = table.sin;
      rows.positions = step_.positions;
      continue;
    }
    const size_t size = step_.rows * table.rotary;
    rows.buffer.resize(2 * size);
    for (size_t i = 0; i < size; ++i) {
      const size_t row = i / table.rotary;
      const size_t column = i % table.rotary;
      const auto axis = static_cast<size_t>(table.axes[column]);
      const auto position = static_cast<size_t>(step_.positions[axis * step_.rows + row]);
      rows.buffer[i] = table.cos[position * table.rotary + column];
      rows.buffer[size + i] = table.sin[position * table.rotary + column];
    }
    rows.cos = rows.buffer.data();
    rows.sin = rows.buffer.data() + size;
    rows.positions = nullptr;
  }
}

void ProgramRunner::run(size_t first, size_t end) {
  check(first <= end && end <= program_.code.size(), kOp, "instructions ", first, " to ", end,
        " are not among the ", program_.code.size());
  if (step_.rows == 0) return;
  share_with_this_thread(pool_);
  pool_->wake();
  const size_t rows = row_class(step_.rows);
  Execution execution{*this};
  Clock::time_point before = Clock::now();
  for (size_t i = first; i < end; ++i) {
    const Instruction& instruction = program_.code[i];
    const Work work = std::visit(execution, instruction.operation);
    const Clock::time_point after = Clock::now();
    Count& count = counts_[instruction.phase][rows];
    ++count.calls;
    count.nanoseconds += nanoseconds(after - before) - execution.take_lora(counts_.back()[rows]);
    count.bytes += work.bytes;
    count.operations += work.operations;
    before = after;
  }
}

}  // namespace plait
