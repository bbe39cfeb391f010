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

  const DraftHead* head;  // where what comes next is wanted, else null; its embeddings are not read
  double* next;           // [num_sequences, 2], of each a token and its chance; -1: no token
};

// K and V of all rows are written. Throws std::runtime_error.
void draft_follow(ProgramRunner& runner, const DraftFollow& follow);

}  // namespace plait
