// The types of values that ops take. Only for bindings.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "element.h"

namespace plait {
namespace {

inline Element op_element(torch::headeronly::ScalarType type, const char* op, const char* name) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, "plait::", op, ": ",
                  name, " must be float32 or bfloat16");
  return type == ScalarType::Float ? Element::kFloat32 : Element::kBfloat16;
}

inline Element op_element(const torch::stable::Tensor& t, const char* op, const char* name) {
  return op_element(t.scalar_type(), op, name);
}

}  // namespace
}  // namespace plait
