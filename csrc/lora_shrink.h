// Shrink: t = a · x, a tile of ranks after the other, for a panel of rows. Everything here has
// internal linkage, see vec.h.

#pragma once

#include "lora_weights.h"

namespace plait {
namespace {

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
      fetch<kLoraChains * kVecs * V::kLanes * sizeof(*w)>(reinterpret_cast<const char*>(w) +
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

template <class V, class Weights, int kRows, int kVecs>
void shrink_tile(const ShrinkTile& tile) {
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
      if (tile.width <= V::kLanes) {  // as of rank 8
        shrink_tile<V, Weights, kRows, 1>(tile);
      } else {
        shrink_tile<V, Weights, kRows, kTileVecs<V>>(tile);
      }
    }
  }
};

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
  ShrinkPanel<V, Weights> panel{};
  panel.first.x_stride = job.x_stride;
  panel.first.inputs = static_cast<size_t>(segment.leaf.inputs);
  panel.first.weight = a;
  panel.first.t_stride = t_stride;
  panel.ranks = ranks;
  for_panels<V>(job.rows, [&](size_t row, size_t rows) {
    panel.first.x = job.x + row * job.x_stride;
    panel.first.t = job.t + row * t_stride;
    for_rows<V, kMaxPanelRows<V>>(rows, panel);
  });
}

}  // namespace
}  // namespace plait
