// Runs varlen_attention over awkward shapes on buffers of exact size, for sanitizers: built by
// tests/ops/test_varlen_memory.py without torch.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "varlen_attention.h"

namespace {

constexpr int64_t kHeads = 2;

uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

float from_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

float widened(float value) { return value; }
float widened(uint16_t value) { return from_bf16(value); }

template <class T>
std::vector<T> random_values(int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (sizeof(T) == 2) {
      values.push_back(to_bf16(normal(random)));
    } else {
      values.push_back(normal(random));
    }
  }
  return values;
}

template <class T>
bool right(int64_t head_size, const std::vector<int32_t>& rows, const std::vector<int32_t>& keys,
           plait::CpuIsa isa, std::mt19937& random) {
  const int64_t row_values = kHeads * head_size;
  std::vector<T> query = random_values<T>(rows.back() * row_values, random);
  std::vector<T> key = random_values<T>(keys.back() * row_values, random);
  std::vector<T> value = random_values<T>(keys.back() * row_values, random);
  std::vector<T> out(query.size());
  plait::VarlenProblem p{};
  p.query = {query.data(), row_values, head_size};
  p.key = {key.data(), row_values, head_size};
  p.value = {value.data(), row_values, head_size};
  p.query_bounds = rows.data();
  p.key_bounds = keys.data();
  p.num_segments = static_cast<int64_t>(rows.size()) - 1;
  p.num_heads = kHeads;
  p.head_size = head_size;
  p.scale = 0.25f;
  p.out = out.data();
  p.is_bf16 = sizeof(T) == 2;
  plait::varlen_attention(p, isa, 1, [](int64_t count, const std::function<void(int64_t)>& body) {
    for (int64_t i = 0; i < count; ++i) body(i);
  });

  for (size_t s = 0; s + 1 < rows.size(); ++s) {
    for (int64_t row = rows[s] * kHeads; row < rows[s + 1] * kHeads; ++row) {
      std::vector<double> sum(static_cast<size_t>(head_size));
      double weights = keys[s] == keys[s + 1] ? 1 : 0;
      for (int64_t t = keys[s]; t < keys[s + 1]; ++t) {
        const int64_t from = t * row_values + row % kHeads * head_size;
        double score = 0;
        for (int64_t d = 0; d < head_size; ++d) {
          score += double(widened(query[static_cast<size_t>(row * head_size + d)])) *
                   double(widened(key[static_cast<size_t>(from + d)]));
        }
        const double weight = std::exp(score * 0.25);
        weights += weight;
        for (int64_t d = 0; d < head_size; ++d) {
          sum[static_cast<size_t>(d)] +=
              weight * double(widened(value[static_cast<size_t>(from + d)]));
        }
      }
      for (int64_t d = 0; d < head_size; ++d) {
        const double exact = sum[static_cast<size_t>(d)] / weights;
        const double got = double(widened(out[static_cast<size_t>(row * head_size + d)]));
        const double slack = p.is_bf16 ? 1e-3 + std::abs(exact) / 200 : 1e-4;
        if (!(std::abs(got - exact) < slack)) {
          std::printf("isa %s D %d bf16 %d segment %d of %d keys: %g, not %g\n",
                      plait::cpu_isa_name(isa), int(head_size), int(p.is_bf16), int(s),
                      int(keys[s + 1] - keys[s]), got, exact);
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  std::mt19937 random(7);
  bool all_right = true;
  int num_cases = 0;
  const std::vector<std::vector<int32_t>> cuts = {
      {0}, {0, 0, 1}, {0, 5, 5, 38}, {0, 130}, {0, 390}};
  for (int isa = 0; isa <= static_cast<int>(plait::best_cpu_isa()); ++isa) {
    for (const int64_t head_size : {1, 8, 17, 72, 80}) {
      for (const std::vector<int32_t>& rows : cuts) {
        std::vector<int32_t> keys = rows;
        if (rows.size() == 4) keys = {0, 0, 3, 39};
        const auto which = static_cast<plait::CpuIsa>(isa);
        all_right &= right<float>(head_size, rows, keys, which, random);
        all_right &= right<uint16_t>(head_size, rows, keys, which, random);
        num_cases += 2;
      }
    }
  }
  std::printf("%d cases\n", num_cases);
  return all_right ? EXIT_SUCCESS : EXIT_FAILURE;
}
