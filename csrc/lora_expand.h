// Expand: y = y + scale · b · t, some tiles of outputs at a time, for a panel of rows. Everything
// here has internal linkage, see vec.h.

#pragma once

#include "lora_codes.h"
#include "lora_weights.h"

namespace plait {
namespace {

// A part, ready to be applied to some rows.
struct Expand {
  const float* t;  // values, or scales and codes
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

// b · t of some tiles, of values …
template <class V, class Weights, int kTiles, int kRows, int kVecs>
PLAIT_INLINE void sum_values(const Expand& part, size_t output,
                             typename V::F (&sums)[kRows][kVecs]) {
  using W = typename Weights::W;
  constexpr size_t kTogether = Weights::kTogether;
  const size_t width = smaller(kTileOutputs, part.outputs - output);
  const size_t tile_step = part.rank * kTileOutputs;
  const W* b = static_cast<const W*>(part.b) + output * part.rank;
  const char* ahead = reinterpret_cast<const char*>(b) + kFetchAhead;
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = V::zero();
  }
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
}

// One group of codes, `pairs` pairs of ranks; b and ahead go on.
template <class Codes, bool kBegins, int kTiles, int kRows, int kVecs>
PLAIT_INLINE void sum_group(const Expand& part, const int16_t* t, const float* scales, size_t pairs,
                            size_t width, const int8_t*& b,
                            typename Codes::V::F (&sums)[kRows][kVecs]) {
  const size_t tile_step = lora_even(part.rank) * kTileOutputs;
  const char* ahead = reinterpret_cast<const char*>(b) + kFetchAhead;
  typename Codes::I whole[kRows][kVecs];
  clear<Codes>(whole);
  for (const int16_t* end = t + 2 * pairs; t < end; t += 2, b += 2 * width) {
    if constexpr (kRows == 1) {
      constexpr size_t kBytes = kTiles * kTileOutputs * 2;
      fetch<kBytes>(ahead);
      ahead += kBytes;
    }
    add_pair<Codes>(whole, t, 2 * part.t_stride, b, tile_step);
  }
  fold<Codes, kBegins>(whole, scales, part.t_stride, sums);
}

// … and of codes.
template <class Codes, int kTiles, int kRows, int kVecs>
PLAIT_INLINE void sum_codes(const Expand& part, size_t output,
                            typename Codes::V::F (&sums)[kRows][kVecs]) {
  const size_t rank = lora_even(part.rank);
  const size_t width = smaller(kTileOutputs, part.outputs - output);
  const size_t groups = (rank + kCodeGroup - 1) / kCodeGroup;
  const auto* t = reinterpret_cast<const int16_t*>(part.t + groups);
  const auto* b = static_cast<const int8_t*>(part.b) + output * rank;
  const size_t first = smaller(rank, kCodeGroup);
  sum_group<Codes, true, kTiles>(part, t, part.t, first / 2, width, b, sums);
  for (size_t group = 1; group < groups; ++group) {
    const size_t begin = group * kCodeGroup;
    const size_t pairs = smaller(rank - begin, kCodeGroup) / 2;
    sum_group<Codes, false, kTiles>(part, t + begin, part.t + group, pairs, width, b, sums);
  }
}

template <class V, class Weights, int kRows, int kTiles>
void expand_tiles(const Expand& part, size_t output) {
  constexpr int kVecs = kTiles * kTileVecs<V>;
  typename V::F sums[kRows][kVecs];
  if constexpr (Weights::kHasCodes) {
    sum_codes<Weights, kTiles>(part, output, sums);
  } else {
    sum_values<V, Weights, kTiles>(part, output, sums);
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
template <class V, class Weights, int kRows, int kTiles>
void expand_panel(const Expand& part, size_t from, size_t to) {
  size_t output = from;
  for (; output + kTiles * kTileOutputs <= to; output += kTiles * kTileOutputs) {
    expand_tiles<V, Weights, kRows, kTiles>(part, output);
  }
  if constexpr (kTiles > 1) {
    if (output < to) expand_panel<V, Weights, kRows, kTiles / 2>(part, output, to);
  } else {
    if (output < to) expand_tiles<V, Weights, kRows, 1>(part, output);
  }
}

template <class V, class Weights>
struct ExpandPanel {
  Expand part;
  size_t from;
  size_t to;

  template <int kRows>
  void run() const {
    expand_panel<V, Weights, kRows, groups_that_fit<V>(kRows * kTileVecs<V>)>(part, from, to);
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
  for_panels<V>(job.rows, [&](size_t row, size_t rows) {
    const size_t output = row * job.out_stride + static_cast<size_t>(part.start);
    panel.part.t = t + row * t_stride;
    panel.part.out = static_cast<char*>(job.out) + output * element_size(job.out_type);
    for_rows<V, kMaxPanelRows<V>>(rows, panel);
  });
}

template <class V, class Weights>
void expand(const LoraJob& job, size_t begin, size_t end) {
  const LoraSegment& segment = *job.segment;
  const size_t t_stride = lora_t_stride(segment.type, segment.leaf);
  if (job.next != nullptr) fetch<kFetchAhead>(job.next);
  const float* t = job.t;
  if constexpr (Weights::kHasCodes) t += lora_rank_stride(static_cast<size_t>(segment.leaf.ranks));
  for (int64_t i = 0; i < segment.leaf.num_parts; ++i) {
    const LoraPart& part = segment.parts[i];
    const size_t from = lora_cut(part, begin);
    const size_t to = lora_cut(part, end);
    if (from < to) expand_part<V, Weights>(job, part, t, t_stride, from, to);
    t += part.rank + (Weights::kHasCodes ? 1 : 0);
  }
}

}  // namespace
}  // namespace plait
