// What a call of paged attention must be given, checked before a kernel follows any of it. No
// torch.

#pragma once

#include <cstdint>
#include <vector>

#include "paged_attention.h"

namespace plait {

// Throws std::runtime_error, in the name of `op`, where spans do not cover the rows or a block that
// some row sees is not one of the pages. `table_blocks` is the width of a block table's row.
void check_spans(const AttentionProblem& problem, int64_t num_rows, int64_t table_blocks,
                 const char* op);

// Where each row's keys end: after the range that it is in, else after its own position. `ranges`
// [num_ranges, 3] are (span, start, end), checked as they are read. Spans have been checked.
void find_key_ends(const AttentionProblem& problem, const int32_t* ranges, int64_t num_ranges,
                   const char* op, std::vector<int32_t>& ends);

}  // namespace plait
