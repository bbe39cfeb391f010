// Rows to whole numbers, and into panels, see quantized_linear.h and quantized_kernel.h: templates
// over an instruction set's vectors.

#pragma once

#include "quantized_kernel.h"

namespace plait {
namespace {

// What a row group is multiplied by to become codes, and back.
struct GroupScale {
  float inverse;
  float scale;

  // `most` is the greatest size in the group.
  explicit GroupScale(float most) {
    const bool is_zero = !(most > 1e-30f);  // where 127 / most could overflow
    const bool is_finite = most < __builtin_inff();
    inverse = is_finite && !is_zero ? 127.0f / most : 0.0f;
    scale = is_finite ? (is_zero ? 0.0f : most * (1.0f / 127.0f)) : __builtin_nanf("");
  }
};

template <class Q, class T, int kGroup>
void quantize_row(const QuantizeRowsArgs& args, const T* x, size_t row) {
  const size_t groups = args.padded_inputs / kGroup;
  const size_t whole = args.in_features / kGroup;
  int8_t* codes = args.codes + row * args.padded_inputs;
  float* scales = args.scales + row * groups;
  int32_t* sums = args.sums + row * groups;
  for (size_t g = 0; g < whole; ++g) {
    sums[g] = Q::template quantize_group<T, kGroup>(x + g * kGroup, codes + g * kGroup, scales + g);
  }
  for (size_t g = whole; g < groups; ++g) {
    const size_t first = g * kGroup;
    T padded[kGroup] = {};
    if (first < args.in_features) {
      std::memcpy(padded, x + first, (args.in_features - first) * sizeof(T));
    }
    sums[g] = Q::template quantize_group<T, kGroup>(padded, codes + first, scales + g);
  }
}

template <class Q, int kGroup>
void quantize_rows_of(const QuantizeRowsArgs& args, size_t begin, size_t end) {
  for (size_t row = begin; row < end; ++row) {
    if (args.x_type == Element::kFloat32) {
      const auto* x = static_cast<const float*>(args.x) + row * args.x_stride;
      quantize_row<Q, float, kGroup>(args, x, row);
    } else {
      const auto* x = static_cast<const uint16_t*>(args.x) + row * args.x_stride;
      quantize_row<Q, uint16_t, kGroup>(args, x, row);
    }
  }
}

template <class Q>
void quantize_rows_of(const QuantizeRowsArgs& args, size_t begin, size_t end) {
  if (args.row_group == kRowGroup) {
    quantize_rows_of<Q, kRowGroup>(args, begin, end);
  } else {
    quantize_rows_of<Q, kRowGroup / 2>(args, begin, end);
  }
}

// Steps of kRows rows that lie `stride` bytes apart, one beside the other.
template <int kRows, size_t kStepBytes>
PLAIT_INLINE void interleave(const char* from, size_t stride, size_t steps, char* to) {
  for (size_t s = 0; s < steps; ++s, from += kStepBytes) {
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r, to += kStepBytes) {
      std::memcpy(to, from + static_cast<size_t>(r) * stride, kStepBytes);
    }
  }
}

// What a row's sums begin with where minimums are not stored, see QuantizedJob.
template <class Q, Codes kCodes, int kRows>
PLAIT_INLINE int32_t first_sums(int zero_point, int32_t sum, const int8_t* codes, size_t group) {
  if constexpr (Q::kPairs && kCodes != Codes::kBytes) {
    const int32_t first = Q::sum_of_first_pairs(codes, group);
    const auto low = static_cast<uint16_t>(-zero_point * first);
    const auto high = static_cast<uint16_t>(-zero_point * (sum - first));
    return static_cast<int32_t>(static_cast<uint32_t>(high) << 16 | low);
  } else {
    return (Q::template zero_code<kCodes, kRows>() - zero_point) * sum;
  }
}

template <class Q, Codes kCodes, bool kMins, int kRows>
void pack_panel_rows(const QuantizedWeight& weight, const QuantizedRows& from, size_t first_row,
                     char* panel) {
  constexpr size_t kBytes = Q::template step_bytes<kCodes, kRows, kMins>();
  const size_t group = weight.row_group();
  const size_t steps = group / kStepInputs;
  const int8_t* codes = from.codes + first_row * from.row_bytes;
  const float* scales = from.scales + first_row * from.row_groups;
  const int32_t* sums = from.sums + first_row * from.row_groups;
  for (size_t g = 0; g < from.row_groups; ++g, codes += group) {
    if constexpr (kBytes == kStepInputs) {
      interleave<kRows, kBytes>(reinterpret_cast<const char*>(codes), from.row_bytes, steps, panel);
    } else {
      int16_t wide[kRows][kRowGroup];
      for (int r = 0; r < kRows; ++r) {
        Q::widen(codes + static_cast<size_t>(r) * from.row_bytes, group, wide[r]);
      }
      interleave<kRows, kBytes>(reinterpret_cast<const char*>(wide), sizeof(wide[0]), steps, panel);
    }
    panel += steps * kRows * kBytes;
    PLAIT_UNROLL
    for (size_t r = 0; r < kRows; ++r) {
      const size_t place = r * from.row_groups + g;
      std::memcpy(panel + 4 * r, scales + place, 4);
      if constexpr (kMins) {
        const float offset = scales[place] * static_cast<float>(sums[place]);
        std::memcpy(panel + 4 * (kRows + r), &offset, 4);
      } else {
        const int32_t offset = first_sums<Q, kCodes, kRows>(weight.zero_point, sums[place],
                                                            codes + r * from.row_bytes, group);
        std::memcpy(panel + 4 * (kRows + r), &offset, 4);
      }
    }
    panel += 8 * kRows;
  }
}

using PackRows = void (*)(const QuantizedWeight&, const QuantizedRows&, size_t, char*);

template <class Q, Codes kCodes, bool kMins, int kRows>
constexpr PackRows pack_rows_if_it_fits() {
  if constexpr (kRows <= Q::kMaxRows) {
    return &pack_panel_rows<Q, kCodes, kMins, kRows>;
  } else {
    return nullptr;
  }
}

template <class Q, Codes kCodes, bool kMins>
PackRows find_pack_rows(size_t rows) {
  static constexpr PackRows kTable[] = {
      nullptr,
      pack_rows_if_it_fits<Q, kCodes, kMins, 1>(),
      pack_rows_if_it_fits<Q, kCodes, kMins, 2>(),
      pack_rows_if_it_fits<Q, kCodes, kMins, 3>(),
      pack_rows_if_it_fits<Q, kCodes, kMins, 4>(),
      pack_rows_if_it_fits<Q, kCodes, kMins, 5>(),
      pack_rows_if_it_fits<Q, kCodes, kMins, 6>(),
      pack_rows_if_it_fits<Q, kCodes, kMins, 7>(),
      pack_rows_if_it_fits<Q, kCodes, kMins, 8>(),
  };
  return kTable[rows];
}

template <class Q, Codes kCodes>
PackRows find_pack_rows(size_t rows, bool has_mins) {
  return has_mins ? find_pack_rows<Q, kCodes, true>(rows) : find_pack_rows<Q, kCodes, false>(rows);
}

template <class Q>
void pack_rows(const QuantizedWeight& weight, const QuantizedRows& from, size_t first_row,
               size_t rows, char* panel) {
  const PackRows pack = weight.bits == 4 ? find_pack_rows<Q, Codes::kSmall>(rows, weight.has_mins)
                                         : find_pack_rows<Q, Codes::kBytes>(rows, weight.has_mins);
  pack(weight, from, first_row, panel);
}

}  // namespace
}  // namespace plait
