// A head goes along with its target: rows of what that has between its layers, through the head's
// program. No torch in here.
//
// Register 0 of the program holds the embedding of a token and, behind it, what is made of the
// taps.

#pragma once

#include <cstddef>

#include "draft_head.h"
#include "program_runner.h"

namespace plait {

// Rows of some sequences, those of one behind the other.
struct DraftFollow {
  size_t num_sequences;
  const int64_t* starts;  // [num_sequences], where the first row of each stands
  const int64_t* counts;  // [num_sequences], its rows, at least one
  StepGroup group;        // its block table has a row for each sequence; its slots are not read

  const void* taps;        // [rows, fusing.in_features], of the registers' type
  const int64_t* tokens;   // [rows], behind each row, as rows of the embeddings
  const void* embeddings;  // [num_embeddings, width of the output]
  size_t num_embeddings;
  Vector norm;  // of the taps, or none
  float eps;
  DraftMatrix fusing;  // of taps into rows of the output's width
  void* hidden;        // [num_sequences, width of the output]: what the last row of each gave

  // What each hidden row says comes next, where that is wanted; -1: nothing.
  const DraftHead* head;  // or null; its embeddings are not read
  int64_t* next_tokens;   // [num_sequences]
  float* next_chances;
};

// K and V of all rows are written. Throws std::runtime_error.
void draft_follow(ProgramRunner& runner, const DraftFollow& follow);

}  // namespace plait
