// act(gate) · up of a gated MLP, where each row holds its gates and then its ups. No torch in here.

#pragma once

#include <cstddef>

#include "element.h"

namespace plait {

enum class Activation : uint8_t { kSilu, kGeluTanh, kGelu, kQuickGelu };

struct GatedActivationArgs {
  const void* x;  // [rows][2 · size]
  Element type;   // of x and out
  size_t size;
  size_t row_stride;  // of x, in elements
  Activation activation;
  void* out;  // [rows][size], dense
};

// Computes rows begin … end.
using GatedActivationKernel = void (*)(const GatedActivationArgs& args, size_t begin, size_t end);

void gated_activation_plain(const GatedActivationArgs& args, size_t begin, size_t end);
void gated_activation_avx2(const GatedActivationArgs& args, size_t begin, size_t end);
void gated_activation_avx512(const GatedActivationArgs& args, size_t begin, size_t end);

}  // namespace plait
