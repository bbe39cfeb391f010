// Work that takes turns with a linear layer's tiles, and the memory that it reads. A layer over
// many rows waits for arithmetic, work over one row each for memory: so the layer's kernels fetch
// what the other will read after the next tiles, and it finds that in a near cache.

#pragma once

#include <cstddef>

namespace plait {

struct FetchRange {
  const char* begin;
  const char* end;
};

// What to fetch, in this order. Kernels take it step by step.
struct FetchList {
  FetchRange* ranges = nullptr;
  size_t count = 0;
  size_t bytes = 0;       // of all ranges, when the list was made
  size_t most_bytes = 0;  // that a kernel fetches in one of its steps
};

class Companion {
 public:
  virtual ~Companion() = default;

  // What to fetch during the next group of tiles, where so many are left, it included.
  virtual FetchList& ahead(size_t groups_left) = 0;
  // The first `outputs` outputs of all rows are there.
  virtual void advance(size_t outputs) = 0;
};

// Without a name outside its file, as Panels.
namespace {

// Where a kernel of some steps fetches from, and the bytes it goes on by in each.
struct FetchSteps {
  const char* from;
  size_t step_bytes;
};

inline FetchSteps take_fetch(FetchList& list, size_t steps) {
  if (list.count == 0) return {nullptr, 0};
  FetchRange& range = *list.ranges;
  const auto left = static_cast<size_t>(range.end - range.begin);
  const size_t lines = (left + 64 * steps - 1) / (64 * steps);
  const FetchSteps taken{range.begin, 64 * lines < list.most_bytes ? 64 * lines : list.most_bytes};
  if (taken.step_bytes * steps >= left) {
    ++list.ranges;
    --list.count;
  } else {
    range.begin += taken.step_bytes * steps;
  }
  return taken;
}

}  // namespace
}  // namespace plait
