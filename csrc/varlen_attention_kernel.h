// The kernel of varlen_attention.h as a template over the vector type, with scores and transposes
// of attention_scores.h. Everything here has internal linkage, see vec.h.
//
// An item goes through its keys tile by tile, and through its rows under each tile:
//
//   pack     a tile's K transposed into panels [D][32 keys], its V cut into columns as wide as a
//            micro-kernel, both in fp32
//   score    48 rows × a panel, which stays in the first cache
//   softmax  row by row: new maximum, exponentials, sum
//   add      P · V, column by column, 48 rows each

#pragma once

#include "attention_math.h"
#include "attention_scores.h"
#include "varlen_attention.h"

namespace plait {
namespace {

// Where the parts of an item's scratch begin, in floats.
struct VarlenScratch {
  int64_t row_floats;  // of a query or output row, padded
  float* query;        // [kVarlenItemRows][row_floats]
  float* out;          // the same
  float* scores;       // [kTileRows][kTileKeys], then the exponentials
  float* keys;         // [panel][D][kPanelKeys]
  float* values;       // [column][kTileKeys][width of the column]
  float* zeros;        // [row_floats]: stands for keys that fill a vector
  float* maximum;      // [kVarlenItemRows], of scores × log2(e)
  float* sum;          // the same
  int64_t size;

  // With a null base only `size` means something.
  VarlenScratch(float* base, int64_t head_size) {
    row_floats = round_up(head_size, kMaxVecLanes);
    size = 0;
    const auto take = [this, base](int64_t floats) {
      float* const part = base == nullptr ? nullptr : base + size;
      size += round_up(floats, kMaxVecLanes);
      return part;
    };
    query = take(kVarlenItemRows * row_floats);
    out = take(kVarlenItemRows * row_floats);
    scores = take(kTileRows * kTileKeys);
    keys = take(kTileKeys * row_floats);
    values = take(kTileKeys * row_floats);
    zeros = take(row_floats);
    maximum = take(kVarlenItemRows);
    sum = take(kVarlenItemRows);
  }
};

// Adds probability × value of `num_keys` keys, in order, to kRows × kVecs vectors of the output.
template <class V, int kRows, int kVecs>
[[gnu::noinline]] void add_column(const float* probability, const float* values, int64_t num_keys,
                                  float* out, int64_t stride) {
  typename V::F sums[kRows][kVecs];
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = V::load(out + r * stride + v * V::kLanes);
  }
  for (int64_t key = 0; key < num_keys; ++key, values += kVecs * V::kLanes) {
    typename V::F x[kVecs];
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) x[v] = V::load(values + v * V::kLanes);
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const typename V::F p = V::broadcast(probability[r * kTileKeys + key]);
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) sums[r][v] = V::fma(p, x[v], sums[r][v]);
    }
  }
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) V::store(out + r * stride + v * V::kLanes, sums[r][v]);
  }
}

// S: how scores are summed.
template <class S>
class VarlenAttention {
  using V = typename S::V;
  using F = typename V::F;
  using Element = typename S::Element;
  static constexpr int64_t kLanes = static_cast<int64_t>(V::kLanes);
  static constexpr int kColumnVecs = vectors_beside<V>(static_cast<int>(kMicroRows));

 public:
  VarlenAttention(const VarlenProblem& problem, const VarlenItem& item, float* scratch)
      : p_(problem),
        item_(item),
        vectors_((problem.head_size + kLanes - 1) / kLanes),
        scratch_(scratch, problem.head_size) {}

  void run() {
    start();
    for (int64_t tile = 0; tile < item_.num_keys; tile += kTileKeys) {
      tile_keys_ = least(kTileKeys, item_.num_keys - tile);
      pack_keys(item_.first_key + tile);
      pack_values(item_.first_key + tile);
      const int64_t count = (item_.num_rows + kTileRows - 1) / kTileRows;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = item_.num_rows * i / count;
        attend_rows(row, item_.num_rows * (i + 1) / count - row);
      }
    }
    finish();
  }

 private:
  const Element* at(const VarlenRows& rows, int64_t row) const {
    return static_cast<const Element*>(rows.data) + row * rows.token_stride +
           item_.head * rows.head_stride;
  }

  void start() {
    for (int64_t row = 0; row < item_.num_rows; ++row) {
      S::load_query(at(p_.query, item_.first_row + row), scratch_.query + row * scratch_.row_floats,
                    p_.head_size);
      scratch_.maximum[row] = kNegativeInfinity;
      scratch_.sum[row] = 0.0f;
    }
    std::memset(scratch_.out, 0, sizeof(float) * item_.num_rows * scratch_.row_floats);
    std::memset(scratch_.zeros, 0, sizeof(float) * scratch_.row_floats);
  }

  void pack_keys(int64_t first) {
    const auto* const zeros = reinterpret_cast<const Element*>(scratch_.zeros);
    for (int64_t key = 0; key < tile_keys_; key += 8) {
      const Element* keys[8];
      for (int64_t i = 0; i < 8; ++i) {
        keys[i] = key + i < tile_keys_ ? at(p_.key, first + key + i) : zeros;
      }
      float* const panel = scratch_.keys + key / kPanelKeys * panel_floats();
      S::pack(keys, p_.head_size, panel + key % kPanelKeys);
    }
  }

  int64_t panel_floats() const { return kPanelKeys * scratch_.row_floats; }

  // Calls f.template operator()<vectors>(first vector) for every column of V.
  template <class G>
  void each_column(const G& f) const {
    in_pieces<kColumnVecs>(vectors_, 0, f);
  }

  void pack_values(int64_t first) {
    for (int64_t key = 0; key < tile_keys_; ++key) {
      const Element* const from = at(p_.value, first + key);
      each_column([&]<int n>(int64_t vector) {
        float* const to = scratch_.values + vector * kLanes * kTileKeys + key * n * kLanes;
        PLAIT_UNROLL
        for (int v = 0; v < n; ++v) {
          const int64_t d = (vector + v) * kLanes;
          V::store(to + v * kLanes, load_some<V>(from + d, static_cast<size_t>(p_.head_size - d)));
        }
      });
    }
  }

  // Rows `first` … of the item against the packed tile.
  void attend_rows(int64_t first, int64_t rows) {
    const float* const query = scratch_.query + first * scratch_.row_floats;
    float* const out = scratch_.out + first * scratch_.row_floats;
    const auto nothing = [](int64_t) {};  // K and V are packed before
    for (int64_t key = 0; key < tile_keys_; key += kPanelKeys) {
      const float* const panel = scratch_.keys + key / kPanelKeys * panel_floats();
      const int64_t vectors = (least(kPanelKeys, tile_keys_ - key) + kLanes - 1) / kLanes;
      each_micro(rows, [&](int64_t row, int64_t count) {
        with_rows(count, [&]<int n>() {
          score_rows<S, n>(query + row * scratch_.row_floats, scratch_.row_floats, panel,
                           S::steps(p_.head_size), vectors, scratch_.scores + row * kTileKeys + key,
                           nothing);
        });
      });
    }
    for (int64_t row = 0; row < rows; ++row)
      softmax(scratch_.scores + row * kTileKeys, first + row);
    each_column([&]<int vecs>(int64_t vector) {
      each_micro(rows, [&](int64_t row, int64_t count) {
        with_rows(count, [&]<int n>() {
          add_column<V, n, vecs>(
              scratch_.scores + row * kTileKeys, scratch_.values + vector * kLanes * kTileKeys,
              tile_keys_, out + row * scratch_.row_floats + vector * kLanes, scratch_.row_floats);
        });
      });
    });
  }

  // Four chains over the tile's vectors, in turn, joined at the end.
  template <class Step, class Join>
  F reduce(F start, const float* values, const Step& step, const Join& join) const {
    F chains[4] = {start, start, start, start};
    int64_t key = 0;
    for (; key + 4 * kLanes <= tile_keys_; key += 4 * kLanes) {
      PLAIT_UNROLL
      for (int i = 0; i < 4; ++i) chains[i] = step(chains[i], V::load(values + key + i * kLanes));
    }
    for (; key < tile_keys_; key += kLanes) chains[0] = step(chains[0], V::load(values + key));
    return join(join(chains[0], chains[1]), join(chains[2], chains[3]));
  }

  // Turns a row's scores into exponentials relative to its maximum so far, and scales what it has
  // summed before to that maximum.
  void softmax(float* scores, int64_t row) {
    const int64_t end = round_up(tile_keys_, kLanes);
    for (int64_t key = tile_keys_; key < end; ++key) scores[key] = kNegativeInfinity;
    const auto max = [](F a, F b) { return V::max(a, b); };
    const auto add = [](F a, F b) { return V::add(a, b); };
    const float factor = p_.scale * kLog2E;
    const float before = scratch_.maximum[row];
    const float here =
        max_lane<V>(reduce(V::broadcast(kNegativeInfinity), scores, max, max)) * factor;
    const float maximum = before > here ? before : here;

    const F factors = V::broadcast(factor);
    const F offset = V::broadcast(-maximum);
    for (int64_t key = 0; key < end; key += kLanes) {
      V::store(scores + key, exp2<V>(V::fma(V::load(scores + key), factors, offset)));
    }
    for (int64_t key = tile_keys_; key < end; ++key) scores[key] = 0.0f;
    rescale(row, before, maximum);
    scratch_.maximum[row] = maximum;
    scratch_.sum[row] += V::sum(reduce(V::zero(), scores, add, add));
  }

  void rescale(int64_t row, float before, float maximum) {
    if (before == maximum || before == kNegativeInfinity) return;  // nothing to scale
    const F factor = exp2<V>(V::broadcast(before - maximum));
    float lanes[V::kLanes];
    V::store(lanes, factor);
    scratch_.sum[row] *= lanes[0];
    float* const out = scratch_.out + row * scratch_.row_floats;
    for (int64_t i = 0; i < vectors_; ++i) {
      V::store(out + i * kLanes, V::mul(V::load(out + i * kLanes), factor));
    }
  }

  // Without any key the sums are zero, and so is the output.
  void finish() {
    for (int64_t row = 0; row < item_.num_rows; ++row) {
      const float* const from = scratch_.out + row * scratch_.row_floats;
      auto* const to = static_cast<Element*>(p_.out) +
                       ((item_.first_row + row) * p_.num_heads + item_.head) * p_.head_size;
      const F sum = V::broadcast(item_.num_keys == 0 ? 1.0f : scratch_.sum[row]);
      for (int64_t d = 0; d < p_.head_size; d += kLanes) {
        store_some<V>(to + d, V::div(V::load(from + d), sum),
                      static_cast<size_t>(p_.head_size - d));
      }
    }
  }

  const VarlenProblem& p_;
  const VarlenItem& item_;
  const int64_t vectors_;  // of a row
  const VarlenScratch scratch_;
  int64_t tile_keys_ = 0;
};

template <class S>
void attend_varlen(const VarlenProblem& problem, const VarlenItem& item, float* scratch) {
  VarlenAttention<S>(problem, item, scratch).run();
}

template <class V, class T>
VarlenKernels make_varlen_kernels() {
  return {&attend_varlen<FloatScores<V, T>>, &attend_varlen<PairScores<V, T>>};
}

}  // namespace
}  // namespace plait
