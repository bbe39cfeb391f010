// One vector of floats, the way kernels see it, for any processor.
//
// Kernels are templates over a vector type with the members of PlainVec below; vec_avx2.h and
// vec_avx512.h hold the others. Everything here has internal linkage on purpose: files for
// different instruction sets include this header, and a function they shared would be merged by
// the linker into one copy, perhaps one that the processor at hand cannot run. For the same reason
// kernels call nothing of the standard library that is not a plain type.
//
// A bf16 value is handled as uint16_t, a pair of neighbours as the uint32_t they form in memory.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace plait {
namespace {

// Loops over registers must be unrolled wholly, or arrays of them would live in memory.
#define PLAIT_UNROLL _Pragma("GCC unroll 32")

inline float bf16_to_float(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Rounds to nearest even, as torch does, and makes every NaN torch's NaN.
inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct PlainVec {
  static constexpr size_t kLanes = 4;
  static constexpr size_t kRegisters = 16;
  typedef float F __attribute__((vector_size(16)));
  typedef uint32_t Bits __attribute__((vector_size(16)));

  static F zero() { return F{}; }
  static F broadcast(float value) { return F{value, value, value, value}; }
  static F load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void store(float* p, F v) { std::memcpy(p, &v, sizeof(v)); }
  static F load(const uint16_t* p) {
    return F{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
  }
  static void store(uint16_t* p, F v) {
    for (size_t i = 0; i < kLanes; ++i) p[i] = float_to_bf16(v[i]);
  }
  static F load(const int8_t* p) {
    return F{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
             static_cast<float>(p[3])};
  }
  // Of each four bytes at p, one.
  template <int kByte>
  static F byte_of_four(const void* p) {
    int8_t bytes[4 * kLanes];
    std::memcpy(bytes, p, sizeof(bytes));
    F result;
    for (size_t i = 0; i < kLanes; ++i) result[i] = bytes[4 * i + kByte];
    return result;
  }

  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F min(F a, F b) { return select(a < b, a, b); }
  static F max(F a, F b) { return select(a > b, a, b); }
  // Rounds to the nearest whole number; for |v| < 2^22.
  static F round(F v) {
    const F magic = broadcast(12582912.0f);  // 1.5 * 2^23: no fraction bits are left beside it
    return (v + magic) - magic;
  }
  // 2 to the power of a whole number in [-126, 127].
  static F exp2_whole(F v) {
    Bits bits;
    for (size_t i = 0; i < kLanes; ++i)
      bits[i] = static_cast<uint32_t>(static_cast<int>(v[i]) + 127) << 23;
    return as_float(bits);
  }
  static float sum(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }

  // Pairs of bf16 values, one pair a lane.
  static void pin(Bits&) {}
  static Bits load_pairs(const uint16_t* p) {
    Bits v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static F first_of_pairs(Bits v) { return as_float(v << 16); }
  static F second_of_pairs(Bits v) { return as_float(v & 0xffff0000u); }
  // The same for loops that need every register: elsewhere they are written so that a compiler
  // does not move sums about.
  static F first_of_pairs_at(const uint16_t* p) { return first_of_pairs(load_pairs(p)); }
  static F second_of_pairs_at(const uint16_t* p) { return second_of_pairs(load_pairs(p)); }
  static void accumulate(F& sum, F a, F b) { sum = fma(a, b, sum); }
  // Three factors times the first or the second values of the pairs at p, to a sum each.
  static void accumulate_first(F& a, F& b, F& c, F x, F y, F z, const uint16_t* p) {
    accumulate_three(a, b, c, x, y, z, first_of_pairs_at(p));
  }
  static void accumulate_second(F& a, F& b, F& c, F x, F y, F z, const uint16_t* p) {
    accumulate_three(a, b, c, x, y, z, second_of_pairs_at(p));
  }
  static void store_pairs(uint16_t* p, F first, F second) {
    for (size_t i = 0; i < kLanes; ++i) {
      p[2 * i] = float_to_bf16(first[i]);
      p[2 * i + 1] = float_to_bf16(second[i]);
    }
  }

 private:
  static void accumulate_three(F& a, F& b, F& c, F x, F y, F z, F wide) {
    accumulate(a, x, wide);
    accumulate(b, y, wide);
    accumulate(c, z, wide);
  }

  typedef int32_t Mask __attribute__((vector_size(16)));
  static F as_float(Bits v) {
    F result;
    std::memcpy(&result, &v, sizeof(result));
    return result;
  }
  static F select(Mask mask, F a, F b) {
    Bits x, y;
    std::memcpy(&x, &a, sizeof(x));
    std::memcpy(&y, &b, sizeof(y));
    const Bits m = (Bits)mask;
    return as_float((x & m) | (y & ~m));
  }
};

// Loads the first of `count` values and zeros after them; a whole vector where there are enough.
template <class V, class T>
inline typename V::F load_some(const T* p, size_t count) {
  if (count >= V::kLanes) return V::load(p);
  T padded[V::kLanes] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return V::load(padded);
}

template <class V, class T>
inline void store_some(T* p, typename V::F value, size_t count) {
  if (count >= V::kLanes) {
    V::store(p, value);
    return;
  }
  T padded[V::kLanes];
  V::store(padded, value);
  std::memcpy(p, padded, count * sizeof(T));
}

// Rounds to the values that T holds.
template <class V, class T>
inline typename V::F round_to(typename V::F value) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return value;
  } else {
    T rounded[V::kLanes];
    V::store(rounded, value);
    return V::load(rounded);
  }
}

}  // namespace
}  // namespace plait
