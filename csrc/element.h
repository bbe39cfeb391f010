// The types of values that kernels take.

#pragma once

#include <cstddef>
#include <cstdint>

namespace plait {

enum class Element : uint8_t { kFloat32, kBfloat16 };

constexpr size_t element_size(Element type) { return type == Element::kFloat32 ? 4 : 2; }

}  // namespace plait
