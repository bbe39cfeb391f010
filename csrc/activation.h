// An activation of every value by itself. No torch in here.

#pragma once

#include "gated_activation.h"

namespace plait {

struct ActivationArgs {
  const void* x;  // dense
  Element type;   // of x and out
  Activation activation;
  void* out;  // dense
};

// Computes values begin … end.
void activation_plain(const ActivationArgs& args, size_t begin, size_t end);
void activation_avx2(const ActivationArgs& args, size_t begin, size_t end);
void activation_avx512(const ActivationArgs& args, size_t begin, size_t end);

}  // namespace plait
