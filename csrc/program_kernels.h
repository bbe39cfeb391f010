// The kernels that a program runs by, for one instruction set. No torch in here.

#pragma once

#include "activation.h"
#include "best_token.h"
#include "cpu_features.h"
#include "gated_activation.h"
#include "layer_norm.h"
#include "linear.h"
#include "lora.h"
#include "quantized_linear.h"
#include "residual.h"
#include "rms_norm.h"
#include "rope.h"

namespace plait {

struct ProgramKernels {
  CpuIsa isa;  // for paged_attention, which chooses by itself
  LinearKernels linear;
  const QuantizedKernels* quantized_linear;
  LoraKernels lora;
  RmsNormKernel rms_norm;
  LayerNormKernel layer_norm;
  RopeKernel rope;
  GatedActivationKernel gated_activation;
  void (*activation)(const ActivationArgs& args, size_t begin, size_t end);
  ResidualKernels residual;
  BestToken (*best_token)(const float* logits, size_t size);
};

ProgramKernels program_kernels(CpuIsa isa);

}  // namespace plait
