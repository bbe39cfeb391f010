// The kernel of paged_attention.h as a template over the vector type; paged_attention_*.cpp make
// it, each for one instruction set. Everything here has internal linkage, see vec.h.
//
// An item goes through its keys tile by tile:
//
//   pack     32 keys at a time: K transposed into a panel [D][32 keys] in fp32
//   score    rows × the panel, up to six rows against up to four vectors of keys in registers
//   softmax  row by row: new maximum, exponentials, sum
//   add      P · V, up to six rows against up to eight vectors of D in registers
//
// V is read where it lies, through one pointer per key. Slots that a row does not see never enter
// its sums, whatever they hold.

#pragma once

#include "paged_attention.h"
#include "vec.h"

namespace plait {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kNegativeInfinity = -__builtin_inff();

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

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
  }
};

// --- elementary functions ----------------------------------------------------------------------

// 2^x for x <= 0 or little above; below -126 it stays at 2^-126. NaN stays NaN.
// Minimax polynomial of 2^f on [-0.5, 0.5], fitted with p(0) = 1: with fp32 rounding within 1 ulp.
template <class V>
inline typename V::F exp2(typename V::F x) {
  x = V::max(V::broadcast(-126.0f), x);  // in this order a NaN in x is kept
  const typename V::F whole = V::round(x);
  const typename V::F f = V::sub(x, whole);
  typename V::F p = V::broadcast(1.5353362e-4f);
  p = V::fma(p, f, V::broadcast(1.3398875e-3f));
  p = V::fma(p, f, V::broadcast(9.61843692e-3f));
  p = V::fma(p, f, V::broadcast(5.55033237e-2f));
  p = V::fma(p, f, V::broadcast(2.40226477e-1f));
  p = V::fma(p, f, V::broadcast(6.93147182e-1f));
  p = V::fma(p, f, V::broadcast(1.0f));
  return V::mul(p, V::exp2_whole(whole));
}

// tanh by exp2 of -2|x|; near zero, where that loses digits, by an odd polynomial (Cephes tanhf).
template <class V>
inline void tanh_in_place(float* x) {
  const typename V::F v = V::load(x);
  const typename V::F square = V::mul(v, v);
  typename V::F p = V::broadcast(-5.70498872745e-3f);
  p = V::fma(p, square, V::broadcast(2.06390887954e-2f));
  p = V::fma(p, square, V::broadcast(-5.37397155531e-2f));
  p = V::fma(p, square, V::broadcast(1.33314422036e-1f));
  p = V::fma(p, square, V::broadcast(-3.33332819422e-1f));
  float near_zero[V::kLanes];
  V::store(near_zero, V::fma(V::mul(p, square), v, v));

  const typename V::F size = V::max(v, V::sub(V::zero(), v));
  const typename V::F e = exp2<V>(V::mul(size, V::broadcast(-2.0f * kLog2E)));
  const typename V::F one = V::broadcast(1.0f);
  float far[V::kLanes];
  V::store(far, V::div(V::sub(one, e), V::add(one, e)));
  for (size_t i = 0; i < V::kLanes; ++i) {
    const float a = x[i];
    x[i] = a > 0.625f ? far[i] : a < -0.625f ? -far[i] : near_zero[i];
  }
}

template <class V>
inline float max_lane(typename V::F v) {
  float lanes[V::kLanes];
  V::store(lanes, v);
  float best = lanes[0];
  for (size_t i = 1; i < V::kLanes; ++i) best = best > lanes[i] ? best : lanes[i];
  return best;
}

// --- packing -----------------------------------------------------------------------------------

inline float widen(float value) { return value; }
inline float widen(uint16_t value) { return bf16_to_float(value); }

// Puts `head_size` values of eight keys into columns 0 … 7 of a panel, in fp32.
// paged_attention_avx.h has a faster one.
struct PlainTranspose {
  template <class Element>
  static void transpose(const Element* const* keys, int64_t head_size, float* panel) {
    for (int64_t d = 0; d < head_size; ++d) {
      for (int key = 0; key < 8; ++key) panel[d * kPanelKeys + key] = widen(keys[key][d]);
    }
  }
};

// --- micro-kernels -----------------------------------------------------------------------------

// How scores are summed: in fp32, one fused multiply-add per d. E is the pages' element, T how
// keys are transposed.
template <class Vec, class E, class T>
struct FmaScores {
  using V = Vec;
  using Element = E;

  static int64_t steps(int64_t head_size) { return head_size; }
  static void load_query(const Element* from, float* to, int64_t head_size) {
    for (int64_t d = 0; d < head_size; ++d) to[d] = widen(from[d]);
  }
  static void pack(const Element* const* keys, int64_t head_size, float* panel) {
    T::transpose(keys, head_size, panel);
  }

  template <int kRows, int kVecs>
  [[gnu::always_inline]] static inline void step(typename V::F (&sums)[kRows][kVecs],
                                                 const float* query, int64_t stride,
                                                 const float* keys, int64_t i) {
    typename V::F k[kVecs];
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) k[v] = V::load(keys + v * V::kLanes);
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const typename V::F q = V::broadcast(query[r * stride + i]);
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) sums[r][v] = V::fma(q, k[v], sums[r][v]);
    }
  }
};

// kRows queries against kVecs vectors of keys of one panel.
template <class S, int kRows, int kVecs>
[[gnu::noinline]] void score_micro(const float* query, int64_t stride, const float* keys,
                                   int64_t steps, float* scores) {
  using V = typename S::V;
  typename V::F sums[kRows][kVecs];
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = V::zero();
  }
  for (int64_t i = 0; i < steps; ++i) {
    S::template step<kRows, kVecs>(sums, query, stride, keys + i * kPanelKeys, i);
  }
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) V::store(scores + r * kTileKeys + v * V::kLanes, sums[r][v]);
  }
}

// Adds probability × value of `num_keys` keys, in order, to kRows × kVecs vectors of the output.
template <class V, class Element, int kRows, int kVecs>
[[gnu::noinline]] void add_micro(const float* probability, const Element* const* values,
                                 int64_t num_keys, int64_t d, float* out, int64_t stride) {
  typename V::F sums[kRows][kVecs];
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = V::load(out + r * stride + v * V::kLanes);
  }
  for (int64_t key = 0; key < num_keys; ++key) {
    const Element* const value = values[key] + d;
    // Whichever are fewer stay in registers, beside the sums.
    if constexpr (kRows > kVecs) {
      typename V::F x[kVecs];
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) x[v] = V::load(value + v * V::kLanes);
      PLAIT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const typename V::F p = V::broadcast(probability[r * kTileKeys + key]);
        PLAIT_UNROLL
        for (int v = 0; v < kVecs; ++v) sums[r][v] = V::fma(p, x[v], sums[r][v]);
      }
    } else {
      typename V::F p[kRows];
      PLAIT_UNROLL
      for (int r = 0; r < kRows; ++r) p[r] = V::broadcast(probability[r * kTileKeys + key]);
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        const typename V::F x = V::load(value + v * V::kLanes);
        PLAIT_UNROLL
        for (int r = 0; r < kRows; ++r) sums[r][v] = V::fma(p[r], x, sums[r][v]);
      }
    }
  }
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) V::store(out + r * stride + v * V::kLanes, sums[r][v]);
  }
}

// Vectors beside each other in a micro-kernel of so many rows: the sums must fit the registers.
template <class V>
constexpr int vectors_beside(int rows) {
  const int sums = V::kRegisters == 32 ? 24 : 12;
  const int vectors = sums / rows;
  return vectors >= 8 ? 8 : vectors >= 4 ? 4 : vectors >= 2 ? 2 : 1;
}

// Calls f.template operator()<n>(first vector) over `count` vectors, widest pieces first.
template <int kVecs, class F>
inline void in_pieces(int64_t count, int64_t first, const F& f) {
  for (; first + kVecs <= count; first += kVecs) f.template operator()<kVecs>(first);
  if constexpr (kVecs > 1) {
    if (first < count) in_pieces<kVecs / 2>(count, first, f);
  }
}

template <class S, int kRows>
void score_rows(const float* query, int64_t stride, const float* keys, int64_t steps,
                int64_t num_vectors, float* scores) {
  using V = typename S::V;
  constexpr int kPanelVecs = static_cast<int>(kPanelKeys / V::kLanes);
  constexpr int kVecs =
      vectors_beside<V>(kRows) < kPanelVecs ? vectors_beside<V>(kRows) : kPanelVecs;
  in_pieces<kVecs>(num_vectors, 0, [&]<int n>(int64_t first) {
    const int64_t key = first * static_cast<int64_t>(V::kLanes);
    score_micro<S, kRows, n>(query, stride, keys + key, steps, scores + key);
  });
}

template <class V, class Element, int kRows>
void add_rows(const float* probability, const Element* const* values, int64_t num_keys, float* out,
              int64_t stride, int64_t num_vectors) {
  in_pieces<vectors_beside<V>(kRows)>(num_vectors, 0, [&]<int n>(int64_t first) {
    const int64_t d = first * static_cast<int64_t>(V::kLanes);
    add_micro<V, Element, kRows, n>(probability, values, num_keys, d, out + d, stride);
  });
}

// Calls f.template operator()<rows>() with the count as a constant.
template <class F>
inline void with_rows(int64_t rows, const F& f) {
  switch (rows) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    case 4:
      return f.template operator()<4>();
    case 5:
      return f.template operator()<5>();
    default:
      return f.template operator()<6>();
  }
}

// --- one item ----------------------------------------------------------------------------------

// S: how scores are summed.
template <class S>
class Attention {
  using V = typename S::V;
  using Element = typename S::Element;
  static constexpr int64_t kLanes = static_cast<int64_t>(V::kLanes);
  static constexpr bool kIsFloat = sizeof(Element) == 4;

 public:
  Attention(const AttentionProblem& problem, const AttentionItem& item, float* scratch)
      : p_(problem),
        item_(item),
        group_(problem.num_heads / problem.num_kv_heads),
        num_rows_(item.num_tokens * group_),
        first_query_(problem.query_start[item.span] + item.first_token),
        scratch_(scratch, greatest(kTileRows, group_), problem.head_size) {
    const int64_t span_tokens = problem.query_start[item.span + 1] - problem.query_start[item.span];
    first_position_ = problem.seq_lens[item.span] - span_tokens + item.first_token;
    // Reading V in place pays while few rows share it, and works where vectors divide D.
    in_place_ = p_.head_size % kLanes == 0 && (kIsFloat || num_rows_ <= 2 * kMicroRows);
  }

  void run() {
    start();
    const int64_t begin = first_key(0);
    const int64_t end = key_end(num_rows_ - 1);
    for (int64_t tile = begin / kTileKeys * kTileKeys; tile < end; tile += kTileKeys) {
      tile_ = tile;
      begin_ = greatest(begin - tile, 0);
      end_ = least(end - tile, kTileKeys);
      find_keys();
      for (int64_t panel = begin_ / kPanelKeys * kPanelKeys; panel < end_; panel += kPanelKeys) {
        pack(panel);
        each_micro([&](int64_t row, int64_t rows) { score(panel, row, rows); });
      }
      for (int64_t row = 0; row < num_rows_; ++row) softmax(row);
      // By panels where rows are many: a panel's values then stay in the first cache.
      const int64_t step = in_place_ ? kTileKeys : kPanelKeys;
      for (int64_t from = begin_ / step * step; from < end_; from += step) {
        if (!in_place_) widen_values(from);
        each_micro([&](int64_t row, int64_t rows) { add(from, from + step, row, rows); });
      }
    }
    finish();
  }

 private:
  // Rows are tokens × heads of the group, heads innermost.
  int64_t head(int64_t row) const { return item_.kv_head * group_ + row % group_; }
  int64_t position(int64_t row) const { return first_position_ + row / group_; }
  int64_t first_key(int64_t row) const {
    return p_.window == 0 ? 0 : greatest(0, position(row) - p_.window + 1);
  }
  int64_t key_end(int64_t row) const {
    return p_.key_ends == nullptr ? position(row) + 1 : p_.key_ends[first_query_ + row / group_];
  }
  // The keys that a row sees, within the tile. Neither falls from row to row.
  int64_t row_begin(int64_t row) const {
    return least(greatest(first_key(row) - tile_, 0), kTileKeys);
  }
  int64_t row_end(int64_t row) const { return greatest(0, least(key_end(row) - tile_, kTileKeys)); }

  // Splits the rows into micro-kernels of nearly equal height.
  template <class F>
  void each_micro(const F& f) {
    const int64_t count = (num_rows_ + kMicroRows - 1) / kMicroRows;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = num_rows_ * i / count;
      f(row, num_rows_ * (i + 1) / count - row);
    }
  }

  void start() {
    const auto* query = static_cast<const Element*>(p_.query);
    for (int64_t row = 0; row < num_rows_; ++row) {
      S::load_query(query + (first_query_ + row / group_) * p_.query_token_stride +
                        head(row) * p_.query_head_stride,
                    scratch_.query + row * scratch_.row_floats, p_.head_size);
      const float sink = p_.sinks == nullptr ? kNegativeInfinity : p_.sinks[head(row)] * kLog2E;
      scratch_.maximum[row] = sink;
      scratch_.sum[row] = sink == kNegativeInfinity ? 0.0f : 1.0f;
    }
    std::memset(scratch_.out, 0, sizeof(float) * num_rows_ * scratch_.row_floats);
    std::memset(scratch_.zeros, 0, sizeof(float) * scratch_.row_floats);
  }

  // Points at K and V of every key that some row sees; at zeros for the keys beside them that
  // share their vectors.
  void find_keys() {
    const auto* pages =
        static_cast<const Element*>(p_.pages) + item_.kv_head * p_.block_size * p_.head_size;
    const int32_t* const blocks = p_.block_table + item_.span * p_.block_table_stride;
    const auto* const zeros = reinterpret_cast<const Element*>(scratch_.zeros);
    const int64_t packed_begin = begin_ / 8 * 8;
    const int64_t packed_end = round_up(end_, 8);
    for (int64_t key = packed_begin; key < begin_; ++key) keys_[key] = zeros;
    for (int64_t key = end_; key < packed_end; ++key) keys_[key] = zeros;
    int64_t block = (tile_ + begin_) / p_.block_size;
    int64_t slot = (tile_ + begin_) % p_.block_size;
    for (int64_t key = begin_; key < end_; ++block, slot = 0) {
      const Element* from = pages + blocks[block] * p_.block_stride + slot * p_.head_size;
      for (; slot < p_.block_size && key < end_; ++slot, ++key, from += p_.head_size) {
        keys_[key] = from;
        values_[key] = from + p_.value_offset;
      }
    }
  }

  // Transposes a panel's keys, eight at a time. What comes next is fetched meanwhile: the keys of
  // the next panel, and the values of this one, which are read after the softmax.
  void pack(int64_t panel) {
    const int64_t end = least(panel + kPanelKeys, end_);
    for (int64_t key = greatest(panel, begin_ / 8 * 8); key < end; key += 8) {
      for (int64_t i = key + kPanelKeys; i < least(key + kPanelKeys + 8, end_); ++i)
        prefetch(keys_[i]);
      for (int64_t i = greatest(key, begin_); i < least(key + 8, end_); ++i) prefetch(values_[i]);
      S::pack(keys_ + key, p_.head_size, scratch_.keys + key - panel);
    }
  }

  void prefetch(const Element* from) const {
    const auto* const bytes = reinterpret_cast<const char*>(from);
    const int64_t size = p_.head_size * static_cast<int64_t>(sizeof(Element));
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(bytes + at);
  }

  void score(int64_t panel, int64_t row, int64_t rows) {
    const int64_t end = least(row_end(row + rows - 1), panel + kPanelKeys);
    if (end <= panel || row_begin(row) >= panel + kPanelKeys) return;
    with_rows(rows, [&]<int n>() {
      score_rows<S, n>(scratch_.query + row * scratch_.row_floats, scratch_.row_floats,
                       scratch_.keys, S::steps(p_.head_size), (end - panel + kLanes - 1) / kLanes,
                       scratch_.scores + row * kTileKeys + panel);
    });
  }

  // Turns a row's scores into exponentials relative to its maximum so far, and scales what it has
  // summed before to that maximum.
  void softmax(int64_t row) {
    const int64_t begin = row_begin(row);
    const int64_t end = row_end(row);
    if (begin >= end) return;
    float* const scores = scratch_.scores + row * kTileKeys;
    const int64_t first = begin / kLanes * kLanes;
    const int64_t last = round_up(end, kLanes);
    const float factor = p_.softcap == 0.0f ? p_.scale * kLog2E : p_.softcap * kLog2E;
    if (p_.softcap != 0.0f) cap(scores, first, last);
    for (int64_t key = first; key < begin; ++key) scores[key] = kNegativeInfinity;
    for (int64_t key = end; key < last; ++key) scores[key] = kNegativeInfinity;

    typename V::F best = V::load(scores + first);
    for (int64_t key = first + kLanes; key < last; key += kLanes) {
      best = V::max(best, V::load(scores + key));
    }
    const float before = scratch_.maximum[row];
    const float here = max_lane<V>(best) * factor;
    const float maximum = before > here ? before : here;

    const typename V::F factors = V::broadcast(factor);
    const typename V::F offset = V::broadcast(-maximum);
    for (int64_t key = first; key < last; key += kLanes) {
      V::store(scores + key, exp2<V>(V::fma(V::load(scores + key), factors, offset)));
    }
    for (int64_t key = first; key < begin; ++key) scores[key] = 0.0f;
    for (int64_t key = end; key < last; ++key) scores[key] = 0.0f;
    typename V::F sum = V::zero();
    for (int64_t key = first; key < last; key += kLanes) sum = V::add(sum, V::load(scores + key));

    rescale(row, before, maximum);
    scratch_.maximum[row] = maximum;
    scratch_.sum[row] += V::sum(sum);
  }

  // scores → tanh(score × scale / softcap); the caller multiplies by softcap.
  void cap(float* scores, int64_t first, int64_t last) {
    const typename V::F factor = V::broadcast(p_.scale / p_.softcap);
    for (int64_t key = first; key < last; key += kLanes) {
      V::store(scores + key, V::mul(V::load(scores + key), factor));
      tanh_in_place<V>(scores + key);
    }
  }

  void rescale(int64_t row, float before, float maximum) {
    if (before == maximum || before == kNegativeInfinity) return;  // nothing to scale
    const typename V::F factor = exp2<V>(V::broadcast(before - maximum));
    float lanes[V::kLanes];
    V::store(lanes, factor);
    scratch_.sum[row] *= lanes[0];
    float* const out = scratch_.out + row * scratch_.row_floats;
    for (int64_t d = 0; d < p_.head_size; d += kLanes) {
      V::store(out + d, V::mul(V::load(out + d), factor));
    }
  }

  void widen_values(int64_t panel) {
    const int64_t end = least(panel + kPanelKeys, end_);
    for (int64_t key = greatest(panel, begin_); key < end; ++key) {
      float* const to = scratch_.values + (key - panel) * scratch_.row_floats;
      const Element* const from = values_[key];
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
    const int64_t begin = clamped(row_begin(row + rows - 1));
    const int64_t end = greatest(begin, clamped(row_end(row)));
    for (int64_t i = row; i < row + rows; ++i) {
      add_keys(i, 1, clamped(row_begin(i)), least(begin, row_end(i)));
    }
    add_keys(row, rows, begin, end);
    for (int64_t i = row; i < row + rows; ++i) add_keys(i, 1, end, clamped(row_end(i)));
  }

  void add_keys(int64_t row, int64_t rows, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const float* const probability = scratch_.scores + row * kTileKeys + begin;
    float* const out = scratch_.out + row * scratch_.row_floats;
    const int64_t vectors = (p_.head_size + kLanes - 1) / kLanes;
    with_rows(rows, [&]<int n>() {
      if (in_place_) {
        add_rows<V, Element, n>(probability, values_ + begin, end - begin, out, scratch_.row_floats,
                                vectors);
      } else {
        add_rows<V, float, n>(probability, wide_values_ + begin, end - begin, out,
                              scratch_.row_floats, vectors);
      }
    });
  }

  void finish() {
    for (int64_t row = 0; row < num_rows_; ++row) {
      float* const from = scratch_.out + row * scratch_.row_floats;
      auto* const to = static_cast<Element*>(p_.out) +
                       ((first_query_ + row / group_) * p_.num_heads + head(row)) * p_.head_size;
      const typename V::F sum = V::broadcast(scratch_.sum[row]);
      int64_t d = 0;
      for (; d + kLanes <= p_.head_size; d += kLanes)
        V::store(to + d, V::div(V::load(from + d), sum));
      if (d == p_.head_size) continue;
      V::store(from + d, V::div(V::load(from + d), sum));
      for (; d < p_.head_size; ++d) narrow(from[d], to + d);
    }
  }

  static void narrow(float value, float* to) { *to = value; }
  static void narrow(float value, uint16_t* to) { *to = float_to_bf16(value); }

  const AttentionProblem& p_;
  const AttentionItem& item_;
  const int64_t group_;
  const int64_t num_rows_;
  const int64_t first_query_;  // the item's first row in the query
  int64_t first_position_;     // its position in the sequence
  AttentionScratch scratch_;
  bool in_place_;

  int64_t tile_ = 0;   // the tile's first position
  int64_t begin_ = 0;  // the keys that some row of the item sees, within the tile
  int64_t end_ = 0;
  const Element* keys_[kTileKeys];
  const Element* values_[kTileKeys];
  const float* wide_values_[kTileKeys];
};

template <class S>
void attend(const AttentionProblem& problem, const AttentionItem& item, float* scratch) {
  Attention<S>(problem, item, scratch).run();
}

template <class V, class T>
AttentionKernels make_attention_kernels() {
  return {&attend<FmaScores<V, float, T>>, &attend<FmaScores<V, uint16_t, T>>};
}

}  // namespace
}  // namespace plait
