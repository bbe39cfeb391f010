// Runs quantised linear layers over awkward shapes on buffers of exact size, for sanitizers: built
// by tests/ops/test_quantized_memory.py without torch. Rows, scales and minimums are whole numbers,
// and each row group holds a 127, so that rows are quantised and summed exactly everywhere.

#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu_features.h"
#include "quantized_linear.h"

namespace {

using plait::CpuIsa;
using plait::Element;
using plait::ScaleType;

int failures = 0;

struct Shape {
  size_t rows, outputs, inputs;
};

struct Format {
  int bits;
  size_t group;
  bool has_mins;
  plait::ScaleType scales;
  bool exact;
};

float input(size_t row, size_t k) {
  return k % 16 == 0 ? 127.0f : static_cast<float>((row * 7 + k * 3) % 5) - 2.0f;
}
uint8_t code(size_t output, size_t k, int bits) {
  return static_cast<uint8_t>((output * 5 + k * 7 + (output ^ k)) % (bits == 4 ? 16 : 256));
}
float scale(size_t output, size_t group) { return static_cast<float>(1 + (output + group) % 2); }
float least(size_t output, size_t group) { return -static_cast<float>((output + group) % 3); }

void put(float value, ScaleType type, uint8_t* at) {
  if (type == ScaleType::kFloat) {
    std::memcpy(at, &value, 4);
    return;
  }
  if (type == ScaleType::kTwoLevels) {
    *at = static_cast<uint8_t>(static_cast<int8_t>(value));
    return;
  }
  // Halves of 0, 1, 2 and their negatives.
  uint16_t half = value == 0 ? 0 : value == 1 || value == -1 ? 0x3c00 : 0x4000;
  if (value < 0) half |= 0x8000;
  std::memcpy(at, &half, 2);
}

std::vector<uint8_t> pack(const plait::QuantizedWeight& weight) {
  std::vector<uint8_t> blob(weight.tiles() * weight.tile_bytes());
  const size_t width = weight.plane_bytes() / 16;
  for (size_t n = 0; n < weight.out_features; ++n) {
    uint8_t* tile = blob.data() + n / 16 * weight.tile_bytes();
    const bool is_two = weight.scales == ScaleType::kTwoLevels;
    for (size_t k = 0; is_two && k < weight.in_features; k += plait::kBlockInputs) {
      uint8_t* factors = tile + weight.span_at(k) + n % 16 * 2;
      put(1, ScaleType::kHalf, factors);
      if (weight.has_mins) put(-1, ScaleType::kHalf, factors + 32);
    }
    for (size_t g = 0; g < weight.groups(); ++g) {
      uint8_t* header = tile + weight.group_at(g * weight.group) + n % 16 * width;
      put(scale(n, g), weight.scales, header);
      if (!weight.has_mins) continue;
      put(is_two ? -least(n, g) : least(n, g), weight.scales, header + weight.plane_bytes());
    }
    for (size_t k = 0; k < weight.in_features; ++k) {
      uint8_t* line = tile + weight.codes_at(k);
      const size_t in_step = n % 16 * 4 + k % 4;
      if (weight.bits == 8) {
        line[in_step] = code(n, k, 8);
      } else {
        const int shift = k / 4 % 2 == 1 ? 4 : 0;
        line[in_step] |= static_cast<uint8_t>(code(n, k, 4) << shift);
      }
    }
  }
  return blob;
}

float expected(const plait::QuantizedWeight& weight, size_t row, size_t n) {
  float sum = static_cast<float>(n % 4);
  for (size_t k = 0; k < weight.in_features; ++k) {
    const size_t g = weight.group == 0 ? 0 : k / weight.group;
    const auto whole = static_cast<float>(code(n, k, weight.bits));
    const float value = weight.has_mins
                            ? scale(n, g) * whole + least(n, g)
                            : scale(n, g) * (whole - static_cast<float>(weight.zero_point));
    sum += input(row, k) * value;
  }
  return sum;
}

void in_parts(size_t count, size_t, const plait::Body& body) {
  for (size_t i = 0; i < count; ++i) body(i, i + 1);
}

void run(const plait::QuantizedKernels& kernels, const char* isa, const Shape& shape,
         const Format& format) {
  plait::QuantizedWeight weight{};
  weight.out_features = shape.outputs;
  weight.in_features = shape.inputs;
  weight.group = format.group;
  weight.bits = format.bits;
  weight.has_mins = format.has_mins;
  weight.zero_point = format.bits == 4 ? 8 : 128;
  weight.scales = format.scales;
  weight.exact = format.exact;
  const std::vector<uint8_t> blob = pack(weight);
  weight.blob = blob.data();

  const size_t stride = shape.inputs + 3;  // rows lie apart; nothing follows the last one
  std::vector<float> x((shape.rows - 1) * stride + shape.inputs);
  for (size_t r = 0; r < shape.rows; ++r) {
    for (size_t k = 0; k < shape.inputs; ++k) x[r * stride + k] = input(r, k);
  }
  std::vector<float> bias(shape.outputs);
  for (size_t n = 0; n < shape.outputs; ++n) bias[n] = static_cast<float>(n % 4);
  std::vector<float> out(shape.rows * shape.outputs);

  plait::QuantizedLinearArgs args{};
  args.x = x.data();
  args.x_type = Element::kFloat32;
  args.rows = shape.rows;
  args.x_stride = stride;
  args.weight = weight;
  args.bias = bias.data();
  args.bias_type = Element::kFloat32;
  args.out = out.data();
  args.out_stride = shape.outputs;
  args.out_type = Element::kFloat32;
  plait::quantized_linear(kernels, args, in_parts);
  for (size_t r = 0; r < shape.rows; ++r) {
    for (size_t n = 0; n < shape.outputs; ++n) {
      if (out[r * shape.outputs + n] == expected(weight, r, n)) continue;
      std::printf(
          "wrong on %s: row %zu of %zu, output %zu of %zu, %zu inputs, %d bits, group %zu, "
          "mins %d, scales %d, exact %d: %g, not %g\n",
          isa, r, shape.rows, n, shape.outputs, shape.inputs, format.bits, format.group,
          format.has_mins, static_cast<int>(format.scales), format.exact,
          out[r * shape.outputs + n], expected(weight, r, n));
      ++failures;
      return;
    }
  }
}

void run_all(CpuIsa isa, const plait::QuantizedKernels& kernels) {
  if (isa > plait::best_cpu_isa()) return;
  const char* name = plait::cpu_isa_name(isa);
  for (const int bits : {4, 8}) {
    for (const bool exact : {false, true}) {
      for (const bool has_mins : {false, true}) {
        for (const size_t group : {0, 16, 32, 64, 128}) {
          const auto scales = group == 64                  ? ScaleType::kFloat
                              : group == 16 || group == 32 ? ScaleType::kTwoLevels
                                                           : ScaleType::kHalf;
          const Format format{bits, group, has_mins, scales, exact};
          for (const size_t inputs : {16, 33, 130, 300}) {
            for (const size_t rows : {1, 2, 3, 5, 9}) {
              run(kernels, name, {rows, inputs % 2 == 0 ? 15u : 66u, inputs}, format);
            }
          }
          run(kernels, name, {10, 17, plait::kRowGroup * 40}, format);
        }
        run(kernels, name, {260, 20, 40}, {bits, 32, has_mins, ScaleType::kHalf, exact});
      }
    }
  }
}

}  // namespace

int main() {
  run_all(CpuIsa::kPlain, plait::quantized_kernels_plain());
#if PLAIT_HAS_X86_SOURCES
  run_all(CpuIsa::kAvx2, plait::quantized_kernels_avx2());
  run_all(CpuIsa::kAvx512, plait::quantized_kernels_avx512());
  run_all(CpuIsa::kAvx512Vnni, plait::quantized_kernels_vnni());
#endif
  return failures == 0 ? 0 : 1;
}
