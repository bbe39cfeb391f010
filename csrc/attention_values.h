// The other half of attention: values, weighted by what the softmax made of scores, into sums. A
// sum is one chain over its row's keys, whichever rows and places of the head are beside it.

#pragma once

#include "attention_math.h"
#include "attention_pieces.h"
#include "paged_attention_fetch.h"

namespace plait {
namespace {

// Where a key's vectors of D stand among the sums. Here in their own order.
struct PlainValues {
  static constexpr int kTogether = 1;
  template <class V, class Element>
  [[gnu::always_inline]] static inline typename V::F vector(const Element* values, int v) {
    return V::load(values + v * V::kLanes);
  }
};

// Two vectors of bf16 lie in memory as one of pairs, which takes fewer instructions to widen. Their
// sums lie so too: first those of the pairs' first values, then those of the second ones.
struct PairedValues {
  static constexpr int kTogether = 2;
  template <class V>
  [[gnu::always_inline]] static inline typename V::F vector(const uint16_t* values, int v) {
    const uint16_t* const pairs = values + v / 2 * 2 * V::kLanes;
    return v % 2 == 0 ? V::first_of_pairs_at(pairs) : V::second_of_pairs_at(pairs);
  }
};

// Adds one key's values, weighted for each row.
template <class V, class Order, class Element, int kRows, int kVecs>
[[gnu::always_inline]] inline void add_key(typename V::F (&sums)[kRows][kVecs], const float* weight,
                                           const Element* value) {
  // Whichever are fewer stay in registers, beside the sums.
  if constexpr (kRows > kVecs) {
    typename V::F x[kVecs];
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) x[v] = Order::template vector<V>(value, v);
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const typename V::F p = V::broadcast(weight[r * kTileKeys]);
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) V::accumulate(sums[r][v], p, x[v]);
    }
    return;
  }
  typename V::F p[kRows];
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) p[r] = V::broadcast(weight[r * kTileKeys]);
  if constexpr (kRows == 3 && Order::kTogether == 2 && V::kRegisters == 16) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; v += 2) {
      const uint16_t* const pairs = value + v * V::kLanes;
      V::accumulate_first(sums[0][v], sums[1][v], sums[2][v], p[0], p[1], p[2], pairs);
      V::accumulate_second(sums[0][v + 1], sums[1][v + 1], sums[2][v + 1], p[0], p[1], p[2], pairs);
    }
    return;
  }
  PLAIT_UNROLL
  for (int v = 0; v < kVecs; ++v) {
    const typename V::F x = Order::template vector<V>(value, v);
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) V::accumulate(sums[r][v], p[r], x);
  }
}

// Keys of one tile with the first row's weights.
template <class Element>
struct WeightedKeys {
  const float* weight;
  const Element* const* keys;
  int64_t value_offset;  // from a key to its value
  int64_t count;
};

// Adds weight × value, key by key, to kRows × kVecs vectors of the sums, from place d on; beside
// each key a line of what comes next is fetched.
template <class V, class Order, class Element, int kRows, int kVecs, class Ahead>
[[gnu::noinline]] void add_micro(const WeightedKeys<Element>& from, int64_t d, float* out,
                                 int64_t stride, Ahead& ahead) {
  typename V::F sums[kRows][kVecs];
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = V::load(out + r * stride + v * V::kLanes);
  }
  const int64_t value = from.value_offset + d;
  for (int64_t key = 0; key < from.count;) {
    const int64_t end = least(from.count, key + kPanelKeys);
    const FetchedLines lines = ahead.take(end - key);
    for (int64_t i = 0; key < end; ++key, ++i) {
      lines.fetch(i);
      add_key<V, Order, Element, kRows, kVecs>(sums, from.weight + key, from.keys[key] + value);
    }
  }
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) V::store(out + r * stride + v * V::kLanes, sums[r][v]);
  }
}

template <class V, class Order, class Element, int kRows, class Ahead>
void add_rows(const WeightedKeys<Element>& from, float* out, int64_t stride, int64_t num_vectors,
              Ahead& ahead) {
  in_pieces<vectors_beside<V>(kRows)>(num_vectors, 0, [&]<int n>(int64_t first) {
    // Where vectors belong together their number is even, so that no single one is left.
    if constexpr (n >= Order::kTogether) {
      const int64_t d = first * static_cast<int64_t>(V::kLanes);
      add_micro<V, Order, Element, kRows, n>(from, d, out + d, stride, ahead);
    }
  });
}

}  // namespace
}  // namespace plait
