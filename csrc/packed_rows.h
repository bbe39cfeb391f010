// Rows of packed weights as they were: an embedding that shares its weight with the head. No torch.

#pragma once

#include <cstddef>
#include <cstdint>

#include "element.h"
#include "quantized_weight.h"

namespace plait {

// Writes outputs ids[0] … ids[count - 1] of a weight as linear.h packs it, [count][in_features], of
// its own type. Ids are those of outputs.
void packed_rows(const void* tiles, Element type, size_t in_features, const int64_t* ids,
                 size_t count, void* out);

// The same of a quantised weight: scale · code + min in fp64, rounded to fp32 and then to `type`.
void quantized_rows(const QuantizedWeight& weight, const int64_t* ids, size_t count, Element type,
                    void* out);

}  // namespace plait
