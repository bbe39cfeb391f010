// The kernel of rope.h as a template over the vector type, see vec.h.

#pragma once

#include "rope.h"
#include "vec.h"

namespace plait {
namespace {

template <class V, class T, bool kRound>
typename V::F product(typename V::F a, typename V::F b) {
  const typename V::F value = V::mul(a, b);
  return kRound ? round_to<V, T>(value) : value;
}

template <class V, class T, bool kRound>
void rotate_halves(T* x, const float* cos, const float* sin, size_t rotary) {
  using F = typename V::F;
  const size_t half = rotary / 2;
  for (size_t i = 0; i < half; i += V::kLanes) {
    const size_t count = half - i;
    const F a = load_some<V>(x + i, count);
    const F b = load_some<V>(x + half + i, count);
    const F first = V::sub(product<V, T, kRound>(a, load_some<V>(cos + i, count)),
                           product<V, T, kRound>(b, load_some<V>(sin + i, count)));
    const F second = V::add(product<V, T, kRound>(b, load_some<V>(cos + half + i, count)),
                            product<V, T, kRound>(a, load_some<V>(sin + half + i, count)));
    store_some<V>(x + i, first, count);
    store_some<V>(x + half + i, second, count);
  }
}

template <class V, class T, bool kRound>
void rotate_neighbours(T* x, const float* cos, const float* sin, size_t rotary) {
  using F = typename V::F;
  for (size_t i = 0; i < rotary; i += V::kLanes) {
    const size_t count = rotary - i;
    const F value = load_some<V>(x + i, count);
    float values[V::kLanes];
    float rotated[V::kLanes];
    V::store(values, value);
    PLAIT_UNROLL
    for (size_t lane = 0; lane < V::kLanes; lane += 2) {
      rotated[lane] = -values[lane + 1];
      rotated[lane + 1] = values[lane];
    }
    const F sum = V::add(product<V, T, kRound>(value, load_some<V>(cos + i, count)),
                         product<V, T, kRound>(V::load(rotated), load_some<V>(sin + i, count)));
    store_some<V>(x + i, sum, count);
  }
}

template <class V, class T>
void rope_rows(const RopeArgs& args, size_t begin, size_t end) {
  const auto rotate =
      args.is_interleaved
          ? (args.round_products ? &rotate_neighbours<V, T, true> : &rotate_neighbours<V, T, false>)
          : (args.round_products ? &rotate_halves<V, T, true> : &rotate_halves<V, T, false>);
  for (size_t row = begin; row < end; ++row) {
    const size_t at = args.positions == nullptr ? row : static_cast<size_t>(args.positions[row]);
    T* x = static_cast<T*>(args.x) + row * args.row_stride;
    for (size_t head = 0; head < args.num_heads; ++head, x += args.head_stride) {
      rotate(x, args.cos + at * args.rotary, args.sin + at * args.rotary, args.rotary);
    }
  }
}

template <class V>
void rope(const RopeArgs& args, size_t begin, size_t end) {
  const auto run = args.type == Element::kFloat32 ? &rope_rows<V, float> : &rope_rows<V, uint16_t>;
  run(args, begin, end);
}

}  // namespace
}  // namespace plait
