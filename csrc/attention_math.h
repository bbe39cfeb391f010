// What attention kernels compute with, beside the vectors of vec.h.

#pragma once

#include "vec.h"

namespace plait {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr int64_t kLineBytes = 64;  // of a cache
constexpr float kNegativeInfinity = -__builtin_inff();

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

inline float widen(float value) { return value; }
inline float widen(int8_t value) { return value; }
inline float widen(uint16_t value) { return bf16_to_float(value); }
inline void narrow(float value, float* to) { *to = value; }
inline void narrow(float value, uint16_t* to) { *to = float_to_bf16(value); }

// 2^x for x <= 0 or little above; below -126 it stays at 2^-126. NaN stays NaN.
// Minimax polynomial of 2^f on [-0.5, 0.5], fitted with p(0) = 1: with fp32 rounding within 1 ulp.
template <class V>
inline typename V::F exp2(typename V::F x) {
  x = V::max(V::broadcast(-126.0f), x);  // in this order a NaN in x is kept
  const typename V::F whole = V::round(x);
  const typename V::F f = V::sub(x, whole);
  typename V::F p = V::broadcast(1.5353362e-4f);
  p = V::fma(p, f, V::broadcast(1.3398875e-3f));
  p = V::fma(p, f, V::broadcast(9.61843692e-3f));
  p = V::fma(p, f, V::broadcast(5.55033237e-2f));
  p = V::fma(p, f, V::broadcast(2.40226477e-1f));
  p = V::fma(p, f, V::broadcast(6.93147182e-1f));
  p = V::fma(p, f, V::broadcast(1.0f));
  return V::mul(p, V::exp2_whole(whole));
}

// tanh by exp2 of -2|x|; near zero, where that loses digits, by an odd polynomial (Cephes tanhf).
template <class V>
inline void tanh_in_place(float* x) {
  const typename V::F v = V::load(x);
  const typename V::F square = V::mul(v, v);
  typename V::F p = V::broadcast(-5.70498872745e-3f);
  p = V::fma(p, square, V::broadcast(2.06390887954e-2f));
  p = V::fma(p, square, V::broadcast(-5.37397155531e-2f));
  p = V::fma(p, square, V::broadcast(1.33314422036e-1f));
  p = V::fma(p, square, V::broadcast(-3.33332819422e-1f));
  float near_zero[V::kLanes];
  V::store(near_zero, V::fma(V::mul(p, square), v, v));

  const typename V::F size = V::max(v, V::sub(V::zero(), v));
  const typename V::F e = exp2<V>(V::mul(size, V::broadcast(-2.0f * kLog2E)));
  const typename V::F one = V::broadcast(1.0f);
  float far[V::kLanes];
  V::store(far, V::div(V::sub(one, e), V::add(one, e)));
  for (size_t i = 0; i < V::kLanes; ++i) {
    const float a = x[i];
    x[i] = a > 0.625f ? far[i] : a < -0.625f ? -far[i] : near_zero[i];
  }
}

template <class V>
inline float max_lane(typename V::F v) {
  float lanes[V::kLanes];
  V::store(lanes, v);
  float best = lanes[0];
  for (size_t i = 1; i < V::kLanes; ++i) best = best > lanes[i] ? best : lanes[i];
  return best;
}

}  // namespace
}  // namespace plait
