// The kernel of layer_norm.h as a template over the vector type, see vec.h.

#pragma once

#include "layer_norm.h"
#include "vec.h"

namespace plait {
namespace {

// Sums terms of values, (value - mean)² or the values themselves, over four vectors of partial
// sums.
template <class V, bool kSquares, class T>
float sum_row(const T* row, size_t size, float mean) {
  using F = typename V::F;
  constexpr size_t kSums = 4;
  const F shift = V::broadcast(mean);
  const auto add = [shift](F sum, F value) {
    if constexpr (!kSquares) return V::add(sum, value);
    const F rest = V::sub(value, shift);
    return V::fma(rest, rest, sum);
  };
  F sums[kSums] = {V::zero(), V::zero(), V::zero(), V::zero()};
  size_t i = 0;
  for (; i + kSums * V::kLanes <= size; i += kSums * V::kLanes) {
    PLAIT_UNROLL
    for (size_t s = 0; s < kSums; ++s) sums[s] = add(sums[s], V::load(row + i + s * V::kLanes));
  }
  for (; i + V::kLanes <= size; i += V::kLanes) sums[0] = add(sums[0], V::load(row + i));
  float total = V::sum(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])));
  for (; i < size; ++i) {  // not as a vector: the zeros beside it would differ from the mean
    const float rest = V::sum(load_some<V>(row + i, 1)) - mean;
    total += kSquares ? rest * rest : rest;
  }
  return total;
}

template <class V>
typename V::F load_vector(const void* from, Element type, size_t i, size_t count) {
  return type == Element::kFloat32 ? load_some<V>(static_cast<const float*>(from) + i, count)
                                   : load_some<V>(static_cast<const uint16_t*>(from) + i, count);
}

template <class V, class T>
void layer_norm_rows(const LayerNormArgs& args, size_t begin, size_t end) {
  using F = typename V::F;
  const auto size = static_cast<float>(args.size);
  for (size_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(args.x) + r * args.row_stride;
    T* out = static_cast<T*>(args.out) + r * args.size;
    const float mean = sum_row<V, false>(x, args.size, 0.0f) / size;
    const float variance = sum_row<V, true>(x, args.size, mean) / size;
    const F shift = V::broadcast(mean);
    const F scale = V::broadcast(1.0f / __builtin_sqrtf(variance + args.eps));
    for (size_t i = 0; i < args.size; i += V::kLanes) {
      const size_t count = args.size - i;
      F value = V::mul(V::sub(load_some<V>(x + i, count), shift), scale);
      if (args.weight != nullptr) {
        value = V::mul(value, load_vector<V>(args.weight, args.weight_type, i, count));
      }
      if (args.bias != nullptr) {
        value = V::add(value, load_vector<V>(args.bias, args.bias_type, i, count));
      }
      store_some<V>(out + i, value, count);
    }
  }
}

template <class V>
void layer_norm(const LayerNormArgs& args, size_t begin, size_t end) {
  const auto run =
      args.type == Element::kFloat32 ? &layer_norm_rows<V, float> : &layer_norm_rows<V, uint16_t>;
  run(args, begin, end);
}

}  // namespace
}  // namespace plait
