// What each kind of instruction took. No torch in here.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace plait {

struct Count {
  int64_t calls = 0;
  int64_t nanoseconds = 0;
  int64_t bytes = 0;       // of weights, or of K and V
  int64_t operations = 0;  // two for a multiply-add
};

// Steps are told apart by their rows: 1, to 8, to 32, more; a step's time is bound by other things
// in each.
constexpr size_t kRowClasses = 4;
constexpr size_t row_class(size_t rows) {
  return rows <= 1 ? 0 : rows <= 8 ? 1 : rows <= 32 ? 2 : 3;
}

using PhaseCounts = std::array<Count, kRowClasses>;

}  // namespace plait
