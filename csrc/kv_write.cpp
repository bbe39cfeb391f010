#include "kv_write.h"

#include <algorithm>
#include <cstring>

#include "attention_math.h"

namespace plait {
namespace {

// Symmetric, to -127 … 127. A row that is not finite gets NaN for its scale, and zeros.
template <class T>
void write_codes(char* to, const char* from, int64_t count, int64_t slot_bytes) {
  const auto* const x = reinterpret_cast<const T*>(from);
  auto* const codes = reinterpret_cast<int8_t*>(to);
  int32_t most = 0;  // sizes compare as their bits do
  for (int64_t d = 0; d < count; ++d) {
    const float value = widen(x[d]);
    int32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    most = std::max(most, bits & 0x7fffffff);
  }
  float size;
  std::memcpy(&size, &most, sizeof(size));
  constexpr int32_t kInfinity = 0x7f800000;
  const bool is_finite = most < kInfinity;
  const float scale = is_finite ? size / 127.0f : __builtin_nanf("");
  // Of sizes below, 127 / size is infinite; they are as good as zero.
  const float factor = is_finite && size > 1e-36f ? 127.0f / size : 0.0f;
  for (int64_t d = 0; d < count; ++d) {
    // The nearest whole number: no fraction bits are left beside 1.5 * 2^23.
    const float shifted = (is_finite ? widen(x[d]) : 0.0f) * factor + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    codes[d] = static_cast<int8_t>(bits - 0x4b400000);
  }
  const int64_t end = slot_bytes - kKvScaleBytes;
  std::memset(codes + count, 0, static_cast<size_t>(end - count));
  std::memcpy(to + end, &scale, sizeof(scale));
}

void write_row(char* to, const char* from, int64_t bytes, int64_t slot_bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
  if (bytes < slot_bytes) std::memset(to + bytes, 0, static_cast<size_t>(slot_bytes - bytes));
}

void write_slot(const KvPages& pages, char* to, const char* from, int64_t bytes) {
  switch (pages.codes) {
    case KvCodes::kNone:
      return write_row(to, from, bytes, pages.head_bytes);
    case KvCodes::kOfFloat32:
      return write_codes<float>(to, from, bytes / 4, pages.head_bytes);
    case KvCodes::kOfBfloat16:
      return write_codes<uint16_t>(to, from, bytes / 2, pages.head_bytes);
  }
}

}  // namespace

void kv_write(const KvPages& pages, const KvRows& key, const KvRows& value,
              const int64_t* slot_mapping, int64_t num_heads, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    if (slot_mapping[token] < 0) continue;
    const int64_t block = slot_mapping[token] / pages.block_size;
    const int64_t slot = slot_mapping[token] % pages.block_size;
    char* to = pages.data + block * pages.block_stride + slot * pages.head_bytes;
    const char* k = key.data + token * key.token_stride;
    const char* v = value.data + token * value.token_stride;
    for (int64_t head = 0; head < num_heads; ++head) {
      write_slot(pages, to, k, key.head_bytes);
      write_slot(pages, to + pages.value_offset, v, value.head_bytes);
      to += pages.block_size * pages.head_bytes;
      k += key.head_stride;
      v += value.head_stride;
    }
  }
}

}  // namespace plait
