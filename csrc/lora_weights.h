// What shrink and expand share: sizes of tiles and panels, and how weights are loaded. Everything
// here has internal linkage, see vec.h.

#pragma once

#include "lora.h"
#include "vec.h"

namespace plait {
namespace {

#define PLAIT_INLINE inline __attribute__((always_inline))

// Vectors in a tile's step, the sums that fit in registers beside weights, and the rows of a panel.
template <class V>
constexpr int kTileVecs = static_cast<int>(kTileOutputs / V::kLanes);
template <class V>
constexpr int kMaxSums = V::kRegisters == 32 ? 24 : 12;
template <class V>
constexpr int kMaxPanelRows = kMaxSums<V> / kTileVecs<V> < 6 ? kMaxSums<V> / kTileVecs<V> : 6;

// The most of 4, 2, 1 groups of so many sums that fit.
template <class V>
constexpr int groups_that_fit(int sums) {
  return 4 * sums <= kMaxSums<V> ? 4 : 2 * sums <= kMaxSums<V> ? 2 : 1;
}

// A row alone reads its weights from memory: they are fetched so many bytes ahead.
constexpr size_t kFetchAhead = 1024;

template <size_t kBytes>
PLAIT_INLINE void fetch(const char* from) {
  PLAIT_UNROLL
  for (size_t i = 0; i < kBytes; i += 64) __builtin_prefetch(from + i, 0, 3);
}

// What one load brings: a vector of values, or of pairs whose second is the next input's.
template <class V>
struct Singles {
  using W = float;
  using Raw = typename V::F;
  static constexpr int kTogether = 1;
  static constexpr bool kHasCodes = false;

  static PLAIT_INLINE Raw load(const W* p) { return V::load(p); }
  template <int kWhich>
  static PLAIT_INLINE typename V::F value(Raw raw) {
    return raw;
  }
};
template <class V>
struct Pairs {
  using W = uint16_t;
  using Raw = typename V::Bits;
  static constexpr int kTogether = 2;
  static constexpr bool kHasCodes = false;

  static PLAIT_INLINE Raw load(const W* p) { return V::load_pairs(p); }
  template <int kWhich>
  static PLAIT_INLINE typename V::F value(Raw raw) {
    return kWhich == 0 ? V::first_of_pairs(raw) : V::second_of_pairs(raw);
  }
};

// Where vector v of a tile's step begins, in elements: a step is all inputs of one load.
template <class V, class Weights>
constexpr size_t vector_in_step(int v) {
  return static_cast<size_t>(v) * V::kLanes * Weights::kTogether;
}

// Adds products with a value of each row, which are x_stride apart.
template <class V, int kRows, int kVecs>
PLAIT_INLINE void multiply_add(typename V::F (&sums)[kRows][kVecs], const float* x, size_t x_stride,
                               const typename V::F (&w)[kVecs]) {
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const typename V::F value = V::broadcast(x[static_cast<size_t>(r) * x_stride]);
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = V::fma(value, w[v], sums[r][v]);
  }
}

constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// Calls body.template run<rows>() for a number of rows known when compiling.
template <class V, int kRows, class Body>
PLAIT_INLINE void for_rows(size_t rows, const Body& body) {
  if constexpr (kRows > 1) {
    if (rows < static_cast<size_t>(kRows)) {
      for_rows<V, kRows - 1>(rows, body);
      return;
    }
  }
  body.template run<kRows>();
}

// Calls body(row, rows) for each panel. A row alone is frequent, and dividing takes as long as some
// of its work.
template <class V, class Body>
PLAIT_INLINE void for_panels(size_t rows, const Body& body) {
  if (rows == 1) return body(size_t{0}, size_t{1});
  const Panels panels(rows, kMaxPanelRows<V>);
  for (size_t p = 0; p < panels.count; ++p) body(panels.first_row(p), panels.height(p));
}

}  // namespace
}  // namespace plait
