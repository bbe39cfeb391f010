#include "draft_round.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "checks.h"

namespace plait {
namespace {

constexpr const char* kOp = "draft_round";

// The sequences that go on, and what their next rows are made of.
class Drafting {
 public:
  Drafting(ProgramRunner& runner, const DraftHead& head, const DraftRound& round)
      : runner_(runner),
        head_(head),
        round_(round),
        type_(runner.program().type),
        width_(runner.program().widths[runner.program().output]),
        row_bytes_(width_ * element_size(type_)),
        reached_(round.num_sequences, 1.0f) {
    const auto* first = static_cast<const char*>(round.hidden);
    hidden_.assign(first, first + round.num_sequences * row_bytes_);
    for (size_t s = 0; s < round.num_sequences; ++s) going_.push_back(s);
  }

  DraftCounts run() {
    DraftCounts counts;
    for (size_t depth = 0; !going_.empty(); ++depth) {
      choose(depth);
      keep_going(depth);
      if (going_.empty()) break;
      forward(depth);
      counts.runs += 1;
      counts.rows += static_cast<int64_t>(going_.size());
    }
    return counts;
  }

 private:
  // The next token of each, from what the last run gave.
  void choose(size_t depth) {
    if (depth == 0 && round_.first_tokens != nullptr) {
      for (const size_t s : going_) {
        take(s, depth, round_.first_tokens[s], static_cast<float>(round_.first_chances[s]));
      }
      return;
    }
    const std::vector<BestToken> found = likeliest(runner_, head_, hidden_.data(), going_.size());
    for (size_t i = 0; i < going_.size(); ++i) {
      const bool is_token = std::isfinite(found[i].chance);
      take(going_[i], depth, is_token ? static_cast<int64_t>(found[i].index) : -1,
           is_token ? found[i].chance : 0.0f);
    }
  }

  void take(size_t s, size_t depth, int64_t token, float chance) {
    const size_t place = s * round_.most + depth;
    round_.tokens[place] = token;
    round_.chances[place] = chance;
    reached_[s] *= chance;
  }

  // Whoever has its last token leaves; the rows of the others move up.
  void keep_going(size_t depth) {
    size_t kept = 0;
    for (size_t i = 0; i < going_.size(); ++i) {
      const size_t s = going_[i];
      const int64_t count = static_cast<int64_t>(depth) + 1;
      const bool is_last =
          count >= round_.depths[s] || (count >= round_.sure[s] && reached_[s] < round_.floor);
      if (is_last || round_.tokens[s * round_.most + depth] < 0) continue;
      if (kept != i) {
        std::memcpy(hidden_.data() + kept * row_bytes_, hidden_.data() + i * row_bytes_,
                    row_bytes_);
      }
      going_[kept++] = s;
    }
    going_.resize(kept);
  }

  // One row for each, with the token that it was given last.
  void forward(size_t depth) {
    const size_t rows = going_.size();
    const StepGroup& group = round_.group;
    input_.resize(rows * 2 * row_bytes_);
    positions_.resize(rows);
    slots_.resize(rows);
    lengths_.resize(rows);
    starts_.resize(rows + 1);
    table_.resize(rows * static_cast<size_t>(group.table_blocks));
    for (size_t i = 0; i < rows; ++i) {
      const size_t s = going_[i];
      const int64_t token = round_.tokens[s * round_.most + depth];
      char* const input = input_.data() + i * 2 * row_bytes_;
      std::memcpy(
          input,
          static_cast<const char*>(head_.embeddings) + static_cast<size_t>(token) * row_bytes_,
          row_bytes_);
      std::memcpy(input + row_bytes_, hidden_.data() + i * row_bytes_, row_bytes_);
      const int64_t position = round_.starts[s] + static_cast<int64_t>(depth);
      const int32_t* const blocks =
          group.block_table + static_cast<int64_t>(s) * group.table_stride;
      check(position >= 0 && position / group.block_size < group.table_blocks, kOp, "position ",
            position, " lies beyond ", group.table_blocks, " blocks");
      positions_[i] = position;
      slots_[i] =
          blocks[position / group.block_size] * group.block_size + position % group.block_size;
      lengths_[i] = static_cast<int32_t>(position + 1);
      starts_[i] = static_cast<int32_t>(i);
      std::copy_n(blocks, group.table_blocks,
                  table_.begin() + static_cast<ptrdiff_t>(i) * group.table_blocks);
    }
    starts_[rows] = static_cast<int32_t>(rows);
    Step step;
    step.rows = rows;
    step.input = input_.data();
    step.output = hidden_.data();
    step.positions = positions_.data();
    step.query_start = starts_.data();
    step.seq_lens = lengths_.data();
    step.num_spans = static_cast<int64_t>(rows);
    step.groups = {group};
    step.groups[0].slots = slots_.data();
    step.groups[0].block_table = table_.data();
    step.groups[0].table_stride = group.table_blocks;
    runner_.begin(std::move(step));
    runner_.run(0, runner_.program().code.size());
  }

  ProgramRunner& runner_;
  const DraftHead& head_;
  const DraftRound& round_;
  Element type_;
  size_t width_;
  size_t row_bytes_;
  std::vector<size_t> going_;
  std::vector<float> reached_;  // the chance of all tokens so far
  std::vector<char> hidden_;    // [going, width]
  std::vector<char> input_;
  std::vector<int64_t> positions_;
  std::vector<int64_t> slots_;
  std::vector<int32_t> lengths_;
  std::vector<int32_t> starts_;
  std::vector<int32_t> table_;
};

}  // namespace

DraftCounts draft_round(ProgramRunner& runner, const DraftHead& head, const DraftRound& round) {
  const Program& program = runner.program();
  check(program.widths[0] == 2 * program.widths[program.output], kOp, "the program takes ",
        program.widths[0], " columns, not twice the ", program.widths[program.output],
        " that it gives");
  return Drafting(runner, head, round).run();
}

}  // namespace plait
