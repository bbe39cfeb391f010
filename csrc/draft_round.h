// Drafts by a head: token after token, each by one run of the head's program. No torch in here.
//
// Register 0 of the program holds the embedding of a token and, behind it, what the run before gave
// (for the first token, what the caller has). What the program gives predicts the next token. Each
// token is the likeliest one.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "draft_head.h"
#include "program_runner.h"

namespace plait {

struct DraftRound {
  size_t num_sequences;
  const void* hidden;     // [num_sequences, width of the output]
  const int64_t* starts;  // [num_sequences], where the first token's row stands
  const int64_t* depths;  // [num_sequences], how many tokens at most
  const int64_t* sure;    // [num_sequences], so many of them whatever their chances
  // [num_sequences], the first token of each and its chance, where they are known; else null
  const int64_t* first_tokens;
  const double* first_chances;
  float floor;      // the chance of all of a draft, below which it ends behind these
  StepGroup group;  // its block table has a row for each sequence; its slots are not read
  size_t most;      // columns of what follows, no less than any depth
  int64_t* tokens;  // [num_sequences, most]; -1 behind the last
  float* chances;   // the same; what the head holds each for
};

// Returns how many rows the program computed, and in how many runs. Throws std::runtime_error.
struct DraftCounts {
  int64_t runs = 0;
  int64_t rows = 0;
};
DraftCounts draft_round(ProgramRunner& runner, const DraftHead& head, const DraftRound& round);

}  // namespace plait
