#include "attention_checks.h"

#include <algorithm>

#include "checks.h"

namespace plait {

void check_spans(const AttentionProblem& p, int64_t num_rows, int64_t table_blocks,
                 const char* op) {
  check(p.query_start[0] == 0 && p.query_start[p.num_spans] == num_rows, op,
        "query_start must lead from 0 to the ", num_rows, " rows of query");
  for (int64_t s = 0; s < p.num_spans; ++s) {
    const int64_t rows = p.query_start[s + 1] - p.query_start[s];
    check(rows >= 0, op, "query_start falls at span ", s);
    if (rows == 0) continue;
    const int64_t length = p.seq_lens[s];
    check(length >= rows, op, "span ", s, " has ", rows, " rows, but seq_lens says ", length);
    const int64_t end_block = (length + p.block_size - 1) / p.block_size;
    check(end_block <= table_blocks, op, "span ", s, " of length ", length, " needs ", end_block,
          " blocks, block_table has ", table_blocks);
    const int64_t first_key =
        p.window == 0 ? 0 : std::max<int64_t>(0, length - rows - p.window + 1);
    const int32_t* const blocks = p.block_table + s * p.block_table_stride;
    for (int64_t i = first_key / p.block_size; i < end_block; ++i) {
      check(blocks[i] > 0 && blocks[i] < p.num_blocks, op, "span ", s, " sees block ", blocks[i],
            " at place ", i, " of its table; blocks are 1 to ", p.num_blocks - 1,
            ", and 0 is the null block");
    }
  }
}

void find_key_ends(const AttentionProblem& p, const int32_t* range, int64_t num_ranges,
                   const char* op, std::vector<int32_t>& ends) {
  ends.resize(static_cast<size_t>(p.query_start[p.num_spans]));
  for (int64_t s = 0; s < p.num_spans; ++s) {
    const int32_t past = p.seq_lens[s] - p.query_start[s + 1];  // from a row to its position
    for (int32_t row = p.query_start[s]; row < p.query_start[s + 1]; ++row) {
      ends[static_cast<size_t>(row)] = row + past + 1;
    }
  }
  int32_t last_span = -1;
  int32_t last_end = 0;
  for (int64_t i = 0; i < num_ranges; ++i) {
    const int32_t span = range[3 * i], start = range[3 * i + 1], end = range[3 * i + 2];
    check(span >= last_span && span >= 0 && span < p.num_spans, op, "range ", i, " is of span ",
          span, " of ", p.num_spans, ", or out of order");
    check(start < end && start >= (span == last_span ? last_end : 0) && end <= p.seq_lens[span], op,
          "range ", i, ", ", start, " to ", end, ", must lie apart from the one before it and ",
          "within the ", p.seq_lens[span], " tokens of its span");
    const int32_t past = p.seq_lens[span] - p.query_start[span + 1];
    for (int32_t row = std::max(p.query_start[span], start - past);
         row < p.query_start[span + 1] && row + past < end; ++row) {
      ends[static_cast<size_t>(row)] = end;
    }
    last_span = span;
    last_end = end;
  }
}

}  // namespace plait
