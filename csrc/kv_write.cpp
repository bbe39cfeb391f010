#include "kv_write.h"

#include <cstring>

namespace plait {
namespace {

void write_row(char* to, const char* from, int64_t bytes, int64_t slot_bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
  if (bytes < slot_bytes) std::memset(to + bytes, 0, static_cast<size_t>(slot_bytes - bytes));
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
      write_row(to, k, key.head_bytes, pages.head_bytes);
      write_row(to + pages.value_offset, v, value.head_bytes, pages.head_bytes);
      to += pages.block_size * pages.head_bytes;
      k += key.head_stride;
      v += value.head_stride;
    }
  }
}

}  // namespace plait
