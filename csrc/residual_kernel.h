// The kernels of residual.h as templates over the vector type, see vec.h.

#pragma once

#include "residual.h"
#include "vec.h"

namespace plait {
namespace {

template <class V, class T>
void add_values(const AddArgs& args, size_t begin, size_t end) {
  using F = typename V::F;
  T* const out = static_cast<T*>(args.out);
  const T* const x = static_cast<const T*>(args.x);
  const F scale = V::broadcast(args.scale);
  const bool is_scaled = args.scale != 1.0f;
  for (size_t i = begin; i < end; i += V::kLanes) {
    const size_t count = end - i;
    F value = load_some<V>(x + i, count);
    if (is_scaled) value = round_to<V, T>(V::mul(value, scale));
    store_some<V>(out + i, V::add(load_some<V>(out + i, count), value), count);
  }
}

template <class V, class T>
void scale_values(const ScaleArgs& args, size_t begin, size_t end) {
  T* const out = static_cast<T*>(args.out);
  const typename V::F scale = V::broadcast(args.scale);
  for (size_t i = begin; i < end; i += V::kLanes) {
    const size_t count = end - i;
    store_some<V>(out + i, V::mul(load_some<V>(out + i, count), scale), count);
  }
}

template <class V>
void add_rows(const AddArgs& args, size_t begin, size_t end) {
  const auto run =
      args.type == Element::kFloat32 ? &add_values<V, float> : &add_values<V, uint16_t>;
  run(args, begin, end);
}

template <class V>
void scale_rows(const ScaleArgs& args, size_t begin, size_t end) {
  const auto run =
      args.type == Element::kFloat32 ? &scale_values<V, float> : &scale_values<V, uint16_t>;
  run(args, begin, end);
}

template <class V>
ResidualKernels make_residual_kernels() {
  return {&add_rows<V>, &scale_rows<V>};
}

}  // namespace
}  // namespace plait
