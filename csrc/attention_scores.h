// Scores of attention: queries against keys that are packed side by side.
//
// 32 keys make a panel [steps][32]: vectors of it hold the same place of so many keys. A score is
// one chain over d = 0, 1, 2, …, whichever rows and keys are computed beside it.

#pragma once

#include "attention_math.h"
#include "attention_pieces.h"

namespace plait {
namespace {

// Puts `count` values of eight keys into columns 0 … 7 of a panel. A value is four bytes: a float,
// or a pair of bf16. attention_transpose_avx.h has a faster one.
struct PlainTranspose {
  template <class Element>
  static void transpose(const Element* const* keys, int64_t count, float* panel) {
    transpose(keys, 0, count, panel);
  }
  template <class Element>
  static void transpose(const Element* const* keys, int64_t first, int64_t count, float* panel) {
    for (int64_t i = first; i < count; ++i) {
      for (int key = 0; key < 8; ++key) {
        const auto* const bytes = reinterpret_cast<const char*>(keys[key]);
        std::memcpy(panel + i * kPanelKeys + key, bytes + i * 4, 4);
      }
    }
  }
};

// Keys' values that fill the place of a float together.
template <class Stored>
constexpr int64_t kValuesInFloat = static_cast<int64_t>(sizeof(float) / sizeof(Stored));

// Packs keys as the pairs or fours that they are; the last ones are filled up with zeros.
template <class T, class Stored>
inline void pack_together(const Stored* const* keys, int64_t head_size, float* panel) {
  constexpr int64_t kTogether = kValuesInFloat<Stored>;
  const int64_t whole = head_size / kTogether;
  T::transpose(keys, whole, panel);
  const int64_t rest = head_size % kTogether;
  if (rest == 0) return;
  for (int i = 0; i < 8; ++i) {
    uint32_t last = 0;
    std::memcpy(&last, keys[i] + whole * kTogether, static_cast<size_t>(rest) * sizeof(Stored));
    std::memcpy(panel + whole * kPanelKeys + i, &last, sizeof(last));
  }
}

// A query beside keys that are packed so.
template <class Stored, class Element>
inline void widen_query(const Element* from, float* to, int64_t head_size) {
  for (int64_t d = 0; d < head_size; ++d) to[d] = widen(from[d]);
  for (int64_t d = head_size; d % kValuesInFloat<Stored> != 0; ++d) to[d] = 0.0f;
}

// Adds the products of one d: q is the first row's value, k gives a vector of keys.
template <class V, int kRows, int kVecs, class Keys>
[[gnu::always_inline]] inline void add_products(typename V::F (&sums)[kRows][kVecs], const float* q,
                                                int64_t stride, const Keys& k) {
  // Whichever are fewer stay in registers, beside the sums.
  if constexpr (kRows < kVecs) {
    typename V::F queries[kRows];
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) queries[r] = V::broadcast(q[r * stride]);
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const typename V::F key = k(v);
      PLAIT_UNROLL
      for (int r = 0; r < kRows; ++r) V::accumulate(sums[r][v], queries[r], key);
    }
  } else {
    typename V::F keys[kVecs];
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) keys[v] = k(v);
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const typename V::F query = V::broadcast(q[r * stride]);
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) V::accumulate(sums[r][v], query, keys[v]);
    }
  }
}

// How scores of fp32 keys are summed. T: how keys are transposed.
template <class Vec, class T>
struct FloatScores {
  using V = Vec;
  using Element = float;  // of queries and outputs
  using Stored = float;   // of pages

  static int64_t steps(int64_t head_size) { return head_size; }
  static void load_query(const float* from, float* to, int64_t head_size) {
    std::memcpy(to, from, static_cast<size_t>(head_size) * sizeof(float));
  }
  static void pack(const float* const* keys, int64_t head_size, float* panel) {
    T::transpose(keys, head_size, panel);
  }

  template <int kRows, int kVecs>
  [[gnu::always_inline]] static inline void step(typename V::F (&sums)[kRows][kVecs],
                                                 const float* query, int64_t stride,
                                                 const float* keys, int64_t i) {
    const auto key = [=](int v) { return V::load(keys + v * V::kLanes); };
    add_products<V, kRows, kVecs>(sums, query + i, stride, key);
  }
};

// Of bf16 keys, in fp32. Panels hold pairs: half the bytes, and widened beside the sums, where
// processors have time for it.
template <class Vec, class T>
struct PairScores {
  using V = Vec;
  using Element = uint16_t;
  using Stored = uint16_t;

  static int64_t steps(int64_t head_size) { return (head_size + 1) / 2; }
  static void load_query(const uint16_t* from, float* to, int64_t head_size) {
    widen_query<Stored>(from, to, head_size);
  }
  static void pack(const uint16_t* const* keys, int64_t head_size, float* panel) {
    pack_together<T>(keys, head_size, panel);
  }

  template <int kRows, int kVecs>
  [[gnu::always_inline]] static inline void step(typename V::F (&sums)[kRows][kVecs],
                                                 const float* query, int64_t stride,
                                                 const float* keys, int64_t i) {
    const auto* const pairs = reinterpret_cast<const uint16_t*>(keys);
    const float* const first = query + 2 * i;
    if constexpr (kRows == 3 && V::kRegisters == 16) {
      add_three<kVecs>(sums, first, stride, pairs, V::accumulate_first);
      add_three<kVecs>(sums, first + 1, stride, pairs, V::accumulate_second);
      return;
    }
    add_products<V, kRows, kVecs>(sums, first, stride, [=](int v) {
      return V::first_of_pairs_at(pairs + 2 * v * V::kLanes);
    });
    add_products<V, kRows, kVecs>(sums, first + 1, stride, [=](int v) {
      return V::second_of_pairs_at(pairs + 2 * v * V::kLanes);
    });
  }

 private:
  // Three rows by four vectors are the most that sixteen registers hold.
  template <int kVecs, class Accumulate>
  [[gnu::always_inline]] static inline void add_three(typename V::F (&sums)[3][kVecs],
                                                      const float* q, int64_t stride,
                                                      const uint16_t* pairs,
                                                      const Accumulate& accumulate) {
    const typename V::F x = V::broadcast(q[0]);
    const typename V::F y = V::broadcast(q[stride]);
    const typename V::F z = V::broadcast(q[2 * stride]);
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      accumulate(sums[0][v], sums[1][v], sums[2][v], x, y, z, pairs + 2 * v * V::kLanes);
    }
  }
};

// Of keys in whole numbers, in fp32; whoever calls multiplies a score by its key's scale. Panels
// hold four of them in the place of a float. E: what queries are.
template <class Vec, class T, class E>
struct CodeScores {
  using V = Vec;
  using Element = E;
  using Stored = int8_t;

  static int64_t steps(int64_t head_size) { return (head_size + 3) / 4; }
  static void load_query(const E* from, float* to, int64_t head_size) {
    widen_query<Stored>(from, to, head_size);
  }
  static void pack(const int8_t* const* keys, int64_t head_size, float* panel) {
    pack_together<T>(keys, head_size, panel);
  }

  template <int kRows, int kVecs>
  [[gnu::always_inline]] static inline void step(typename V::F (&sums)[kRows][kVecs],
                                                 const float* query, int64_t stride,
                                                 const float* keys, int64_t i) {
    const float* const q = query + 4 * i;
    add_byte<0>(sums, q, stride, keys);
    add_byte<1>(sums, q + 1, stride, keys);
    add_byte<2>(sums, q + 2, stride, keys);
    add_byte<3>(sums, q + 3, stride, keys);
  }

 private:
  template <int kByte, int kRows, int kVecs>
  [[gnu::always_inline]] static inline void add_byte(typename V::F (&sums)[kRows][kVecs],
                                                     const float* q, int64_t stride,
                                                     const float* keys) {
    add_products<V, kRows, kVecs>(sums, q, stride, [=](int v) {
      return V::template byte_of_four<kByte>(keys + v * V::kLanes);
    });
  }
};

// kRows queries against kVecs vectors of keys of one panel. fetched(i) is called beside step i.
template <class S, int kRows, int kVecs, class Fetched>
[[gnu::noinline]] void score_micro(const float* query, int64_t stride, const float* keys,
                                   int64_t steps, float* scores, const Fetched& fetched) {
  using V = typename S::V;
  typename V::F sums[kRows][kVecs];
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = V::zero();
  }
  for (int64_t i = 0; i < steps; ++i) {
    fetched(i);
    S::template step<kRows, kVecs>(sums, query, stride, keys + i * kPanelKeys, i);
  }
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) V::store(scores + r * kTileKeys + v * V::kLanes, sums[r][v]);
  }
}

template <class S, int kRows, class Fetched>
void score_rows(const float* query, int64_t stride, const float* keys, int64_t steps,
                int64_t num_vectors, float* scores, const Fetched& fetched) {
  using V = typename S::V;
  constexpr int kPanelVecs = static_cast<int>(kPanelKeys / V::kLanes);
  constexpr int kVecs =
      vectors_beside<V>(kRows) < kPanelVecs ? vectors_beside<V>(kRows) : kPanelVecs;
  in_pieces<kVecs>(num_vectors, 0, [&]<int n>(int64_t first) {
    const int64_t key = first * static_cast<int64_t>(V::kLanes);
    score_micro<S, kRows, n>(query, stride, keys + key, steps, scores + key, fetched);
  });
}

}  // namespace
}  // namespace plait
