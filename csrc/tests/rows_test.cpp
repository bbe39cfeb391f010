// Runs linear, rms_norm and gated_activation over awkward shapes on buffers of exact size, for
// sanitizers: built by tests/ops/test_rows_memory.py without torch. Linear is given small whole
// numbers, so that its sums are exact on every instruction set.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu_features.h"
#include "gated_activation.h"
#include "linear.h"
#include "rms_norm.h"

namespace {

using plait::CpuIsa;
using plait::Element;

int failures = 0;

void expect(bool holds, const char* what, const char* isa, size_t rows, size_t outputs,
            size_t inputs) {
  if (holds) return;
  std::printf("%s is wrong on %s: %zu rows, %zu outputs, %zu inputs\n", what, isa, rows, outputs,
              inputs);
  ++failures;
}

// Values of either type in one heap block of exactly their size.
class Values {
 public:
  Values(size_t count, Element type) : type_(type), bytes_(count * plait::element_size(type)) {}
  void set(size_t i, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const auto half = static_cast<uint16_t>(bits >> 16);
    if (type_ == Element::kFloat32) {
      std::memcpy(&bytes_[i * 4], &value, 4);
    } else {
      std::memcpy(&bytes_[i * 2], &half, 2);
    }
  }
  float get(size_t i) const {
    uint32_t bits = 0;
    if (type_ == Element::kFloat32) {
      std::memcpy(&bits, &bytes_[i * 4], 4);
    } else {
      uint16_t half;
      std::memcpy(&half, &bytes_[i * 2], 2);
      bits = static_cast<uint32_t>(half) << 16;
    }
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  void* data() { return bytes_.data(); }

 private:
  Element type_;
  std::vector<char> bytes_;
};

float input(size_t row, size_t k) { return static_cast<float>((row * 7 + k * 3) % 5) - 2.0f; }
float weight(size_t output, size_t k) { return static_cast<float>((output * 5 + k) % 3) - 1.0f; }

void run_linear(const plait::LinearKernels& kernels, const char* isa, Element type, size_t rows,
                size_t outputs, size_t inputs) {
  const size_t width = type == Element::kFloat32 ? 1 : 2;
  const size_t steps = (inputs + width - 1) / width;
  const size_t tiles = (outputs + plait::kTileOutputs - 1) / plait::kTileOutputs;
  const size_t step_values = plait::kTileOutputs * width;
  const size_t stride = inputs + 3;  // rows lie apart; nothing follows the last one
  Values x((rows - 1) * stride + inputs, type);
  Values packed(tiles * steps * step_values, type);
  Values bias(outputs, type);
  Values out(rows * outputs, Element::kFloat32);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t k = 0; k < inputs; ++k) x.set(r * stride + k, input(r, k));
  }
  for (size_t n = 0; n < outputs; ++n) {
    bias.set(n, static_cast<float>(n % 4));
    const size_t tile = n / plait::kTileOutputs * steps * step_values;
    for (size_t k = 0; k < inputs; ++k) {
      const size_t lane = n % plait::kTileOutputs * width + k % width;
      packed.set(tile + k / width * step_values + lane, weight(n, k));
    }
  }

  plait::LinearArgs args{};
  args.x = x.data();
  args.rows = rows;
  args.x_stride = stride;
  args.in_features = inputs;
  args.weight = packed.data();
  args.weight_type = type;
  args.out_features = outputs;
  args.bias = bias.data();
  args.bias_type = type;
  args.out = out.data();
  args.out_stride = outputs;
  args.out_type = Element::kFloat32;
  const auto in_parts = [](size_t count, size_t, const plait::Body& body) {
    for (size_t i = 0; i < count; ++i) body(i, i + 1);
  };
  plait::linear(kernels, args, in_parts);

  bool right = true;
  for (size_t r = 0; r < rows; ++r) {
    for (size_t n = 0; n < outputs; ++n) {
      float sum = static_cast<float>(n % 4);
      for (size_t k = 0; k < inputs; ++k) sum += input(r, k) * weight(n, k);
      right = right && out.get(r * outputs + n) == sum;
    }
  }
  expect(right, "linear", isa, rows, outputs, inputs);
}

void run_rms_norm(plait::RmsNormKernel kernel, const char* isa, Element type, size_t size) {
  const size_t rows = 3;
  Values x(rows * size, type);
  Values weight_values(size, type);
  Values out(rows * size, type);
  for (size_t i = 0; i < rows * size; ++i) x.set(i, i % 2 == 0 ? 2.0f : -2.0f);
  for (size_t i = 0; i < size; ++i) weight_values.set(i, 0.5f);
  plait::RmsNormArgs args{};
  args.x = x.data();
  args.type = type;
  args.outer = rows;
  args.inner = 1;
  args.size = size;
  args.outer_stride = size;
  args.weight = weight_values.data();
  args.weight_type = type;
  args.out = out.data();
  kernel(args, 0, rows);
  bool right = true;
  for (size_t i = 0; i < rows * size; ++i) right = right && std::fabs(out.get(i)) == 0.5f;
  expect(right, "rms_norm", isa, rows, size, size);
}

void run_gated_activation(plait::GatedActivationKernel kernel, const char* isa, Element type,
                          size_t size) {
  const size_t rows = 3;
  Values x(rows * 2 * size, type);
  Values out(rows * size, type);
  for (size_t i = 0; i < rows * 2 * size; ++i) x.set(i, 30.0f);  // where every activation is x
  plait::GatedActivationArgs args{};
  args.x = x.data();
  args.type = type;
  args.size = size;
  args.row_stride = 2 * size;
  args.out = out.data();
  bool right = true;
  for (const auto activation :
       {plait::Activation::kSilu, plait::Activation::kGeluTanh, plait::Activation::kGelu}) {
    args.activation = activation;
    kernel(args, 0, rows);
    for (size_t i = 0; i < rows * size; ++i) right = right && std::fabs(out.get(i) - 900.0f) < 5.0f;
  }
  expect(right, "gated_activation", isa, rows, size, 2 * size);
}

void run_all(CpuIsa isa, const plait::LinearKernels& kernels, plait::RmsNormKernel norm,
             plait::GatedActivationKernel activation) {
  if (isa > plait::best_cpu_isa()) return;
  const char* name = plait::cpu_isa_name(isa);
  for (const Element type : {Element::kFloat32, Element::kBfloat16}) {
    for (const size_t inputs : {1, 2, 17, 600}) {
      for (const size_t outputs : {1, 15, 16, 50, 113}) {
        for (const size_t rows : {1, 2, 3, 4, 5, 6, 7, 13}) {
          run_linear(kernels, name, type, rows, outputs, inputs);
        }
      }
    }
    run_linear(kernels, name, type, plait::kChunkRows + 1, 20, 5);
    for (const size_t size : {1, 4, 7, 16, 65, 100}) {
      run_rms_norm(norm, name, type, size);
      run_gated_activation(activation, name, type, size);
    }
  }
}

}  // namespace

int main() {
  run_all(CpuIsa::kPlain, plait::linear_kernels_plain(), plait::rms_norm_plain,
          plait::gated_activation_plain);
#if PLAIT_HAS_X86_SOURCES
  run_all(CpuIsa::kAvx2, plait::linear_kernels_avx2(), plait::rms_norm_avx2,
          plait::gated_activation_avx2);
  run_all(CpuIsa::kAvx512, plait::linear_kernels_avx512(), plait::rms_norm_avx512,
          plait::gated_activation_avx512);
  run_all(CpuIsa::kAvx512Bf16, plait::linear_kernels_avx512_bf16(), plait::rms_norm_avx512,
          plait::gated_activation_avx512);
#endif
  return failures == 0 ? 0 : 1;
}
