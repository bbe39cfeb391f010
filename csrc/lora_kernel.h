// The kernels of lora.h as templates over the vector type; lora_*.cpp make them, each for one
// instruction set. Everything here has internal linkage, see vec.h.

#pragma once

#include "lora_codes.h"
#include "lora_expand.h"
#include "lora_shrink.h"

namespace plait {
namespace {

template <class V>
void widen(const uint16_t* x, size_t count, float* out) {
  size_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) V::store(out + i, V::load(x + i));
  for (; i < count; ++i) out[i] = bf16_to_float(x[i]);
}

// Codes: see lora_codes.h.
template <class Codes>
LoraKernels make_lora_kernels() {
  using V = typename Codes::V;
  return {&widen<V>,
          {&shrink<V, Singles<V>>, &expand<V, Singles<V>>},
          {&shrink<V, Pairs<V>>, &expand<V, Pairs<V>>},
          {&shrink_codes<Codes>, &expand<V, Codes>}};
}

}  // namespace
}  // namespace plait
