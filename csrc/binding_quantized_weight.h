// A quantised weight from what torch hands over, checked. Only for bindings.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include "quantized_weight.h"

namespace plait {
namespace {

inline QuantizedWeight check_quantized_weight(const torch::stable::Tensor& blob,
                                              int64_t in_features, int64_t out_features,
                                              int64_t bits, int64_t group, int64_t scales,
                                              int64_t zero_point) {
  STD_TORCH_CHECK(in_features > 0 && out_features >= 0 && (bits == 4 || bits == 8) &&
                      (group == 0 || group == 16 || group == 32 || group == 64 || group == 128) &&
                      scales >= 0 && scales <= (group == 0 ? 1 : 2) && zero_point >= -1 &&
                      zero_point <= (bits == 4 ? kMostPairZeroPoint : 255),
                  "plait::quantized_linear: ", out_features, " x ", in_features, " at ", bits,
                  " bits in groups of ", group, " about ", zero_point, " is no weight");
  QuantizedWeight weight{};
  weight.out_features = static_cast<size_t>(out_features);
  weight.in_features = static_cast<size_t>(in_features);
  weight.group = static_cast<size_t>(group);
  weight.bits = static_cast<int>(bits);
  weight.scales = static_cast<ScaleType>(scales);
  weight.has_mins = zero_point < 0;
  weight.zero_point = zero_point < 0 ? 0 : static_cast<int>(zero_point);
  STD_TORCH_CHECK(blob.dim() == 1 && blob.is_contiguous() &&
                      blob.scalar_type() == torch::headeronly::ScalarType::Byte &&
                      static_cast<size_t>(blob.size(0)) == weight.tiles() * weight.tile_bytes(),
                  "plait::quantized_linear: the packed weight is not one of ", out_features, " x ",
                  in_features);
  weight.blob = static_cast<const uint8_t*>(blob.const_data_ptr());
  return weight;
}

}  // namespace
}  // namespace plait
