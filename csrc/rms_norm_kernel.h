// The kernel of rms_norm.h as a template over the vector type, see vec.h.

#pragma once

#include "rms_norm.h"
#include "vec.h"

namespace plait {
namespace {

template <class V, class T>
float sum_of_squares(const T* row, size_t size) {
  constexpr size_t kSums = 4;
  typename V::F sums[kSums] = {V::zero(), V::zero(), V::zero(), V::zero()};
  size_t i = 0;
  for (; i + kSums * V::kLanes <= size; i += kSums * V::kLanes) {
    PLAIT_UNROLL
    for (size_t s = 0; s < kSums; ++s) {
      const typename V::F value = V::load(row + i + s * V::kLanes);
      sums[s] = V::fma(value, value, sums[s]);
    }
  }
  for (; i < size; i += V::kLanes) {
    const typename V::F value = load_some<V>(row + i, size - i);
    sums[0] = V::fma(value, value, sums[0]);
  }
  return V::sum(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])));
}

template <class V, class T, class W>
void rms_norm_row(const RmsNormArgs& args, const T* x, T* out) {
  using F = typename V::F;
  const auto* weight = static_cast<const W*>(args.weight);
  const float mean = sum_of_squares<V>(x, args.size) / static_cast<float>(args.size);
  const F scale = V::broadcast(1.0f / __builtin_sqrtf(mean + args.eps));
  const F offset = V::broadcast(args.weight_offset);
  for (size_t i = 0; i < args.size; i += V::kLanes) {
    const size_t count = args.size - i;
    F value = V::mul(load_some<V>(x + i, count), scale);
    if (args.round_first) value = round_to<V, T>(value);
    value = V::mul(value, V::add(load_some<V>(weight + i, count), offset));
    store_some<V>(out + i, value, count);
  }
}

template <class V, class T, class W>
void rms_norm_rows(const RmsNormArgs& args, size_t begin, size_t end) {
  const auto* x = static_cast<const T*>(args.x);
  auto* out = static_cast<T*>(args.out) + begin * args.inner * args.size;
  for (size_t i = begin; i < end; ++i) {
    for (size_t j = 0; j < args.inner; ++j, out += args.size) {
      rms_norm_row<V, T, W>(args, x + i * args.outer_stride + j * args.inner_stride, out);
    }
  }
}

template <class V>
void rms_norm(const RmsNormArgs& args, size_t begin, size_t end) {
  const bool wide = args.type == Element::kFloat32;
  const bool wide_weight = args.weight_type == Element::kFloat32;
  const auto run =
      wide ? (wide_weight ? &rms_norm_rows<V, float, float> : &rms_norm_rows<V, float, uint16_t>)
           : (wide_weight ? &rms_norm_rows<V, uint16_t, float>
                          : &rms_norm_rows<V, uint16_t, uint16_t>);
  run(args, begin, end);
}

}  // namespace
}  // namespace plait
