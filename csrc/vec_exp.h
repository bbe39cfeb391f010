// The exponential of a vector, see vec.h.

#pragma once

#include "vec.h"

namespace plait {
namespace {

// e^v within 2 units in the last place, from 2^whole · e^rest with |rest| ≤ ln(2) / 2. The bounds
// keep the result a normal number; NaN passes, since min and max return their second argument then.
template <class V>
inline typename V::F exp(typename V::F v) {
  using F = typename V::F;
  v = V::min(V::broadcast(88.0f), V::max(V::broadcast(-87.0f), v));
  const F whole = V::round(V::mul(v, V::broadcast(1.44269504089f)));
  F rest = V::fma(whole, V::broadcast(-0.693359375f), v);  // ln(2) in two parts, the first exact
  rest = V::fma(whole, V::broadcast(2.12194440e-4f), rest);
  // Taylor's series; its next term is below 1e-8 of the result.
  F sum = V::broadcast(1.0f / 5040);
  constexpr float kTerms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (const float term : kTerms) sum = V::fma(sum, rest, V::broadcast(term));
  return V::mul(sum, V::exp2_whole(whole));
}

}  // namespace
}  // namespace plait
