// Writes K and V rows of a step into their slots of the pages. No torch in here.

#pragma once

#include <cstddef>
#include <cstdint>

namespace plait {

// Rows may be kept in whole numbers: x[d] is about scale * code[d], and a slot holds a head's
// codes, int8, then its scale, fp32. Scales are of a row alone, so that its bits depend on nothing
// else.
constexpr int64_t kKvScaleBytes = 4;

enum class KvCodes { kNone, kOfFloat32, kOfBfloat16 };

// Rows of K or V: [T, H, D] with D dense. Strides count bytes.
struct KvRows {
  const char* data;
  int64_t token_stride;
  int64_t head_stride;
  int64_t head_bytes;  // at most what a slot holds; the rest of it is zeroed
};

// The pages of one layer, see paged_attention.h for the layout. Strides count bytes.
struct KvPages {
  char* data;  // at the layer's K in block 0
  int64_t block_stride;
  int64_t value_offset;
  int64_t head_bytes;  // of a slot, its scale too
  int64_t block_size;
  KvCodes codes;
};

// Writes tokens begin … end. slot_mapping holds block * block_size + slot, negative: skip.
void kv_write(const KvPages& pages, const KvRows& key, const KvRows& value,
              const int64_t* slot_mapping, int64_t num_heads, int64_t begin, int64_t end);

}  // namespace plait
