// The kernels of lora.h as templates over the vector type; lora_*.cpp make them, each for one
// instruction set. Everything here has internal linkage, see vec.h.

#pragma once

#include "lora.h"
#include "vec.h"

namespace plait {
namespace {

#define PLAIT_INLINE inline __attribute__((always_inline))

// Vectors in a tile's step, the sums that fit in registers beside weights, and the rows of a panel.
template <class V>
constexpr int kTileVecs = static_cast<int>(kTileOutputs / V::kLanes);
template <class V>
constexpr int kMaxSums = V::kRegisters == 32 ? 24 : 12;
template <class V>
constexpr int kMaxPanelRows = kMaxSums<V> / kTileVecs<V> < 6 ? kMaxSums<V> / kTileVecs<V> : 6;

// The most of 4, 2, 1 groups of so many sums that fit.
template <class V>
constexpr int groups_that_fit(int sums) {
  return 4 * sums <= kMaxSums<V> ? 4 : 2 * sums <= kMaxSums<V> ? 2 : 1;
}

// A row alone reads its weights from memory: they are fetched so many bytes ahead.
constexpr size_t kFetchAhead = 1024;

template <size_t kBytes>
PLAIT_INLINE void fetch(const char* from) {
  PLAIT_UNROLL
  for (size_t i = 0; i < kBytes; i += 64) __builtin_prefetch(from + i, 0, 3);
}

// --- weights -------------------------------------------------------------------------------------

// What one load brings: a vector of values, or of pairs whose second is the next input's.
template <class V>
struct Singles {
  using W = float;
  using Raw = typename V::F;
  static constexpr int kTogether = 1;

  static PLAIT_INLINE Raw load(const W* p) { return V::load(p); }
  template <int kWhich>
  static PLAIT_INLINE typename V::F value(Raw raw) {
    return raw;
  }
};
template <class V>
struct Pairs {
  using W = uint16_t;
  using Raw = typename V::Bits;
  static constexpr int kTogether = 2;

  static PLAIT_INLINE Raw load(const W* p) { return V::load_pairs(p); }
  template <int kWhich>
  static PLAIT_INLINE typename V::F value(Raw raw) {
    return kWhich == 0 ? V::first_of_pairs(raw) : V::second_of_pairs(raw);
  }
};

// Where vector v of a tile's step begins, in elements: a step is all inputs of one load.
template <class V, class Weights>
constexpr size_t vector_in_step(int v) {
  return static_cast<size_t>(v) * V::kLanes * Weights::kTogether;
}

// --- shrink --------------------------------------------------------------------------------------

template <class V, int kRows, int kVecs>
PLAIT_INLINE void multiply_add(typename V::F (&sums)[kRows][kVecs], const float* x, size_t x_stride,
                               const typename V::F (&w)[kVecs]) {
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const typename V::F value = V::broadcast(x[static_cast<size_t>(r) * x_stride]);
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = V::fma(value, w[v], sums[r][v]);
  }
}

// A tile's rows of x and weights, and where its t goes.
struct ShrinkTile {
  const float* x;
  size_t x_stride;
  size_t inputs;
  const void* weight;
  size_t width;
  float* t;
  size_t t_stride;
};

// Chain kChain of the four, over one block of four inputs; w is the block's first weight.
template <class V, class Weights, int kChain, int kRows, int kVecs>
PLAIT_INLINE void add_to_chain(typename V::F (&sums)[kRows][kVecs], const ShrinkTile& tile,
                               const float* x, const typename Weights::W* w) {
  constexpr int kWhich = kChain % Weights::kTogether;
  const auto* step = w + static_cast<size_t>(kChain - kWhich) * tile.width;
  typename V::F values[kVecs];
  PLAIT_UNROLL
  for (int v = 0; v < kVecs; ++v) {
    const auto raw = Weights::load(step + vector_in_step<V, Weights>(v));
    values[v] = Weights::template value<kWhich>(raw);
  }
  multiply_add<V>(sums, x + kChain, tile.x_stride, values);
}

// The same at the end, where the block has `left` inputs, fewer than four; the last one of an odd
// number has no partner.
template <class V, class Weights, int kChain, int kRows, int kVecs>
PLAIT_INLINE void end_chain(typename V::F (&sums)[kRows][kVecs], const ShrinkTile& tile,
                            const float* x, const typename Weights::W* w, size_t left) {
  if (kChain >= left) return;
  constexpr size_t kPartner = kChain / Weights::kTogether * Weights::kTogether + 1;
  if (Weights::kTogether == 1 || kPartner < left) {
    add_to_chain<V, Weights, kChain>(sums, tile, x, w);
    return;
  }
  typename V::F values[kVecs];
  PLAIT_UNROLL
  for (int v = 0; v < kVecs; ++v) {
    values[v] = V::load(w + kChain * tile.width + static_cast<size_t>(v) * V::kLanes);
  }
  multiply_add<V>(sums, x + kChain, tile.x_stride, values);
}

// One row's chains of a pair: what was loaded once stays in a register for both.
template <class V, class Weights, int kFirst, int kVecs>
PLAIT_INLINE void add_to_both(typename V::F (&sums)[kLoraChains][1][kVecs], const ShrinkTile& tile,
                              const float* x, const typename Weights::W* w) {
  const typename V::F first = V::broadcast(x[kFirst]);
  const typename V::F second = V::broadcast(x[kFirst + 1]);
  PLAIT_UNROLL
  for (int v = 0; v < kVecs; ++v) {
    auto raw = Weights::load(w + kFirst * tile.width + vector_in_step<V, Weights>(v));
    V::pin(raw);
    sums[kFirst][0][v] = V::fma(first, Weights::template value<0>(raw), sums[kFirst][0][v]);
    sums[kFirst + 1][0][v] =
        V::fma(second, Weights::template value<1>(raw), sums[kFirst + 1][0][v]);
  }
}

template <class V, class Weights, int kFirst, int kCount, int kRows, int kVecs>
PLAIT_INLINE void add_to_chains(typename V::F (&sums)[kLoraChains][kRows][kVecs],
                                const ShrinkTile& tile, const float* x,
                                const typename Weights::W* w) {
  constexpr int kTaken = kRows == 1 ? Weights::kTogether : 1;
  if constexpr (kTaken == 2) {
    add_to_both<V, Weights, kFirst>(sums, tile, x, w);
  } else {
    add_to_chain<V, Weights, kFirst>(sums[kFirst], tile, x, w);
  }
  if constexpr (kCount > kTaken) {
    add_to_chains<V, Weights, kFirst + kTaken, kCount - kTaken>(sums, tile, x, w);
  }
}

template <class V, class Weights, int kFirst, int kCount, int kRows, int kVecs>
PLAIT_INLINE void end_chains(typename V::F (&sums)[kLoraChains][kRows][kVecs],
                             const ShrinkTile& tile, const float* x, const typename Weights::W* w,
                             size_t left) {
  end_chain<V, Weights, kFirst>(sums[kFirst], tile, x, w, left);
  if constexpr (kCount > 1) {
    end_chains<V, Weights, kFirst + 1, kCount - 1>(sums, tile, x, w, left);
  }
}

// Chains kFirst … of a tile: as many at once as registers hold, then the others. The order in each
// stays the same.
template <class V, class Weights, int kFirst, int kRows, int kVecs>
PLAIT_INLINE void run_chains(typename V::F (&sums)[kLoraChains][kRows][kVecs],
                             const ShrinkTile& tile) {
  constexpr int kAtOnce = groups_that_fit<V>(kRows * kVecs);
  PLAIT_UNROLL
  for (int c = 0; c < kAtOnce; ++c) {
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) sums[kFirst + c][r][v] = V::zero();
    }
  }
  const auto* w = static_cast<const typename Weights::W*>(tile.weight);
  const float* x = tile.x;
  size_t left = tile.inputs;
  for (; left >= kLoraChains; left -= kLoraChains) {
    if constexpr (kRows == 1) {
      fetch<kLoraChains * kTileOutputs * sizeof(*w)>(reinterpret_cast<const char*>(w) +
                                                     kFetchAhead);
    }
    add_to_chains<V, Weights, kFirst, kAtOnce>(sums, tile, x, w);
    x += kLoraChains;
    w += kLoraChains * tile.width;
  }
  end_chains<V, Weights, kFirst, kAtOnce>(sums, tile, x, w, left);
  if constexpr (kFirst + kAtOnce < static_cast<int>(kLoraChains)) {
    run_chains<V, Weights, kFirst + kAtOnce>(sums, tile);
  }
}

template <class V, class Weights, int kRows>
void shrink_tile(const ShrinkTile& tile) {
  constexpr int kVecs = kTileVecs<V>;
  typename V::F sums[kLoraChains][kRows][kVecs];
  run_chains<V, Weights, 0>(sums, tile);
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const typename V::F low = V::add(sums[0][r][v], sums[1][r][v]);
      const typename V::F high = V::add(sums[2][r][v], sums[3][r][v]);
      const size_t at = static_cast<size_t>(r) * tile.t_stride + static_cast<size_t>(v) * V::kLanes;
      V::store(tile.t + at, V::add(low, high));
    }
  }
}

constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// The columns of a that the tokens name.
template <class V, class Weights>
void gather(const LoraJob& job, const typename Weights::W* a, float* t, size_t t_stride) {
  const auto inputs = static_cast<size_t>(job.segment->leaf.inputs);
  const auto ranks = static_cast<size_t>(job.segment->leaf.ranks);
  for (size_t row = 0; row < job.rows; ++row) {
    const auto token = static_cast<size_t>(job.token_ids[row]);
    const size_t which = token % Weights::kTogether;
    for (size_t rank = 0; rank < ranks; rank += kTileOutputs) {
      const size_t width = smaller(kTileOutputs, ranks - rank);
      const auto* step = a + rank * inputs + (token - which) * width;
      const bool is_alone = token - which + Weights::kTogether > inputs;
      for (int v = 0; v < kTileVecs<V>; ++v) {
        const size_t lane = static_cast<size_t>(v) * V::kLanes;
        typename V::F value;
        if (is_alone) {
          value = V::load(step + lane);
        } else {
          const auto raw = Weights::load(step + vector_in_step<V, Weights>(v));
          value = which == 0 ? Weights::template value<0>(raw) : Weights::template value<1>(raw);
        }
        V::store(t + row * t_stride + rank + lane, value);
      }
    }
  }
}

// --- expand --------------------------------------------------------------------------------------

// A part, ready to be applied to some rows.
struct Expand {
  const float* t;
  size_t t_stride;
  const void* b;
  size_t rank;
  size_t outputs;
  const float* b_bias;
  const float* g;
  const float* bias;
  float scale;
  void* out;
  Element out_type;
  size_t out_stride;
  void (*write)(const Expand& part, const float* sums, size_t rows, size_t tiles, size_t output);
};

// Applies sums [rows][tiles * 16] to the outputs from `output` on.
template <class V, class Out>
void write(const Expand& part, const float* sums, size_t rows, size_t tiles, size_t output) {
  using F = typename V::F;
  const F scale = V::broadcast(part.scale);
  const size_t count = smaller(tiles * kTileOutputs, part.outputs - output);
  for (size_t r = 0; r < rows; ++r, sums += tiles * kTileOutputs) {
    Out* out = static_cast<Out*>(part.out) + r * part.out_stride + output;
    for (size_t i = 0; i < count; i += V::kLanes) {
      F sum = V::load(sums + i);
      if (part.b_bias != nullptr) sum = V::add(sum, V::load(part.b_bias + output + i));
      F y = load_some<V>(out + i, count - i);
      if (part.g == nullptr) {
        y = V::fma(scale, sum, y);
      } else {
        const F bias = part.bias == nullptr ? V::zero() : V::load(part.bias + output + i);
        y = V::fma(V::load(part.g + output + i), V::fma(scale, sum, V::sub(y, bias)), bias);
      }
      store_some<V>(out + i, y, count - i);
    }
  }
}

// What most adapters are, and whole tiles: straight from the registers.
template <class V, class Out, int kVecs>
PLAIT_INLINE void add_scaled(float scale, const typename V::F (&sums)[1][kVecs], Out* out) {
  const typename V::F factor = V::broadcast(scale);
  PLAIT_UNROLL
  for (int v = 0; v < kVecs; ++v, out += V::kLanes) {
    V::store(out, V::fma(factor, sums[0][v], V::load(out)));
  }
}

template <class V, int kVecs>
PLAIT_INLINE bool try_add_scaled(const Expand& part, const typename V::F (&sums)[1][kVecs],
                                 size_t output) {
  if (part.b_bias != nullptr || part.g != nullptr || output + kVecs * V::kLanes > part.outputs) {
    return false;
  }
  if (part.out_type == Element::kFloat32) {
    add_scaled<V>(part.scale, sums, static_cast<float*>(part.out) + output);
  } else {
    add_scaled<V>(part.scale, sums, static_cast<uint16_t*>(part.out) + output);
  }
  return true;
}

// One step of b in some tiles that lie tile_step elements apart, for a row alone: every vector is
// loaded and used up, so that sums keep their registers.
template <class V, class Weights, int kVecs>
PLAIT_INLINE void expand_one(typename V::F (&sums)[1][kVecs], const float* t,
                             const typename Weights::W* b, size_t tile_step) {
  const typename V::F first = V::broadcast(t[0]);
  const typename V::F second = V::broadcast(t[Weights::kTogether - 1]);
  PLAIT_UNROLL
  for (int v = 0; v < kVecs; ++v) {
    const size_t tile = static_cast<size_t>(v / kTileVecs<V>) * tile_step;
    auto raw = Weights::load(b + tile + vector_in_step<V, Weights>(v % kTileVecs<V>));
    if constexpr (Weights::kTogether == 2) V::pin(raw);
    sums[0][v] = V::fma(first, Weights::template value<0>(raw), sums[0][v]);
    if constexpr (Weights::kTogether == 2) {
      sums[0][v] = V::fma(second, Weights::template value<1>(raw), sums[0][v]);
    }
  }
}

template <class V, class Weights, int kRows, int kVecs>
PLAIT_INLINE void expand_step(typename V::F (&sums)[kRows][kVecs], const float* t, size_t t_stride,
                              const typename Weights::W* b, size_t tile_step) {
  typename Weights::Raw raw[kVecs];
  typename V::F w[kVecs];
  PLAIT_UNROLL
  for (int v = 0; v < kVecs; ++v) {
    const size_t tile = static_cast<size_t>(v / kTileVecs<V>) * tile_step;
    raw[v] = Weights::load(b + tile + vector_in_step<V, Weights>(v % kTileVecs<V>));
    w[v] = Weights::template value<0>(raw[v]);
  }
  multiply_add<V>(sums, t, t_stride, w);
  if constexpr (Weights::kTogether == 2) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) w[v] = Weights::template value<1>(raw[v]);
    multiply_add<V>(sums, t + 1, t_stride, w);
  }
}

template <class V, class Weights, int kRows, int kTiles>
void expand_tiles(const Expand& part, size_t output) {
  using W = typename Weights::W;
  constexpr int kVecs = kTiles * kTileVecs<V>;
  constexpr size_t kTogether = Weights::kTogether;
  typename V::F sums[kRows][kVecs];
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = V::zero();
  }
  const size_t width = smaller(kTileOutputs, part.outputs - output);
  const size_t tile_step = part.rank * kTileOutputs;
  const W* b = static_cast<const W*>(part.b) + output * part.rank;
  const char* ahead = reinterpret_cast<const char*>(b) + kFetchAhead;
  size_t j = 0;
  for (; j + kTogether <= part.rank; j += kTogether, b += kTogether * width) {
    if constexpr (kRows == 1) {
      constexpr size_t kBytes = kTiles * kTileOutputs * kTogether * sizeof(W);
      fetch<kBytes>(ahead);
      ahead += kBytes;
      expand_one<V, Weights>(sums, part.t + j, b, tile_step);
    } else {
      expand_step<V, Weights>(sums, part.t + j, part.t_stride, b, tile_step);
    }
  }
  if (j < part.rank) {  // an odd one has no partner
    typename V::F w[kVecs];
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const size_t tile = static_cast<size_t>(v / kTileVecs<V>) * tile_step;
      w[v] = V::load(b + tile + static_cast<size_t>(v % kTileVecs<V>) * V::kLanes);
    }
    multiply_add<V>(sums, part.t + j, part.t_stride, w);
  }
  if constexpr (kRows == 1) {
    if (try_add_scaled<V>(part, sums, output)) return;
  }
  float values[kRows][kVecs * V::kLanes];
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      V::store(&values[r][static_cast<size_t>(v) * V::kLanes], sums[r][v]);
    }
  }
  part.write(part, values[0], kRows, kTiles, output);
}

// Outputs from … to - 1; both are the beginnings of tiles, or the end.
template <class V, class Weights, int kRows>
void expand_panel(const Expand& part, size_t from, size_t to) {
  constexpr int kTiles = groups_that_fit<V>(kRows * kTileVecs<V>);
  size_t output = from;
  for (; output + kTiles * kTileOutputs <= to; output += kTiles * kTileOutputs) {
    expand_tiles<V, Weights, kRows, kTiles>(part, output);
  }
  for (; output < to; output += kTileOutputs) {
    expand_tiles<V, Weights, kRows, 1>(part, output);
  }
}

// --- around them ---------------------------------------------------------------------------------

// Calls body.template run<rows>() for a number of rows known when compiling.
template <class V, int kRows, class Body>
PLAIT_INLINE void for_rows(size_t rows, const Body& body) {
  if constexpr (kRows > 1) {
    if (rows < static_cast<size_t>(kRows)) {
      for_rows<V, kRows - 1>(rows, body);
      return;
    }
  }
  body.template run<kRows>();
}

template <class V, class Weights>
struct ShrinkPanel {
  ShrinkTile first;
  size_t ranks;

  template <int kRows>
  void run() const {
    ShrinkTile tile = first;
    for (size_t rank = 0; rank < ranks; rank += kTileOutputs) {
      tile.weight = static_cast<const typename Weights::W*>(first.weight) + rank * first.inputs;
      tile.width = smaller(kTileOutputs, ranks - rank);
      tile.t = first.t + rank;
      shrink_tile<V, Weights, kRows>(tile);
    }
  }
};

template <class V, class Weights>
struct ExpandPanel {
  Expand part;
  size_t from;
  size_t to;

  template <int kRows>
  void run() const {
    expand_panel<V, Weights, kRows>(part, from, to);
  }
};

inline const float* vector_at(const char* weights, int64_t offset) {
  return offset < 0 ? nullptr : reinterpret_cast<const float*>(weights + offset);
}

template <class V, class Weights>
void expand_part(const LoraJob& job, const LoraPart& part, const float* t, size_t t_stride,
                 size_t from, size_t to) {
  const char* weights = job.segment->weights;
  ExpandPanel<V, Weights> panel;
  panel.from = from;
  panel.to = to;
  panel.part.t_stride = t_stride;
  panel.part.b = weights + part.b;
  panel.part.rank = static_cast<size_t>(part.rank);
  panel.part.outputs = static_cast<size_t>(part.outputs);
  panel.part.b_bias = vector_at(weights, part.b_bias);
  panel.part.g = vector_at(weights, part.g);
  panel.part.bias = vector_at(weights, part.bias);
  panel.part.scale = static_cast<float>(job.segment->scale * part.scale);
  panel.part.write = job.out_type == Element::kFloat32 ? &write<V, float> : &write<V, uint16_t>;
  panel.part.out_type = job.out_type;
  panel.part.out_stride = job.out_stride;
  const Panels panels(job.rows, kMaxPanelRows<V>);
  for (size_t p = 0; p < panels.count; ++p) {
    const size_t row = panels.first_row(p);
    const size_t output = row * job.out_stride + static_cast<size_t>(part.start);
    panel.part.t = t + row * t_stride;
    panel.part.out = static_cast<char*>(job.out) + output * element_size(job.out_type);
    for_rows<V, kMaxPanelRows<V>>(panels.height(p), panel);
  }
}

template <class V, class Weights>
void shrink(const LoraJob& job) {
  const LoraSegment& segment = *job.segment;
  const auto ranks = static_cast<size_t>(segment.leaf.ranks);
  const size_t t_stride = lora_rank_stride(ranks);
  const auto* a = reinterpret_cast<const typename Weights::W*>(segment.weights + segment.leaf.a);
  if (job.x == nullptr) {
    gather<V, Weights>(job, a, job.t, t_stride);
    return;
  }
  const Panels panels(job.rows, kMaxPanelRows<V>);
  for (size_t p = 0; p < panels.count; ++p) {
    const size_t row = panels.first_row(p);
    ShrinkPanel<V, Weights> panel{};
    panel.first.x = job.x + row * job.x_stride;
    panel.first.x_stride = job.x_stride;
    panel.first.inputs = static_cast<size_t>(segment.leaf.inputs);
    panel.first.weight = a;
    panel.first.t = job.t + row * t_stride;
    panel.first.t_stride = t_stride;
    panel.ranks = ranks;
    for_rows<V, kMaxPanelRows<V>>(panels.height(p), panel);
  }
}

template <class V, class Weights>
void expand(const LoraJob& job, size_t begin, size_t end) {
  const LoraSegment& segment = *job.segment;
  const size_t t_stride = lora_rank_stride(static_cast<size_t>(segment.leaf.ranks));
  if (job.next != nullptr) fetch<kFetchAhead>(job.next);
  const float* t = job.t;
  for (int64_t i = 0; i < segment.leaf.num_parts; ++i) {
    const LoraPart& part = segment.parts[i];
    const size_t from = lora_cut(part, begin);
    const size_t to = lora_cut(part, end);
    if (from < to) expand_part<V, Weights>(job, part, t, t_stride, from, to);
    t += part.rank;
  }
}

template <class V>
void widen(const uint16_t* x, size_t count, float* out) {
  size_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) V::store(out + i, V::load(x + i));
  for (; i < count; ++i) out[i] = bf16_to_float(x[i]);
}

template <class V>
LoraKernels make_lora_kernels() {
  return {&widen<V>,
          {&shrink<V, Singles<V>>, &expand<V, Singles<V>>},
          {&shrink<V, Pairs<V>>, &expand<V, Pairs<V>>}};
}

}  // namespace
}  // namespace plait
