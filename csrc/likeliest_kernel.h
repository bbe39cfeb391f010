// The algorithm of likeliest.h as a template over the vector type, see vec.h. A row is read from
// memory once: what is read again, to find where the largest stands, is one block.

#pragma once

#include "likeliest.h"
#include "vec.h"

namespace plait {
namespace {

constexpr size_t kBlockValues = 1024;

struct Largest {
  float value;
  float zero;  // NaN where a value is NaN or infinite
};

template <class V>
Largest largest_of(const float* values, size_t count, float least) {
  using F = typename V::F;
  // Two chains, so that neither waits for itself.
  F largest[2] = {V::broadcast(least), V::broadcast(least)};
  F zeros[2] = {V::zero(), V::zero()};
  size_t i = 0;
  for (; i + 2 * V::kLanes <= count; i += 2 * V::kLanes) {
    for (size_t chain = 0; chain < 2; ++chain) {
      const F value = V::load(values + i + chain * V::kLanes);
      largest[chain] = V::max(value, largest[chain]);
      zeros[chain] = V::fma(value, V::zero(), zeros[chain]);
    }
  }
  float lanes[V::kLanes];
  V::store(lanes, V::max(largest[0], largest[1]));
  Largest found{least, V::sum(V::add(zeros[0], zeros[1]))};
  for (const float lane : lanes) found.value = lane > found.value ? lane : found.value;
  for (; i < count; ++i) {
    found.value = values[i] > found.value ? values[i] : found.value;
    found.zero += values[i] * 0.0f;
  }
  return found;
}

inline bool has_nan(const float* values, size_t count) {
  bool found = false;
  for (size_t i = 0; i < count; ++i) found |= values[i] != values[i];
  return found;
}

template <class V>
int64_t likeliest_of(const float* logits, size_t num_tokens) {
  const float infinity = __builtin_inff();
  Largest best{-infinity, 0.0f};
  size_t from = 0;
  for (size_t at = 0; at < num_tokens; at += kBlockValues) {
    const size_t count = num_tokens - at < kBlockValues ? num_tokens - at : kBlockValues;
    const Largest here = largest_of<V>(logits + at, count, best.value);
    if (here.value > best.value) from = at;
    best = {here.value, best.zero + here.zero};
  }
  if (best.value == infinity || best.value == -infinity) return -1;
  // Where adapters add tokens, rows hold minus infinity for those of others.
  if (best.zero != 0.0f && has_nan(logits, num_tokens)) return -1;
  while (logits[from] != best.value) ++from;
  return static_cast<int64_t>(from);
}

template <class V>
void likeliest(const LikeliestArgs& args, size_t begin, size_t end) {
  for (size_t row = begin; row < end; ++row) {
    args.tokens[row] = likeliest_of<V>(args.logits + row * args.row_stride, args.num_tokens);
  }
}

}  // namespace
}  // namespace plait
