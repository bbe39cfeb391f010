// What attention fetches before it is read: K and V of the tiles that come next, be they other
// items', a few lines beside every step of what is computed until then.
//
// K and V of many sequences lie in pieces as short as a block, which the processor's own
// prefetchers do not see coming, and a core keeps few fetches under way: in bursts they hold up
// what is computed beside them.

#pragma once

#include "paged_attention_keys.h"

namespace plait {
namespace {

// Lines behind one another: line i, or the last one where there are fewer.
struct FetchedLines {
  const char* from;
  int64_t last;

  [[gnu::always_inline]] void fetch(int64_t i) const {
    __builtin_prefetch(from + least(i, last) * kLineBytes, 0, 2);
  }
};

// The tile at hand and the ones after it. Threads take items as they come to be next, so no more is
// looked at than has to be: a third tile where the second one is over too soon.
template <class Stored>
class TilesAhead {
 public:
  TilesAhead(const AttentionProblem& problem, AttentionQueue& queue)
      : p_(problem), queue_(queue), nothing_(reinterpret_cast<const char*>(this)) {
    tiles_[0] = tile_from(p_, queue_.take(), 0, queue_);
    look_ahead();
  }

  const AttentionTile& tile() const { return tiles_[0]; }

  void advance() {
    fetch_tile();
    if (fetched_ == 0) go_on();
    tiles_[0] = tiles_[1];
    tiles_[1] = tiles_[2];
    tiles_[2] = {};
    --fetched_;
    look_ahead();
  }

  // At most so many lines that are to be fetched next.
  FetchedLines take(int64_t most) {
    if (lines_ == 0 && !find_piece()) return {nothing_, 0};
    const FetchedLines lines{place_, least(most, lines_) - 1};
    place_ += (lines.last + 1) * kLineBytes;
    lines_ -= lines.last + 1;
    return lines;
  }

  // What is left of K of the tile at hand, or of all of it: it is read now.
  void fetch_keys() {
    while (fetched_ == 0 && !values_ && !is_over()) fetch_piece();
  }
  void fetch_tile() {
    while (fetched_ == 0 && !(values_ && is_over())) fetch_piece();
  }

 private:
  static constexpr int64_t kFewKeys = kTileKeys / 2;

  void look_ahead() {
    if (tiles_[0].item == nullptr) return;
    if (tiles_[1].item == nullptr) tiles_[1] = tile_after(tiles_[0]);
    if (tiles_[1].item != nullptr && tiles_[1].end - tiles_[1].begin < kFewKeys) {
      tiles_[2] = tile_after(tiles_[1]);
    }
  }

  AttentionTile tile_after(const AttentionTile& tile) const {
    return tile_from(p_, tile.item, tile.start + kTileKeys, queue_);
  }

  // Whether nothing is left of K, or V, of the tile at hand.
  bool is_over() const { return lines_ == 0 && key_ >= tiles_[0].end; }

  void fetch_piece() {
    if (lines_ == 0 && !find_piece()) return;
    for (; lines_ > 0; --lines_, place_ += kLineBytes) __builtin_prefetch(place_, 0, 2);
  }

  // The next piece: of a tile's K, block by block, then of its V. False where none is known.
  bool find_piece() {
    while (fetched_ < kTiles && tiles_[fetched_].item != nullptr) {
      const AttentionTile& tile = tiles_[fetched_];
      if (key_ < 0) {
        key_ = tile.begin;
        slot_ = (tile.start + key_) % p_.block_size;
        block_ = find_block(p_, *tile.item, tile.start + key_);
      }
      if (key_ < tile.end) {
        const int64_t count = least(tile.end - key_, p_.block_size - slot_);
        const Stored* const from =
            keys_in<Stored>(p_, *tile.item, *block_++, slot_) + (values_ ? p_.value_offset : 0);
        slot_ = 0;
        const auto begin = reinterpret_cast<uintptr_t>(from);
        const uintptr_t first = begin / kLineBytes * kLineBytes;
        const auto bytes = static_cast<uintptr_t>(count * p_.slot_stride) * sizeof(Stored);
        place_ = reinterpret_cast<const char*>(first);
        lines_ = static_cast<int64_t>((begin + bytes - first + kLineBytes - 1) / kLineBytes);
        key_ += count;
        return true;
      }
      go_on();
    }
    return false;
  }

  // From a tile's K to its V, or to the next tile.
  void go_on() {
    key_ = -1;
    if (values_) ++fetched_;
    values_ = !values_;
  }

  static constexpr int kTiles = 3;
  const AttentionProblem& p_;
  AttentionQueue& queue_;
  const char* const nothing_;
  AttentionTile tiles_[kTiles];

  // What is fetched next.
  int fetched_ = 0;      // of a tile
  bool values_ = false;  // its V, else its K
  int64_t key_ = -1;     // the piece after this one begins with it; -1: with the tile's first one
  const int32_t* block_ = nullptr;  // of that key
  int64_t slot_ = 0;                // in it
  const char* place_ = nullptr;
  int64_t lines_ = 0;  // left of a piece
};

}  // namespace
}  // namespace plait
