// The kernel of activation.h as a template over the vector type, see vec.h.

#pragma once

#include "activation.h"
#include "gated_activation_kernel.h"

namespace plait {
namespace {

template <class V, class T, class Act>
void activation_values(const ActivationArgs& args, size_t begin, size_t end) {
  const T* const x = static_cast<const T*>(args.x);
  T* const out = static_cast<T*>(args.out);
  size_t i = begin;
  for (; i + V::kLanes <= end; i += V::kLanes) {
    V::store(out + i, Act::template apply<V>(V::load(x + i)));
  }
  if (i < end) {
    store_some<V>(out + i, Act::template apply<V>(load_some<V>(x + i, end - i)), end - i);
  }
}

template <class V, class T>
void activation_typed(const ActivationArgs& args, size_t begin, size_t end) {
  switch (args.activation) {
    case Activation::kSilu:
      return activation_values<V, T, Silu>(args, begin, end);
    case Activation::kGeluTanh:
      return activation_values<V, T, GeluTanh>(args, begin, end);
    case Activation::kGelu:
      return activation_values<V, T, Gelu>(args, begin, end);
    case Activation::kQuickGelu:
      return activation_values<V, T, QuickGelu>(args, begin, end);
  }
}

template <class V>
void activation(const ActivationArgs& args, size_t begin, size_t end) {
  const auto run =
      args.type == Element::kFloat32 ? &activation_typed<V, float> : &activation_typed<V, uint16_t>;
  run(args, begin, end);
}

}  // namespace
}  // namespace plait
