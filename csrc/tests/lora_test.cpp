// Runs low-rank updates over awkward shapes on buffers of exact size, for sanitizers: built by
// tests/ops/test_lora_memory.py without torch. Values are small whole numbers and halves, so that
// all sums are exact on every instruction set, but those of codes.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu_features.h"
#include "lora.h"

namespace {

using plait::CpuIsa;
using plait::Element;
using plait::LoraType;

int failures = 0;

void put(char* to, Element type, float value) {
  if (type == Element::kFloat32) {
    std::memcpy(to, &value, sizeof(value));
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const auto half = static_cast<uint16_t>(bits >> 16);
  std::memcpy(to, &half, sizeof(half));
}

float get(const char* from, Element type) {
  uint32_t bits = 0;
  if (type == Element::kFloat32) {
    std::memcpy(&bits, from, sizeof(bits));
  } else {
    uint16_t half;
    std::memcpy(&half, from, sizeof(half));
    bits = static_cast<uint32_t>(half) << 16;
  }
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float x_at(size_t row, size_t k) { return static_cast<float>((row + k) % 7 == 0) - (k % 11 == 1); }
float a_at(size_t rank, size_t k) { return static_cast<float>((rank * 3 + k) % 3) - 1.0f; }
float b_at(size_t output, size_t rank) { return static_cast<float>((output + rank * 2) % 9 == 0); }
float y_at(size_t row, size_t output) { return static_cast<float>((row * 5 + output) % 4); }

// An adapter with one leaf of two parts: plain, and with every vector.
struct Adapter {
  std::vector<char> weights;
  std::vector<plait::LoraPart> parts;
  plait::LoraLeaf leaf{};
  LoraType type;

  Adapter(LoraType weights_type, size_t inputs, size_t rank, size_t outputs) : type(weights_type) {
    leaf = {0, static_cast<int64_t>(inputs), static_cast<int64_t>(2 * rank), 0, 2};
    if (type == LoraType::kInt8) vector(2 * rank, 1.0f);  // factors
    store(2 * rank, inputs, [](size_t r, size_t k) { return a_at(r, k); });
    for (size_t p = 0; p < 2; ++p) {
      weights.resize((weights.size() + 3) / 4 * 4);
      plait::LoraPart part{static_cast<int64_t>(weights.size()),
                           static_cast<int64_t>(p * outputs),
                           static_cast<int64_t>(outputs),
                           static_cast<int64_t>(rank),
                           -1,
                           -1,
                           -1,
                           2.0};
      store(outputs, rank, [](size_t n, size_t r) { return b_at(n, r); });
      if (p == 1) {
        part.b_bias = vector(outputs, 1.0f);
        part.g = vector(outputs, 2.0f);
        part.bias = vector(outputs, 3.0f);
      }
      parts.push_back(part);
    }
    weights.resize(weights.size() + plait::kLoraSlack);
    weights.shrink_to_fit();
  }

  template <class At>
  void store(size_t rows, size_t columns, const At& at) {
    const size_t size = plait::lora_row_bytes(type, 2) / 2;
    const size_t stored = plait::lora_row_bytes(type, columns) / size;
    char* to = grow(rows * stored * size);
    const size_t together = type == LoraType::kFloat32 ? 1 : 2;
    for (size_t tile = 0; tile < rows; tile += plait::kTileOutputs) {
      const size_t last = std::min(rows, tile + plait::kTileOutputs);
      for (size_t k = 0; k < stored; k += together) {
        for (size_t n = tile; n < last; ++n) {
          for (size_t i = k; i < std::min(stored, k + together); ++i, to += size) {
            put_weight(to, i < columns ? at(n, i) : 0.0f);
          }
        }
      }
    }
  }

  void put_weight(char* to, float value) const {
    if (type == LoraType::kInt8) {
      *to = static_cast<char>(value);
    } else {
      put(to, type == LoraType::kFloat32 ? Element::kFloat32 : Element::kBfloat16, value);
    }
  }

  int64_t vector(size_t count, float value) {
    weights.resize((weights.size() + 3) / 4 * 4);
    const auto at = static_cast<int64_t>(weights.size());
    char* to = grow(count * sizeof(float));
    for (size_t i = 0; i < count; ++i) put(to + i * sizeof(float), Element::kFloat32, value);
    return at;
  }

  char* grow(size_t bytes) {
    const size_t at = weights.size();
    weights.resize(at + bytes);
    return weights.data() + at;
  }
};

float expected(size_t row, size_t output, size_t inputs, size_t rank, size_t outputs,
               bool by_token) {
  const size_t part = output / outputs;
  float sum = 0.0f;
  for (size_t r = 0; r < rank; ++r) {
    float t = 0.0f;
    for (size_t k = 0; k < inputs; ++k) {
      const float x = by_token ? static_cast<float>(k == row % inputs) : x_at(row, k);
      t += x * a_at(part * rank + r, k);
    }
    sum += t * b_at(output % outputs, r);
  }
  const float y = y_at(row, output);
  if (part == 0) return y + 0.5f * 2.0f * sum;
  return 2.0f * (y - 3.0f + 0.5f * 2.0f * (sum + 1.0f)) + 3.0f;
}

// Codes round inputs and t.
bool is_right(LoraType weights, float value, float wanted) {
  if (weights != LoraType::kInt8) return value == wanted;
  return std::abs(value - wanted) <= 0.01f * (1.0f + std::abs(wanted));
}

void run(const plait::LoraKernels& kernels, const char* isa, LoraType weights, size_t rows,
         size_t outputs, size_t inputs, size_t rank, bool by_token) {
  const Element type = weights == LoraType::kFloat32 ? Element::kFloat32 : Element::kBfloat16;
  const size_t size = plait::element_size(type);
  const Adapter adapter(weights, inputs, rank, outputs);
  const size_t x_stride = inputs + 3;  // rows lie apart; nothing follows the last one
  const size_t out_stride = 2 * outputs + 1;
  std::vector<char> x(((rows - 1) * x_stride + inputs) * size);
  std::vector<char> out(((rows - 1) * out_stride + 2 * outputs) * size);
  std::vector<int64_t> tokens(rows);
  for (size_t r = 0; r < rows; ++r) {
    tokens[r] = static_cast<int64_t>(r % inputs);
    for (size_t k = 0; k < inputs; ++k) put(&x[(r * x_stride + k) * size], type, x_at(r, k));
    for (size_t n = 0; n < 2 * outputs; ++n) {
      put(&out[(r * out_stride + n) * size], type, y_at(r, n));
    }
  }
  // The last row has no adapter, where there are others.
  const size_t held = rows > 1 ? rows - 1 : rows;
  const plait::LoraSegment segment{
      0, held, adapter.weights.data(), weights, adapter.leaf, adapter.parts.data(), 0.5};
  plait::LoraArgs args{};
  args.x = by_token ? nullptr : x.data();
  args.token_ids = tokens.data();
  args.x_type = type;
  args.x_stride = x_stride;
  args.inputs = by_token ? 0 : inputs;
  args.out = out.data();
  args.out_type = type;
  args.out_stride = out_stride;
  args.segments = &segment;
  args.num_segments = 1;
  plait::lora(kernels, args, [](size_t count, size_t, const plait::Body& body) { body(0, count); });

  bool right = true;
  for (size_t r = 0; r < rows; ++r) {
    for (size_t n = 0; n < 2 * outputs; ++n) {
      const float value = r < held ? expected(r, n, inputs, rank, outputs, by_token) : y_at(r, n);
      std::vector<char> rounded(size);
      put(rounded.data(), type, value);
      const float found = get(&out[(r * out_stride + n) * size], type);
      right = right && is_right(weights, found, get(rounded.data(), type));
    }
  }
  if (right) return;
  std::printf("lora is wrong on %s: %zu rows, %zu outputs, %zu inputs, rank %zu\n", isa, rows,
              outputs, inputs, rank);
  ++failures;
}

void run_all(CpuIsa isa, const plait::LoraKernels& kernels) {
  if (isa > plait::best_cpu_isa()) return;
  for (const LoraType type : {LoraType::kFloat32, LoraType::kBfloat16, LoraType::kInt8}) {
    for (const size_t inputs : {1, 3, 4, 6, 33}) {
      for (const size_t outputs : {1, 15, 16, 70}) {
        for (const size_t rank : {1, 4, 7, 8, 11, 19}) {
          for (const size_t rows : {1, 2, 3, 4, 5, 6, 7, 30}) {
            run(kernels, plait::cpu_isa_name(isa), type, rows, outputs, inputs, rank, false);
          }
          run(kernels, plait::cpu_isa_name(isa), type, 5, outputs, inputs, rank, true);
        }
      }
    }
    // More than one group of codes.
    for (const size_t rows : {1, 7}) {
      run(kernels, plait::cpu_isa_name(isa), type, rows, 20, 2 * plait::kCodeGroup + 5,
          plait::kCodeGroup + 3, false);
    }
  }
}

}  // namespace

int main() {
  run_all(CpuIsa::kPlain, plait::lora_kernels_plain());
#if PLAIT_HAS_X86_SOURCES
  run_all(CpuIsa::kAvx2, plait::lora_kernels_avx2());
  run_all(CpuIsa::kAvx512, plait::lora_kernels_avx512());
#endif
  return failures == 0 ? 0 : 1;
}
