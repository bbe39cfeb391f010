#include "draft_follow.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "checks.h"

namespace plait {
namespace {

constexpr const char* kOp = "draft_follow";

class Following {
 public:
  Following(ProgramRunner& runner, const DraftFollow& follow)
      : runner_(runner),
        follow_(follow),
        type_(runner.program().type),
        width_(runner.program().widths[runner.program().output]),
        row_bytes_(width_ * element_size(type_)) {}

  void run() {
    place();
    const size_t rows = positions_.size();
    if (rows == 0) return;
    embed();
    fuse();
    std::vector<char> output(rows * row_bytes_);
    Step step;
    step.rows = rows;
    step.input = input_.data();
    step.output = output.data();
    step.positions = positions_.data();
    step.query_start = ends_.data();
    step.seq_lens = lengths_.data();
    step.num_spans = static_cast<int64_t>(follow_.num_sequences);
    step.groups = {follow_.group};
    step.groups[0].slots = slots_.data();
    runner_.begin(std::move(step));
    runner_.run(0, runner_.program().code.size());
    auto* const hidden = static_cast<char*>(follow_.hidden);
    for (size_t s = 0; s < follow_.num_sequences; ++s) {
      const auto last = static_cast<size_t>(ends_[s + 1] - 1);
      std::memcpy(hidden + s * row_bytes_, output.data() + last * row_bytes_, row_bytes_);
    }
    if (follow_.head == nullptr) return;
    const std::vector<BestToken> found =
        likeliest(runner_, *follow_.head, hidden, follow_.num_sequences);
    for (size_t s = 0; s < found.size(); ++s) {
      const bool is_token = std::isfinite(found[s].chance);
      follow_.next[2 * s] = is_token ? static_cast<double>(found[s].index) : -1.0;
      follow_.next[2 * s + 1] = is_token ? static_cast<double>(found[s].chance) : 0.0;
    }
  }

 private:
  // Where the rows stand, and where their K and V go.
  void place() {
    const StepGroup& group = follow_.group;
    ends_.push_back(0);
    for (size_t s = 0; s < follow_.num_sequences; ++s) {
      const int64_t start = follow_.starts[s];
      const int64_t end = start + follow_.counts[s];
      check(start >= 0 && end > start, kOp, "sequence ", s, " has no rows");
      check(end <= group.table_blocks * group.block_size, kOp, "position ", end - 1,
            " lies beyond ", group.table_blocks, " blocks");
      const int32_t* const blocks =
          group.block_table + static_cast<int64_t>(s) * group.table_stride;
      for (int64_t at = start; at < end; ++at) {
        positions_.push_back(at);
        slots_.push_back(blocks[at / group.block_size] * group.block_size + at % group.block_size);
      }
      ends_.push_back(static_cast<int32_t>(positions_.size()));
      lengths_.push_back(static_cast<int32_t>(end));
    }
  }

  void embed() {
    const size_t rows = positions_.size();
    input_.resize(rows * 2 * row_bytes_);
    const auto* const embeddings = static_cast<const char*>(follow_.embeddings);
    for (size_t i = 0; i < rows; ++i) {
      const auto token = static_cast<size_t>(follow_.tokens[i]);
      check(token < follow_.num_embeddings, kOp, "token ", follow_.tokens[i], " is not among ",
            follow_.num_embeddings);
      std::memcpy(input_.data() + i * 2 * row_bytes_, embeddings + token * row_bytes_, row_bytes_);
    }
  }

  void fuse() {
    const size_t rows = positions_.size();
    const void* taps = follow_.taps;
    std::vector<char> normed;
    if (follow_.norm.data != nullptr) {
      const size_t size = follow_.fusing.in_features;
      normed.resize(rows * size * element_size(type_));
      norm_rows(runner_, follow_.norm, follow_.eps, size, taps, rows, normed.data());
      taps = normed.data();
    }
    multiply(runner_, follow_.fusing, taps, rows, input_.data() + row_bytes_, 2 * width_, type_);
  }

  ProgramRunner& runner_;
  const DraftFollow& follow_;
  Element type_;
  size_t width_;
  size_t row_bytes_;
  std::vector<int64_t> positions_;
  std::vector<int64_t> slots_;
  std::vector<int32_t> ends_;
  std::vector<int32_t> lengths_;
  std::vector<char> input_;
};

}  // namespace

void draft_follow(ProgramRunner& runner, const DraftFollow& follow) {
  const Program& program = runner.program();
  const size_t width = program.widths[program.output];
  check(program.widths[0] == 2 * width && follow.fusing.out_features == width, kOp,
        "the program takes ", program.widths[0], " columns, not twice the ", width,
        " that taps become");
  Following(runner, follow).run();
}

}  // namespace plait
