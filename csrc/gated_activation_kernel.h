// The kernel of gated_activation.h as a template over the vector type, see vec.h.

#pragma once

#include "gated_activation.h"
#include "vec.h"
#include "vec_exp.h"

namespace plait {
namespace {

template <class V>
inline typename V::F sigmoid_times(typename V::F v, typename V::F x) {
  const typename V::F one = V::broadcast(1.0f);
  return V::div(x, V::add(one, exp<V>(V::sub(V::zero(), v))));
}

struct Silu {
  template <class V>
  static typename V::F apply(typename V::F x) {
    return sigmoid_times<V>(x, x);
  }
};

struct QuickGelu {
  template <class V>
  static typename V::F apply(typename V::F x) {
    return sigmoid_times<V>(V::mul(V::broadcast(1.702f), x), x);
  }
};

// x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), by (1 + tanh(u)) / 2 = sigmoid(2u).
struct GeluTanh {
  template <class V>
  static typename V::F apply(typename V::F x) {
    using F = typename V::F;
    const F cubic = V::fma(V::mul(V::broadcast(0.044715f), V::mul(x, x)), x, x);
    return sigmoid_times<V>(V::mul(V::broadcast(1.5957691216f), cubic), x);
  }
};

// x/2 · erfc(-x/√2), erfc by Abramowitz and Stegun 7.1.26, within 1.5e-7.
struct Gelu {
  template <class V>
  static typename V::F apply(typename V::F x) {
    using F = typename V::F;
    const F one = V::broadcast(1.0f);
    const F size = V::mul(V::max(V::sub(V::zero(), x), x), V::broadcast(0.70710678118f));
    const F t = V::div(one, V::fma(V::broadcast(0.3275911f), size, one));
    F sum = V::broadcast(1.061405429f);
    constexpr float kTerms[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    for (const float term : kTerms) sum = V::fma(sum, t, V::broadcast(term));
    const F tail = V::mul(V::mul(sum, t), exp<V>(V::sub(V::zero(), V::mul(size, size))));
    // erfc(-|z|) = 2 - erfc(|z|); x · tail / 2 for negative x, x - x · tail / 2 else.
    // The tail is nothing long before |x| is 20, but infinity times nothing would be NaN.
    const F near = V::min(V::broadcast(20.0f), V::max(V::broadcast(-20.0f), x));
    const F half = V::mul(V::mul(V::broadcast(0.5f), near), tail);
    return V::add(V::max(V::zero(), x), V::min(half, V::sub(V::zero(), half)));
  }
};

template <class V, class T, class Act>
void gated_activation_rows(const GatedActivationArgs& args, size_t begin, size_t end) {
  for (size_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.x) + row * args.row_stride;
    const T* up = gate + args.size;
    T* out = static_cast<T*>(args.out) + row * args.size;
    for (size_t i = 0; i < args.size; i += V::kLanes) {
      const size_t count = args.size - i;
      const typename V::F activated = Act::template apply<V>(load_some<V>(gate + i, count));
      store_some<V>(out + i, V::mul(activated, load_some<V>(up + i, count)), count);
    }
  }
}

template <class V, class T>
void gated_activation_typed(const GatedActivationArgs& args, size_t begin, size_t end) {
  switch (args.activation) {
    case Activation::kSilu:
      return gated_activation_rows<V, T, Silu>(args, begin, end);
    case Activation::kGeluTanh:
      return gated_activation_rows<V, T, GeluTanh>(args, begin, end);
    case Activation::kGelu:
      return gated_activation_rows<V, T, Gelu>(args, begin, end);
    case Activation::kQuickGelu:
      return gated_activation_rows<V, T, QuickGelu>(args, begin, end);
  }
}

template <class V>
void gated_activation(const GatedActivationArgs& args, size_t begin, size_t end) {
  const auto run = args.type == Element::kFloat32 ? &gated_activation_typed<V, float>
                                                  : &gated_activation_typed<V, uint16_t>;
  run(args, begin, end);
}

}  // namespace
}  // namespace plait
