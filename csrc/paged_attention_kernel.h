// The kernel of paged_attention.h as a template over how scores are summed, and with that over the
// vector type; paged_attention_*.cpp make it, each for one instruction set. Everything here has
// internal linkage, see vec.h.
//
// Items go through their keys tile by tile (paged_attention_keys.h):
//
//   pack     32 keys at a time: K transposed into a panel (attention_scores.h)
//   score    rows × the panel, up to six rows against up to four vectors of keys in registers
//   softmax  row by row: new maximum, exponentials, sum (attention_softmax.h)
//   add      P · V, up to six rows against up to eight vectors of D (attention_values.h)
//
// K and V are read where they lie, through one pointer per key, and fetched before, while the tile
// before them is computed (paged_attention_fetch.h). Slots that a row does not see never enter its
// sums, whatever they hold.

#pragma once

#include <type_traits>

#include "attention_math.h"
#include "attention_scores.h"
#include "attention_softmax.h"
#include "attention_values.h"
#include "paged_attention.h"
#include "paged_attention_fetch.h"
#include "paged_attention_keys.h"

namespace plait {
namespace {

// Where the parts of an item's scratch begin, in floats.
struct AttentionScratch {
  int64_t row_floats;  // of a query or output row, padded

  float* query;    // [rows][row_floats]
  float* out;      // [rows][row_floats]
  float* scores;   // [rows][kTileKeys], then the exponentials
  float* keys;     // [D][kPanelKeys]: one panel
  float* values;   // [kPanelKeys][row_floats]: V in fp32 where it cannot be read in place
  float* zeros;    // [row_floats]: stands for keys that nobody sees
  float* maximum;  // [rows], of scores × log2(e)
  float* sum;      // [rows]
  int32_t* begin;  // [rows]: the keys that a row sees, within the tile
  int32_t* end;    // [rows]
  int64_t size;

  // With a null base only `size` means something.
  AttentionScratch(float* base, int64_t rows, int64_t head_size) {
    row_floats = round_up(head_size, kMaxVecLanes);
    size = 0;
    const auto take = [this, base](int64_t floats) {
      float* const part = base == nullptr ? nullptr : base + size;
      size += round_up(floats, kMaxVecLanes);
      return part;
    };
    query = take(rows * row_floats);
    out = take(rows * row_floats);
    scores = take(rows * kTileKeys);
    keys = take(kPanelKeys * row_floats);
    values = take(kPanelKeys * row_floats);
    zeros = take(row_floats);
    maximum = take(rows);
    sum = take(rows);
    begin = reinterpret_cast<int32_t*>(take(rows));
    end = reinterpret_cast<int32_t*>(take(rows));
  }
};

// S: how scores are summed.
template <class S>
class Attention {
  using V = typename S::V;
  using Element = typename S::Element;
  using Stored = typename S::Stored;
  using Values = std::conditional_t<sizeof(Stored) == 2, PairedValues, PlainValues>;
  static constexpr bool kHasScales = std::is_same_v<Stored, int8_t>;
  static constexpr int64_t kLanes = static_cast<int64_t>(V::kLanes);
  static constexpr int64_t kLinesPerWidenedKey = 2;

 public:
  Attention(const AttentionProblem& problem, float* scratch)
      : p_(problem),
        group_(problem.num_heads / problem.num_kv_heads),
        is_in_place_(problem.head_size % (Values::kTogether * kLanes) == 0),
        scratch_(scratch, greatest(kTileRows, group_), problem.head_size) {
    std::memset(scratch_.zeros, 0, sizeof(float) * scratch_.row_floats);
  }

  void run(AttentionQueue& queue) {
    TilesAhead<Stored> ahead(p_, queue);
    ahead_ = &ahead;
    const AttentionItem* item = nullptr;
    for (; ahead.tile().item != nullptr; ahead.advance()) {
      if (ahead.tile().item != item && item != nullptr) finish();
      tile_ = ahead.tile();
      if (tile_.item != item) start();
      item = tile_.item;
      find_keys(p_, tile_, zeros(), keys_);
      attend();
    }
    if (item != nullptr) finish();
  }

 private:
  // Rows are tokens × heads of the group, heads innermost. Calls f(row, token of the step, head).
  template <class F>
  void each_row(const F& f) const {
    const AttentionItem& item = *tile_.item;
    const int64_t first_token = p_.query_start[item.span] + item.first_token;
    int64_t row = 0;
    for (int64_t token = 0; token < item.num_tokens; ++token) {
      for (int64_t i = 0; i < group_; ++i, ++row) {
        f(row, first_token + token, item.kv_head * group_ + i);
      }
    }
  }

  void start() {
    num_rows_ = tile_.item->num_tokens * group_;
    const auto* const query = static_cast<const Element*>(p_.query);
    each_row([&](int64_t row, int64_t token, int64_t head) {
      S::load_query(query + token * p_.query_token_stride + head * p_.query_head_stride,
                    scratch_.query + row * scratch_.row_floats, p_.head_size);
      const float sink = p_.sinks == nullptr ? kNegativeInfinity : p_.sinks[head] * kLog2E;
      scratch_.maximum[row] = sink;
      scratch_.sum[row] = sink == kNegativeInfinity ? 0.0f : 1.0f;
    });
    std::memset(scratch_.out, 0, sizeof(float) * num_rows_ * scratch_.row_floats);
  }

  void attend() {
    find_ends();
    ahead_->fetch_keys();
    for (int64_t panel = tile_.begin / kPanelKeys * kPanelKeys; panel < tile_.end;
         panel += kPanelKeys) {
      pack(panel);
      each_micro(num_rows_, [&](int64_t row, int64_t rows) { score(panel, row, rows); });
    }
    if constexpr (kHasScales) find_scales(0);
    for (int64_t row = 0; row < num_rows_; ++row) {
      if constexpr (kHasScales) multiply_by_scales(row);
      const RowSums sums{scratch_.maximum + row, scratch_.sum + row,
                         scratch_.out + row * scratch_.row_floats, p_.head_size};
      softmax<V>(scratch_.scores + row * kTileKeys, scratch_.begin[row], scratch_.end[row],
                 {p_.scale, p_.softcap}, sums);
    }
    ahead_->fetch_tile();
    if constexpr (kHasScales) {
      find_scales(p_.value_offset);
      for (int64_t row = 0; row < num_rows_; ++row) multiply_by_scales(row);
    }
    // By panels where values are widened first, so that these stay in the nearest cache.
    const int64_t step = is_in_place_ ? kTileKeys : kPanelKeys;
    for (int64_t from = tile_.begin / step * step; from < tile_.end; from += step) {
      if (!is_in_place_) widen_values(from);
      each_micro(num_rows_, [&](int64_t row, int64_t rows) { add(from, from + step, row, rows); });
    }
  }

  // Of the tile's K, or of its V, which lie `offset` behind.
  void find_scales(int64_t offset) {
    for (int64_t key = tile_.begin; key < tile_.end; ++key) {
      std::memcpy(scales_ + key, keys_[key] + offset + p_.head_size, sizeof(float));
    }
  }

  // A score, or a weight, for a code becomes one for its value.
  void multiply_by_scales(int64_t row) {
    float* const scores = scratch_.scores + row * kTileKeys;
    const int64_t last = round_up(scratch_.end[row], kLanes);
    for (int64_t key = scratch_.begin[row] / kLanes * kLanes; key < last; key += kLanes) {
      V::store(scores + key, V::mul(V::load(scores + key), V::load(scales_ + key)));
    }
  }

  // The keys that each row sees, within the tile. Neither end falls from row to row.
  void find_ends() {
    const int64_t first = first_position(p_, *tile_.item) - p_.query_start[tile_.item->span] -
                          tile_.item->first_token;  // from a token of the step to its position
    each_row([&](int64_t row, int64_t token, int64_t) {
      const int64_t position = first + token;
      const int64_t begin = p_.window == 0 ? 0 : position - p_.window + 1;
      const int64_t end = p_.key_ends == nullptr ? position + 1 : p_.key_ends[token];
      const auto within = [this](int64_t key) {
        return static_cast<int32_t>(greatest(0, least(key - tile_.start, kTileKeys)));
      };
      scratch_.begin[row] = within(begin);
      scratch_.end[row] = within(end);
    });
  }

  // Transposes a panel's keys, eight at a time.
  void pack(int64_t panel) {
    const int64_t end = least(panel + kPanelKeys, tile_.end);
    const FetchedLines lines = ahead_->take(kPanelKeys);
    int64_t line = 0;
    for (int64_t key = greatest(panel, tile_.begin / 8 * 8); key < end; key += 8) {
      PLAIT_UNROLL
      for (int64_t i = 0; i < 8; ++i) lines.fetch(line++);
      S::pack(keys_ + key, p_.head_size, scratch_.keys + key - panel);
    }
  }

  void score(int64_t panel, int64_t row, int64_t rows) {
    const int64_t end = least(scratch_.end[row + rows - 1], panel + kPanelKeys);
    if (end <= panel || scratch_.begin[row] >= panel + kPanelKeys) return;
    const FetchedLines lines = ahead_->take(S::steps(p_.head_size));
    with_rows(rows, [&]<int n>() {
      score_rows<S, n>(scratch_.query + row * scratch_.row_floats, scratch_.row_floats,
                       scratch_.keys, S::steps(p_.head_size), (end - panel + kLanes - 1) / kLanes,
                       scratch_.scores + row * kTileKeys + panel,
                       [lines](int64_t i) { lines.fetch(i); });
    });
  }

  void widen_values(int64_t panel) {
    const int64_t end = least(panel + kPanelKeys, tile_.end);
    for (int64_t key = greatest(panel, tile_.begin); key < end; ++key) {
      const FetchedLines lines = ahead_->take(kLinesPerWidenedKey);
      for (int64_t i = 0; i < kLinesPerWidenedKey; ++i) lines.fetch(i);
      float* const to = scratch_.values + (key - panel) * scratch_.row_floats;
      const Stored* const from = keys_[key] + p_.value_offset;
      int64_t d = 0;
      for (; d + kLanes <= p_.head_size; d += kLanes) V::store(to + d, V::load(from + d));
      for (; d < p_.head_size; ++d) to[d] = widen(from[d]);
      for (; d < scratch_.row_floats; ++d) to[d] = 0.0f;
      wide_values_[key] = to;
    }
  }

  // P · V over keys from … to. Keys that all rows of the micro-kernel see go together; before and
  // after them each row takes its own. A row's sums take its keys in order either way.
  void add(int64_t from, int64_t to, int64_t row, int64_t rows) {
    const auto clamped = [=](int64_t key) { return greatest(from, least(key, to)); };
    const int64_t begin = clamped(scratch_.begin[row + rows - 1]);
    const int64_t end = greatest(begin, clamped(scratch_.end[row]));
    for (int64_t i = row; i < row + rows; ++i) {
      add_keys(i, 1, clamped(scratch_.begin[i]), least(begin, scratch_.end[i]));
    }
    add_keys(row, rows, begin, end);
    for (int64_t i = row; i < row + rows; ++i) add_keys(i, 1, end, clamped(scratch_.end[i]));
  }

  void add_keys(int64_t row, int64_t rows, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const float* const weight = scratch_.scores + row * kTileKeys + begin;
    float* const out = scratch_.out + row * scratch_.row_floats;
    const int64_t vectors = (p_.head_size + kLanes - 1) / kLanes;
    with_rows(rows, [&]<int n>() {
      if (is_in_place_) {
        const WeightedKeys<Stored> keys{weight, keys_ + begin, p_.value_offset, end - begin};
        add_rows<V, Values, Stored, n>(keys, out, scratch_.row_floats, vectors, *ahead_);
      } else {
        const float* const* const wide = wide_values_ + begin;
        const WeightedKeys<float> keys{weight, wide, 0, end - begin};
        add_rows<V, PlainValues, float, n>(keys, out, scratch_.row_floats, vectors, *ahead_);
      }
    });
  }

  void finish() {
    each_row([&](int64_t row, int64_t token, int64_t head) {
      const float* const from = scratch_.out + row * scratch_.row_floats;
      auto* const to = static_cast<Element*>(p_.out) + (token * p_.num_heads + head) * p_.head_size;
      const typename V::F sum = V::broadcast(scratch_.sum[row]);
      if (is_in_place_) {
        finish_in_place(from, sum, to);
        return;
      }
      for (int64_t d = 0; d < p_.head_size; d += kLanes) {
        store_some<V>(to + d, V::div(V::load(from + d), sum),
                      static_cast<size_t>(p_.head_size - d));
      }
    });
  }

  // What `Values` summed, in the order of the head.
  void finish_in_place(const float* from, typename V::F sum, Element* to) const {
    for (int64_t d = 0; d < p_.head_size; d += Values::kTogether * kLanes) {
      const typename V::F first = V::div(V::load(from + d), sum);
      if constexpr (Values::kTogether == 1) {
        V::store(to + d, first);
      } else {
        V::store_pairs(to + d, first, V::div(V::load(from + d + kLanes), sum));
      }
    }
  }

  const Stored* zeros() const { return reinterpret_cast<const Stored*>(scratch_.zeros); }

  const AttentionProblem& p_;
  const int64_t group_;
  const bool is_in_place_;  // V is not widened before
  AttentionScratch scratch_;

  TilesAhead<Stored>* ahead_ = nullptr;
  AttentionTile tile_;
  int64_t num_rows_ = 0;
  const Stored* keys_[kTileKeys];  // of the tile
  const float* wide_values_[kTileKeys];
  float scales_[kTileKeys] = {};
};

template <class S>
void attend(const AttentionProblem& problem, AttentionQueue& queue, float* scratch) {
  Attention<S>(problem, scratch).run(queue);
}

template <class V, class T>
AttentionKernels make_attention_kernels() {
  return {&attend<FloatScores<V, T>>, &attend<PairScores<V, T>>, &attend<CodeScores<V, T, float>>,
          &attend<CodeScores<V, T, uint16_t>>};
}

}  // namespace
}  // namespace plait
