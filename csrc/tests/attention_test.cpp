// Runs the attention kernels over awkward shapes on buffers of exact size, for sanitizers: built by
// tests/ops/test_attention_memory.py without torch. Slots that no row may see hold NaN.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kv_write.h"
#include "paged_attention.h"

namespace {

using plait::AttentionProblem;

struct Shape {
  int64_t num_heads, num_kv_heads, head_size, block_size, window;
  bool is_bf16;
  bool is_codes;  // K and V are kept in whole numbers
};

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

// Values of either type in one heap block of exactly their size.
class Values {
 public:
  Values(size_t count, bool is_bf16) : is_bf16_(is_bf16), bytes_(count * (is_bf16 ? 2 : 4)) {}
  void set(size_t i, float value) {
    if (is_bf16_) {
      const uint16_t half = to_bf16(value);
      std::memcpy(&bytes_[i * 2], &half, 2);
    } else {
      std::memcpy(&bytes_[i * 4], &value, 4);
    }
  }
  float get(size_t i) const {
    if (is_bf16_) {
      uint16_t half;
      std::memcpy(&half, &bytes_[i * 2], 2);
      return from_bf16(half);
    }
    float value;
    std::memcpy(&value, &bytes_[i * 4], 4);
    return value;
  }
  char* data() { return bytes_.data(); }
  size_t size() const { return bytes_.size() / (is_bf16_ ? 2 : 4); }
  void fill_random(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < size(); ++i) set(i, normal(random));
  }

 private:
  bool is_bf16_;
  std::vector<char> bytes_;
};

// What a slot holds of a head of K or V, where all of it are codes.
float of_codes(const char* slot, int64_t head_size, size_t d) {
  float scale;
  std::memcpy(&scale, slot + head_size, sizeof(scale));
  return scale * static_cast<float>(static_cast<int8_t>(slot[d]));
}

// One sequence of `length` tokens whose last `rows` are computed; true if the outputs are right.
// In every other case the middle half of the rows is a range whose tokens see each other.
bool right(const Shape& shape, int64_t length, int64_t rows, plait::CpuIsa isa,
           std::mt19937& random) {
  const int64_t blocks = (length + shape.block_size - 1) / shape.block_size;
  const int64_t element = shape.is_bf16 ? 2 : 4;
  const int64_t stored = shape.is_codes ? 1 : element;
  const int64_t slot_size = shape.head_size + (shape.is_codes ? plait::kKvScaleBytes : 0);
  const int64_t half = shape.num_kv_heads * shape.block_size * slot_size;
  // Of all ones, as every type's NaN.
  std::vector<char> pages(static_cast<size_t>((blocks + 1) * 2 * half * stored), '\xff');

  // The table runs backwards through the blocks; what lies before every row's window is null.
  const int64_t first =
      shape.window == 0 ? 0 : std::max<int64_t>(0, length - rows - shape.window + 1);
  std::vector<int32_t> table(static_cast<size_t>(blocks), 0);
  std::vector<int64_t> slots(static_cast<size_t>(length), -1);
  for (int64_t i = first / shape.block_size; i < blocks; ++i) {
    table[static_cast<size_t>(i)] = static_cast<int32_t>(blocks - i);
  }
  for (int64_t i = first; i < length; ++i) {
    slots[static_cast<size_t>(i)] =
        table[static_cast<size_t>(i / shape.block_size)] * shape.block_size + i % shape.block_size;
  }
  const size_t row_values = static_cast<size_t>(shape.num_kv_heads * shape.head_size);
  Values key(static_cast<size_t>(length) * row_values, shape.is_bf16);
  Values value(static_cast<size_t>(length) * row_values, shape.is_bf16);
  key.fill_random(random);
  value.fill_random(random);
  const int64_t head_bytes = shape.head_size * element;
  const int64_t row_bytes = shape.num_kv_heads * head_bytes;
  const auto codes = !shape.is_codes ? plait::KvCodes::kNone
                     : shape.is_bf16 ? plait::KvCodes::kOfBfloat16
                                     : plait::KvCodes::kOfFloat32;
  plait::kv_write(
      {pages.data(), 2 * half * stored, half * stored, slot_size * stored, shape.block_size, codes},
      {key.data(), row_bytes, head_bytes, head_bytes},
      {value.data(), row_bytes, head_bytes, head_bytes}, slots.data(), shape.num_kv_heads, 0,
      length);

  // What was written, as kernels are to read it.
  std::vector<float> keys(key.size()), values(value.size());
  for (int64_t t = first; t < length; ++t) {
    const int64_t slot = slots[static_cast<size_t>(t)];
    for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
      const char* const at = pages.data() + slot / shape.block_size * 2 * half * stored +
                             (h * shape.block_size + slot % shape.block_size) * slot_size * stored;
      for (size_t d = 0; d < static_cast<size_t>(shape.head_size); ++d) {
        const size_t i = static_cast<size_t>((t * shape.num_kv_heads + h) * shape.head_size) + d;
        keys[i] = shape.is_codes ? of_codes(at, shape.head_size, d) : key.get(i);
        values[i] = shape.is_codes ? of_codes(at + half, shape.head_size, d) : value.get(i);
        const float slack = shape.is_codes ? 0.05f : 0.0f;  // half a code of 127, of 6 at most
        if (std::abs(keys[i] - key.get(i)) > slack || std::abs(values[i] - value.get(i)) > slack) {
          std::printf("token %d head %d is not what was written\n", int(t), int(h));
          return false;
        }
      }
    }
  }

  Values query(static_cast<size_t>(rows * shape.num_heads * shape.head_size), shape.is_bf16);
  Values out(query.size(), shape.is_bf16);
  query.fill_random(random);
  const std::vector<int32_t> query_start{0, static_cast<int32_t>(rows)};
  const std::vector<int32_t> seq_lens{static_cast<int32_t>(length)};
  AttentionProblem p{};
  p.query = query.data();
  p.query_token_stride = shape.num_heads * shape.head_size;
  p.query_head_stride = shape.head_size;
  p.pages = pages.data();
  p.num_blocks = blocks + 1;
  p.block_stride = 2 * half;
  p.value_offset = half;
  p.slot_stride = slot_size;
  p.block_size = shape.block_size;
  p.block_table = table.data();
  p.block_table_stride = blocks;
  p.query_start = query_start.data();
  p.seq_lens = seq_lens.data();
  p.num_spans = 1;
  std::vector<int32_t> ends;
  const bool has_range = random() % 2 == 0;
  for (int64_t r = 0; r < rows; ++r) {
    const bool inside = has_range && r >= rows / 4 && r < rows - rows / 4;
    ends.push_back(static_cast<int32_t>(length - (inside ? rows / 4 : rows - r - 1)));
  }
  if (has_range) p.key_ends = ends.data();
  p.num_heads = shape.num_heads;
  p.num_kv_heads = shape.num_kv_heads;
  p.head_size = shape.head_size;
  p.scale = 0.25f;
  p.window = shape.window;
  p.out = out.data();
  p.is_bf16 = shape.is_bf16;
  p.is_codes = shape.is_codes;
  plait::paged_attention(p, isa, 1, [](int64_t count, const std::function<void(int64_t)>& body) {
    for (int64_t i = 0; i < count; ++i) body(i);
  });

  const int64_t group = shape.num_heads / shape.num_kv_heads;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t position = length - rows + r;
    const int64_t begin = shape.window == 0 ? 0 : std::max<int64_t>(0, position - shape.window + 1);
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      const auto q_at = static_cast<size_t>((r * shape.num_heads + h) * shape.head_size);
      const auto kv_at = [&](int64_t t) {
        return static_cast<size_t>((t * shape.num_kv_heads + h / group) * shape.head_size);
      };
      std::vector<double> sum(static_cast<size_t>(shape.head_size));
      double weights = 0;
      for (int64_t t = begin; t < ends[static_cast<size_t>(r)]; ++t) {
        double score = 0;
        for (size_t d = 0; d < sum.size(); ++d) score += query.get(q_at + d) * keys[kv_at(t) + d];
        const double weight = std::exp(score * 0.25);
        weights += weight;
        for (size_t d = 0; d < sum.size(); ++d) sum[d] += weight * values[kv_at(t) + d];
      }
      for (size_t d = 0; d < sum.size(); ++d) {
        const double exact = sum[d] / weights;
        const double slack = shape.is_bf16 ? 1e-3 + std::abs(exact) / 200 : 1e-4;
        if (!(std::abs(out.get(q_at + d) - exact) < slack)) {
          std::printf(
              "isa %s Hq %d Hkv %d D %d block %d window %d bf16 %d codes %d length %d rows %d: "
              "%g, not %g\n",
              plait::cpu_isa_name(isa), int(shape.num_heads), int(shape.num_kv_heads),
              int(shape.head_size), int(shape.block_size), int(shape.window), int(shape.is_bf16),
              int(shape.is_codes), int(length), int(rows), double(out.get(q_at + d)), exact);
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
  for (int isa = 0; isa <= static_cast<int>(plait::best_cpu_isa()); ++isa) {
    for (const auto& [is_bf16, is_codes] :
         {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
      for (const int64_t head_size : {1, 8, 17, 80}) {
        for (const int64_t block_size : {5, 16}) {
          for (const int64_t window : {0, 1, 20}) {
            for (const auto& [heads, kv_heads] : {std::pair{9, 3}, {7, 1}}) {
              const Shape shape{heads, kv_heads, head_size, block_size, window, is_bf16, is_codes};
              const int64_t length = 1 + static_cast<int64_t>(random() % 140);
              const int64_t rows = 1 + static_cast<int64_t>(random() % 9) % length;
              for (const int64_t n : {rows, std::min<int64_t>(length, 20)}) {
                all_right &= right(shape, length, n, static_cast<plait::CpuIsa>(isa), random);
                ++num_cases;
              }
            }
          }
        }
      }
    }
  }
  std::printf("%d cases\n", num_cases);
  return all_right ? EXIT_SUCCESS : EXIT_FAILURE;
}
