// The kernel of best_token.h as a template over the vector type, see vec.h.

#pragma once

#include "best_token.h"
#include "vec.h"
#include "vec_exp.h"

namespace plait {
namespace {

template <class V>
BestToken best_token(const float* logits, size_t size) {
  using F = typename V::F;
  const size_t whole = size / V::kLanes * V::kLanes;
  const float infinity = __builtin_inff();
  F largest = V::broadcast(-infinity);
  for (size_t i = 0; i < whole; i += V::kLanes) largest = V::max(V::load(logits + i), largest);
  float lanes[V::kLanes];
  V::store(lanes, largest);
  float best = -infinity;
  for (const float lane : lanes) best = lane > best ? lane : best;
  for (size_t i = whole; i < size; ++i) best = logits[i] > best ? logits[i] : best;

  // Every other value's part of the sum; NaN and infinities come through.
  const F top = V::broadcast(best);
  F sums = V::zero();
  for (size_t i = 0; i < whole; i += V::kLanes) {
    sums = V::add(sums, exp<V>(V::sub(V::load(logits + i), top)));
  }
  float sum = V::sum(sums);
  for (size_t i = whole; i < size; ++i) {
    V::store(lanes, exp<V>(V::broadcast(logits[i] - best)));
    sum += lanes[0];
  }
  size_t index = 0;
  while (index < size && logits[index] != best) ++index;
  return {index, 1.0f / sum};
}

}  // namespace
}  // namespace plait
