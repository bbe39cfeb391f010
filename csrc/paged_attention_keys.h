// Where an item's keys lie, tile by tile, and what is computed after them.

#pragma once

#include "attention_math.h"
#include "paged_attention.h"

namespace plait {
namespace {

// A tile of an item; without an item, none is left.
struct AttentionTile {
  const AttentionItem* item = nullptr;
  int64_t start = 0;  // its first position
  int64_t begin = 0;  // the keys that some row of the item sees, within the tile
  int64_t end = 0;
};

inline int64_t first_position(const AttentionProblem& p, const AttentionItem& item) {
  const int64_t tokens = p.query_start[item.span + 1] - p.query_start[item.span];
  return p.seq_lens[item.span] - tokens + item.first_token;
}

// The item's tiles from position `start` on, and after them those of the queue's next item.
inline AttentionTile tile_from(const AttentionProblem& p, const AttentionItem* item, int64_t start,
                               AttentionQueue& queue) {
  for (; item != nullptr; item = queue.take(), start = 0) {
    const int64_t first = first_position(p, *item);
    const int64_t last_token = item->first_token + item->num_tokens - 1;
    const int64_t begin = p.window == 0 ? 0 : greatest(0, first - p.window + 1);
    const int64_t end = p.key_ends == nullptr ? first + item->num_tokens
                                              : p.key_ends[p.query_start[item->span] + last_token];
    start = greatest(start, begin / kTileKeys * kTileKeys);
    if (start < end) {
      return {item, start, greatest(begin - start, 0), least(end - start, kTileKeys)};
    }
  }
  return {};
}

// Where a position's block stands in the table of the item's sequence.
inline const int32_t* find_block(const AttentionProblem& p, const AttentionItem& item,
                                 int64_t position) {
  return p.block_table + item.span * p.block_table_stride + position / p.block_size;
}

// Where K of the item's head lies in a block, at a slot.
template <class Stored>
inline const Stored* keys_in(const AttentionProblem& p, const AttentionItem& item, int32_t block,
                             int64_t slot) {
  return static_cast<const Stored*>(p.pages) + block * p.block_stride +
         (item.kv_head * p.block_size + slot) * p.slot_stride;
}

// Points at K of every key that some row of the tile sees, and at zeros for all others.
template <class Stored>
inline void find_keys(const AttentionProblem& p, const AttentionTile& tile, const Stored* zeros,
                      const Stored** keys) {
  for (int64_t key = 0; key < tile.begin; ++key) keys[key] = zeros;
  for (int64_t key = tile.end; key < kTileKeys; ++key) keys[key] = zeros;
  const int32_t* block = find_block(p, *tile.item, tile.start + tile.begin);
  int64_t slot = (tile.start + tile.begin) % p.block_size;
  for (int64_t key = tile.begin; key < tile.end; ++block, slot = 0) {
    const Stored* from = keys_in<Stored>(p, *tile.item, *block, slot);
    const int64_t end = least(tile.end, key + p.block_size - slot);
    for (; key < end; ++key, from += p.slot_stride) keys[key] = from;
  }
}

}  // namespace
}  // namespace plait
