// Linear layers over quantised weights: out = x · weightᵀ + bias. No torch in here.
//
// The order of summation. With exact weights: that of linear.h over the weights in fp32, each of
// them rounded once. Else rows are quantised (quantize_rows, per group of at most 32 inputs), the
// products of codes are summed in whole numbers, and each output is one chain over the groups
// 0, 1, 2, … of fused multiply-adds, first of the products, then of the minimums. Either way a row
// has the same bits alone and in any batch. Only different instruction sets may differ.

#pragma once

#include "linear.h"
#include "quantized_weight.h"

namespace plait {

// Functions of one instruction set; see quantized_kernel.h.
struct QuantizedKernels;
const QuantizedKernels& quantized_kernels_plain();
const QuantizedKernels& quantized_kernels_avx2();
const QuantizedKernels& quantized_kernels_avx512();
const QuantizedKernels& quantized_kernels_vnni();
const QuantizedKernels& quantized_kernels(CpuIsa isa);

struct QuantizeRowsArgs {
  const void* x;
  Element x_type;
  size_t rows;
  size_t x_stride;  // in elements
  size_t in_features;
  size_t padded_inputs;
  size_t row_group;

  int8_t* codes;  // [rows][padded_inputs]
  float* scales;  // [rows][padded_inputs / row_group]
  int32_t* sums;  // the same
};

// Quantises rows for weights with these padded_inputs and this row_group.
//
// A group's greatest size becomes 127. A group whose values are all below 1e-30 becomes zeros. A
// group with a value that is not finite gets a scale of NaN.
void quantize_rows(const QuantizedKernels& kernels, const QuantizeRowsArgs& args,
                   const ParallelFor& parallel_for);

struct QuantizedLinearArgs {
  const void* x;  // not read where `quantized` is given
  Element x_type;
  size_t rows;
  size_t x_stride;  // in elements

  QuantizedWeight weight;
  const QuantizedRows* quantized;  // of x, or null; never for exact weights

  const void* bias;  // out_features values, or null
  Element bias_type;

  void* out;
  size_t out_stride;
  Element out_type;

  Companion* companion;  // as in LinearArgs
};

void quantized_linear(const QuantizedKernels& kernels, const QuantizedLinearArgs& args,
                      const ParallelFor& parallel_for);

}  // namespace plait
