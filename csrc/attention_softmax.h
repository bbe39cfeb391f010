// The softmax of attention, carried from tile to tile: a row's scores become weights relative to
// its greatest score so far, and what it has summed before is scaled to that.

#pragma once

#include "attention_math.h"

namespace plait {
namespace {

// What a score is multiplied by, and its soft cap, 0 where there is none.
struct ScoreScale {
  float scale;
  float softcap;
};

// What a row carries from tile to tile.
struct RowSums {
  float* maximum;  // of scores × log2(e)
  float* sum;      // of weights
  float* out;      // of weighted values
  int64_t out_floats;
};

// scores → tanh(score × scale / softcap); the caller multiplies by softcap.
template <class V>
inline void cap_scores(float* scores, int64_t first, int64_t last, ScoreScale by) {
  constexpr int64_t kLanes = V::kLanes;
  const typename V::F factor = V::broadcast(by.scale / by.softcap);
  for (int64_t key = first; key < last; key += kLanes) {
    V::store(scores + key, V::mul(V::load(scores + key), factor));
    tanh_in_place<V>(scores + key);
  }
}

template <class V>
inline void rescale(const RowSums& row, float before, float maximum) {
  constexpr int64_t kLanes = V::kLanes;
  if (before == maximum || before == kNegativeInfinity) return;  // nothing to scale
  const typename V::F factor = exp2<V>(V::broadcast(before - maximum));
  float lanes[kLanes];
  V::store(lanes, factor);
  *row.sum *= lanes[0];
  for (int64_t d = 0; d < row.out_floats; d += kLanes) {
    V::store(row.out + d, V::mul(V::load(row.out + d), factor));
  }
}

// Of the scores begin … end; those beside them in their vectors count for nothing.
template <class V>
inline void softmax(float* scores, int64_t begin, int64_t end, ScoreScale by, const RowSums& row) {
  constexpr int64_t kLanes = V::kLanes;
  if (begin >= end) return;
  const int64_t first = begin / kLanes * kLanes;
  const int64_t last = round_up(end, kLanes);
  const float factor = by.softcap == 0.0f ? by.scale * kLog2E : by.softcap * kLog2E;
  if (by.softcap != 0.0f) cap_scores<V>(scores, first, last, by);
  for (int64_t key = first; key < begin; ++key) scores[key] = kNegativeInfinity;
  for (int64_t key = end; key < last; ++key) scores[key] = kNegativeInfinity;

  typename V::F best = V::load(scores + first);
  for (int64_t key = first + kLanes; key < last; key += kLanes) {
    best = V::max(best, V::load(scores + key));
  }
  const float before = *row.maximum;
  const float here = max_lane<V>(best) * factor;
  const float maximum = before > here ? before : here;

  const typename V::F factors = V::broadcast(factor);
  const typename V::F offset = V::broadcast(-maximum);
  for (int64_t key = first; key < last; key += kLanes) {
    V::store(scores + key, exp2<V>(V::fma(V::load(scores + key), factors, offset)));
  }
  for (int64_t key = first; key < begin; ++key) scores[key] = 0.0f;
  for (int64_t key = end; key < last; ++key) scores[key] = 0.0f;
  typename V::F sum = V::zero();
  for (int64_t key = first; key < last; key += kLanes) sum = V::add(sum, V::load(scores + key));

  rescale<V>(row, before, maximum);
  *row.maximum = maximum;
  *row.sum += V::sum(sum);
}

}  // namespace
}  // namespace plait
