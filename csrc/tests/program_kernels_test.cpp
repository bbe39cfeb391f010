// Runs layer_norm, rope, residual and best_token over awkward sizes on buffers of exact size, for
// sanitizers: built by tests/model/native/test_runner_memory.py without torch. Values are small
// powers of two, so that results are exact on every instruction set.

#include <cmath>
#include <cstdio>
#include <vector>

#include "best_token.h"
#include "cpu_features.h"
#include "layer_norm.h"
#include "residual.h"
#include "rope.h"
#include "vec.h"

namespace {

using plait::CpuIsa;
using plait::Element;

int failures = 0;

void expect(bool holds, const char* what, CpuIsa isa, size_t size) {
  if (holds) return;
  std::printf("%s is wrong on %s at size %zu\n", what, plait::cpu_isa_name(isa), size);
  ++failures;
}

template <class T>
constexpr Element kType = sizeof(T) == 4 ? Element::kFloat32 : Element::kBfloat16;

void put(float& to, float value) { to = value; }
void put(uint16_t& to, float value) { to = plait::float_to_bf16(value); }
float get(float value) { return value; }
float get(uint16_t value) { return plait::bf16_to_float(value); }

template <class T>
std::vector<T> filled(size_t count, float even, float odd) {
  std::vector<T> values(count);
  for (size_t i = 0; i < count; ++i) put(values[i], i % 2 == 0 ? even : odd);
  return values;
}

template <class T>
void run_layer_norm(plait::LayerNormKernel kernel, CpuIsa isa, size_t size) {
  std::vector<T> x = filled<T>(3 * size, 5.0f, 1.0f);  // mean 3, deviation 2 where size is even
  std::vector<T> weight = filled<T>(size, 0.5f, 0.5f);
  std::vector<T> bias = filled<T>(size, 1.0f, 1.0f);
  std::vector<T> out(3 * size);
  plait::LayerNormArgs args{};
  args.x = x.data();
  args.type = kType<T>;
  args.size = size;
  args.row_stride = size;
  args.weight = weight.data();
  args.weight_type = kType<T>;
  args.bias = bias.data();
  args.bias_type = kType<T>;
  args.out = out.data();
  kernel(args, 0, 3);
  bool right = true;
  for (size_t i = 0; i < 3 * size && size % 2 == 0; ++i) {
    right = right && get(out[i]) == (i % 2 == 0 ? 1.5f : 0.5f);
  }
  expect(right, "layer_norm", isa, size);
}

template <class T>
void run_rope(plait::RopeKernel kernel, CpuIsa isa, size_t rotary, bool is_interleaved) {
  const size_t rest = 1;  // values of a head that are not rotated
  const size_t head_size = rotary + rest;
  std::vector<T> x = filled<T>(2 * 2 * head_size, 1.0f, 1.0f);
  std::vector<float> cos(2 * rotary, 0.5f);
  std::vector<float> sin(2 * rotary, 0.25f);
  const std::vector<int64_t> positions{1, 0};
  plait::RopeArgs args{};
  args.x = x.data();
  args.type = kType<T>;
  args.row_stride = 2 * head_size;
  args.num_heads = 2;
  args.head_stride = head_size;
  args.cos = cos.data();
  args.sin = sin.data();
  args.rotary = rotary;
  args.positions = positions.data();
  args.is_interleaved = is_interleaved;
  args.round_products = true;
  kernel(args, 0, 2);
  bool right = true;
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t place = i % head_size;
    const bool is_first = is_interleaved ? place % 2 == 0 : place < rotary / 2;
    const float rotated = is_first ? 0.25f : 0.75f;
    right = right && get(x[i]) == (place >= rotary ? 1.0f : rotated);
  }
  expect(right, is_interleaved ? "rope of neighbours" : "rope of halves", isa, rotary);
}

template <class T>
void run_residual(const plait::ResidualKernels& kernels, CpuIsa isa, size_t size) {
  std::vector<T> out = filled<T>(size, 1.0f, 2.0f);
  std::vector<T> x = filled<T>(size, 4.0f, 8.0f);
  kernels.add({out.data(), x.data(), kType<T>, 0.5f}, 0, size);
  kernels.add({out.data(), x.data(), kType<T>, 1.0f}, 0, size);
  kernels.scale({out.data(), kType<T>, 2.0f}, 0, size);
  bool right = true;
  for (size_t i = 0; i < size; ++i) right = right && get(out[i]) == (i % 2 == 0 ? 14.0f : 28.0f);
  expect(right, "residual", isa, size);
}

using BestTokenKernel = plait::BestToken (*)(const float* logits, size_t size);

void run_best_token(BestTokenKernel kernel, CpuIsa isa, size_t size) {
  for (size_t best = 0; best < size; ++best) {
    std::vector<float> logits(size, -200.0f);  // next to nothing beside the largest
    logits[best] = 3.0f;
    logits[size - 1] = 3.0f;  // as large, perhaps: the first counts
    const plait::BestToken found = kernel(logits.data(), size);
    const bool is_alone = best == size - 1;
    expect(found.index == best && found.chance == (is_alone ? 1.0f : 0.5f), "best_token", isa,
           size);
  }
  std::vector<float> broken(size, 1.0f);
  broken[size / 2] = NAN;
  expect(std::isnan(kernel(broken.data(), size).chance), "best_token of NaN", isa, size);
}

template <class T>
void run_all(CpuIsa isa, plait::LayerNormKernel norm, plait::RopeKernel rope,
             const plait::ResidualKernels& residual, BestTokenKernel best_token) {
  if (isa > plait::best_cpu_isa()) return;
  for (const size_t size : {1, 2, 3, 4, 7, 8, 15, 16, 17, 34, 64, 70, 130}) {
    run_layer_norm<T>(norm, isa, size);
    run_rope<T>(rope, isa, 2 * size, true);
    run_rope<T>(rope, isa, 2 * size, false);
    run_residual<T>(residual, isa, size);
    run_best_token(best_token, isa, size);
  }
}

template <class T>
void run_on_every_instruction_set() {
  run_all<T>(CpuIsa::kPlain, plait::layer_norm_plain, plait::rope_plain,
             plait::residual_kernels_plain(), &plait::best_token_plain);
#if PLAIT_HAS_X86_SOURCES
  run_all<T>(CpuIsa::kAvx2, plait::layer_norm_avx2, plait::rope_avx2,
             plait::residual_kernels_avx2(), &plait::best_token_avx2);
  run_all<T>(CpuIsa::kAvx512, plait::layer_norm_avx512, plait::rope_avx512,
             plait::residual_kernels_avx512(), &plait::best_token_avx512);
#endif
}

}  // namespace

int main() {
  run_on_every_instruction_set<float>();
  run_on_every_instruction_set<uint16_t>();
  return failures == 0 ? 0 : 1;
}
