#include "packed_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear.h"
#include "vec.h"

namespace plait {
namespace {

float half_to_float(uint16_t half) {
  const uint32_t exponent = half >> 10 & 31;
  const uint32_t fraction = half & 1023;
  float value = static_cast<float>(fraction) * 0x1p-24f;  // below 2^-14
  if (exponent != 0) {
    const uint32_t bits = (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    std::memcpy(&value, &bits, sizeof(value));
  }
  return (half & 0x8000) != 0 ? -value : value;
}

template <class T>
T load(const uint8_t* plane, size_t lane) {
  T value;
  std::memcpy(&value, plane + lane * sizeof(T), sizeof(T));
  return value;
}

// A group's scale (plane 0) or minimum (plane 1), in fp32.
float load_scale(const QuantizedWeight& weight, const uint8_t* tile, size_t first_input,
                 size_t plane, size_t lane) {
  const uint8_t* values = tile + weight.group_at(first_input) + plane * weight.plane_bytes();
  switch (weight.scales) {
    case ScaleType::kFloat:
      return load<float>(values, lane);
    case ScaleType::kHalf:
      return half_to_float(load<uint16_t>(values, lane));
    case ScaleType::kTwoLevels:
      break;
  }
  const uint8_t* factors =
      tile + weight.span_at(first_input) + plane * kQuantTileOutputs * sizeof(uint16_t);
  return half_to_float(load<uint16_t>(factors, lane)) *
         static_cast<float>(load<int8_t>(values, lane));
}

// The code of one output for input `input` of those whose codes lie there one after the other.
int code_at(const uint8_t* codes, int bits, size_t lane, size_t input) {
  const size_t step = input / kStepInputs;
  const size_t place = lane * kStepInputs + input % kStepInputs;
  if (bits == 8) return codes[step * kQuantLineBytes + place];
  const int pair = codes[step / 2 * kQuantLineBytes + place];
  return step % 2 == 0 ? pair & 15 : pair >> 4;
}

void quantized_row(const QuantizedWeight& weight, size_t id, float* out) {
  const uint8_t* tile = weight.blob + id / kQuantTileOutputs * weight.tile_bytes();
  const size_t lane = id % kQuantTileOutputs;
  const size_t group = weight.group == 0 ? weight.in_features : weight.group;
  for (size_t first = 0; first < weight.in_features; first += group) {
    const float scale = load_scale(weight, tile, first, 0, lane);
    const float min = weight.has_mins ? load_scale(weight, tile, first, 1, lane)
                                      : scale * static_cast<float>(-weight.zero_point);
    const uint8_t* codes = tile + weight.codes_at(first);
    const size_t count = std::min(group, weight.in_features - first);
    for (size_t k = 0; k < count; ++k) {
      const double product = static_cast<double>(scale) * code_at(codes, weight.bits, lane, k);
      out[first + k] = static_cast<float>(product + min);
    }
  }
}

template <class T>
void copy_row(const T* tile, size_t lane, size_t width, size_t in_features, T* out) {
  for (size_t k = 0; k < in_features; ++k) {
    out[k] = tile[k / width * kTileOutputs * width + lane * width + k % width];
  }
}

template <class T>
void copy_rows(const T* tiles, size_t width, size_t in_features, const int64_t* ids, size_t count,
               T* out) {
  const size_t tile_values = (in_features + width - 1) / width * width * kTileOutputs;
  for (size_t i = 0; i < count; ++i) {
    const auto id = static_cast<size_t>(ids[i]);
    copy_row(tiles + id / kTileOutputs * tile_values, id % kTileOutputs, width, in_features,
             out + i * in_features);
  }
}

}  // namespace

void packed_rows(const void* tiles, Element type, size_t in_features, const int64_t* ids,
                 size_t count, void* out) {
  if (type == Element::kFloat32) {
    copy_rows(static_cast<const uint32_t*>(tiles), 1, in_features, ids, count,
              static_cast<uint32_t*>(out));
  } else {
    copy_rows(static_cast<const uint16_t*>(tiles), 2, in_features, ids, count,
              static_cast<uint16_t*>(out));
  }
}

void quantized_rows(const QuantizedWeight& weight, const int64_t* ids, size_t count, Element type,
                    void* out) {
  const bool is_wide = type == Element::kFloat32;
  std::vector<float> row(is_wide ? 0 : weight.in_features);
  for (size_t i = 0; i < count; ++i) {
    const size_t at = i * weight.in_features;
    float* to = is_wide ? static_cast<float*>(out) + at : row.data();
    quantized_row(weight, static_cast<size_t>(ids[i]), to);
    if (is_wide) continue;
    uint16_t* narrow = static_cast<uint16_t*>(out) + at;
    for (size_t k = 0; k < weight.in_features; ++k) narrow[k] = float_to_bf16(to[k]);
  }
}

}  // namespace plait
