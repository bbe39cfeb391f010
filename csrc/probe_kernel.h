// The kernels of probe.h over an instruction set's registers.
//
// Enough independent sums hide the latency of an addition. Operands are hidden from the compiler
// wherever it could otherwise compute a product once for all.

#pragma once

#include "probe.h"

namespace plait {
namespace {

#define PLAIT_PROBE_UNROLL _Pragma("GCC unroll 16")

// Three places at a time, as measured: the hardware's prefetchers follow each, and one place alone
// got half as much on some processors. Four got up to a tenth less: in a piece of a power of two
// they meet in the same banks of memory. Software prefetches only took from it.
template <class Isa>
uint64_t read_words(const uint64_t* words, size_t num_words) {
  using W = typename Isa::W;
  constexpr size_t kLanes = sizeof(W) / sizeof(uint64_t);
  constexpr size_t kPlaces = 3;
  constexpr size_t kSums = 8;
  constexpr size_t kStep = 256 / sizeof(uint64_t);
  W sums[kSums] = {};
  const size_t part = num_words / kPlaces / kStep * kStep;
  for (size_t i = 0; i < part; i += kStep) {
    for (size_t place = 0; place < kPlaces; ++place) {
      const uint64_t* const from = words + place * part + i;
      PLAIT_PROBE_UNROLL
      for (size_t j = 0; j < kStep / kLanes; ++j) sums[j % kSums] ^= Isa::load(from + j * kLanes);
    }
  }
  PLAIT_PROBE_UNROLL
  for (size_t s = 1; s < kSums; ++s) sums[0] ^= sums[s];
  uint64_t result = 0;
  for (size_t lane = 0; lane < kLanes; ++lane) result ^= static_cast<uint64_t>(sums[0][lane]);
  for (size_t i = kPlaces * part; i < num_words; ++i) result ^= words[i];
  return result;
}

// `Dot` has a sum's type S, an operand's type A, `one()`, `hide(A&)`, `add(S&, A, A)`, `total(S)`.
template <class Dot, size_t kSums>
int64_t sum_of_products(size_t rounds) {
  typename Dot::S sums[kSums] = {};
  typename Dot::A a = Dot::one();
  const typename Dot::A b = a;
  for (size_t round = 0; round < rounds; ++round) {
    Dot::hide(a);
    PLAIT_PROBE_UNROLL
    for (size_t s = 0; s < kSums; ++s) Dot::add(sums[s], a, b);
  }
  int64_t total = 0;
  for (size_t s = 0; s < kSums; ++s) total += Dot::total(sums[s]);
  return total;
}

template <class T, size_t kLanes, class V>
int64_t sum_of_lanes(V v) {
  T lanes[kLanes];
  static_assert(sizeof(lanes) == sizeof(v));
  __builtin_memcpy(lanes, &v, sizeof(v));
  int64_t total = 0;
  for (T lane : lanes) total += static_cast<int64_t>(lane);
  return total;
}

}  // namespace
}  // namespace plait
