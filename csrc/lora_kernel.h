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
constexpr size_t kFetchAhead = 2048;

template <size_t kBytes>
PLAIT_INLINE void fetch(const char* from) {
  PLAIT_UNROLL
  for (size_t i = 0; i < kBytes; i += 64) __builtin_prefetch(from + i, 0, 3);
}

// --- shrink --------------------------------------------------------------------------------------

template <class V, class W, int kRows, int kVecs>
PLAIT_INLINE void multiply_add(typename V::F (&sums)[kRows][kVecs], const float* x, size_t x_stride,
                               const W* weight) {
  typename V::F w[kVecs];
  PLAIT_UNROLL
  for (int v = 0; v < kVecs; ++v) w[v] = V::load(weight + static_cast<size_t>(v) * V::kLanes);
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const typename V::F value = V::broadcast(x[static_cast<size_t>(r) * x_stride]);
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = V::fma(value, w[v], sums[r][v]);
  }
}

// t of one tile. As many chains run at once as registers hold; the order in each stays the same.
template <class V, class W, int kRows>
void shrink_tile(const float* x, size_t x_stride, size_t inputs, const W* weight, size_t width,
                 float* t, size_t t_stride) {
  constexpr int kVecs = kTileVecs<V>;
  constexpr int kAtOnce = groups_that_fit<V>(kRows * kVecs);
  typename V::F totals[kLoraChains][kRows][kVecs];
  PLAIT_UNROLL
  for (size_t first = 0; first < kLoraChains; first += kAtOnce) {
    typename V::F sums[kAtOnce][kRows][kVecs];
    PLAIT_UNROLL
    for (int c = 0; c < kAtOnce; ++c) {
      PLAIT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        PLAIT_UNROLL
        for (int v = 0; v < kVecs; ++v) sums[c][r][v] = V::zero();
      }
    }
    const W* w = weight + first * width;
    size_t k = first;
    for (; k + kAtOnce <= inputs; k += kLoraChains, w += kLoraChains * width) {
      if constexpr (kRows == 1) {
        fetch<kLoraChains * kTileOutputs * sizeof(W)>(reinterpret_cast<const char*>(w) +
                                                      kFetchAhead);
      }
      PLAIT_UNROLL
      for (int c = 0; c < kAtOnce; ++c) {
        const auto chain = static_cast<size_t>(c);
        multiply_add<V, W, kRows, kVecs>(sums[c], x + k + chain, x_stride, w + chain * width);
      }
    }
    PLAIT_UNROLL
    for (int c = 0; c + 1 < kAtOnce; ++c) {
      const auto chain = static_cast<size_t>(c);
      if (k + chain < inputs) {
        multiply_add<V, W, kRows, kVecs>(sums[c], x + k + chain, x_stride, w + chain * width);
      }
    }
    PLAIT_UNROLL
    for (int c = 0; c < kAtOnce; ++c) {
      PLAIT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        PLAIT_UNROLL
        for (int v = 0; v < kVecs; ++v)
          totals[first + static_cast<size_t>(c)][r][v] = sums[c][r][v];
      }
    }
  }
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const typename V::F low = V::add(totals[0][r][v], totals[1][r][v]);
      const typename V::F high = V::add(totals[2][r][v], totals[3][r][v]);
      float* to = t + static_cast<size_t>(r) * t_stride + static_cast<size_t>(v) * V::kLanes;
      V::store(to, V::add(low, high));
    }
  }
}

constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

template <class V, class W, int kRows>
void shrink_panel(const float* x, size_t x_stride, size_t inputs, const W* a, size_t ranks,
                  float* t, size_t t_stride) {
  for (size_t rank = 0; rank < ranks; rank += kTileOutputs) {
    const size_t width = smaller(kTileOutputs, ranks - rank);
    shrink_tile<V, W, kRows>(x, x_stride, inputs, a + rank * inputs, width, t + rank, t_stride);
  }
}

// The columns of a that the tokens name.
template <class V, class W>
void gather(const LoraJob& job, const W* a, float* t, size_t t_stride) {
  const auto inputs = static_cast<size_t>(job.segment->leaf.inputs);
  const auto ranks = static_cast<size_t>(job.segment->leaf.ranks);
  for (size_t row = 0; row < job.rows; ++row) {
    const auto token = static_cast<size_t>(job.token_ids[row]);
    for (size_t rank = 0; rank < ranks; rank += kTileOutputs) {
      const size_t width = smaller(kTileOutputs, ranks - rank);
      const W* from = a + rank * inputs + token * width;
      for (size_t i = 0; i < kTileOutputs; i += V::kLanes) {
        V::store(t + row * t_stride + rank + i, V::load(from + i));
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

template <class V, class W, int kRows, int kTiles>
void expand_tiles(const Expand& part, size_t output) {
  constexpr int kVecs = kTiles * kTileVecs<V>;
  typename V::F sums[kRows][kVecs];
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = V::zero();
  }
  const size_t width = smaller(kTileOutputs, part.outputs - output);
  const W* b = static_cast<const W*>(part.b) + output * part.rank;
  const char* ahead = reinterpret_cast<const char*>(b) + kFetchAhead;
  for (size_t j = 0; j < part.rank; ++j) {
    if constexpr (kRows == 1) {
      constexpr size_t kBytes = kTiles * kTileOutputs * sizeof(W);
      fetch<kBytes>(ahead + j * kBytes);
    }
    typename V::F w[kVecs];
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const size_t tile = static_cast<size_t>(v / kTileVecs<V>) * part.rank * kTileOutputs;
      const size_t lane = static_cast<size_t>(v % kTileVecs<V>) * V::kLanes;
      w[v] = V::load(b + tile + j * width + lane);
    }
    PLAIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const typename V::F t = V::broadcast(part.t[static_cast<size_t>(r) * part.t_stride + j]);
      PLAIT_UNROLL
      for (int v = 0; v < kVecs; ++v) sums[r][v] = V::fma(t, w[v], sums[r][v]);
    }
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

template <class V, class W, int kRows>
void expand_panel(const Expand& part) {
  constexpr int kTiles = groups_that_fit<V>(kRows * kTileVecs<V>);
  size_t output = 0;
  for (; output + kTiles * kTileOutputs <= part.outputs; output += kTiles * kTileOutputs) {
    expand_tiles<V, W, kRows, kTiles>(part, output);
  }
  if constexpr (kTiles > 1) {
    for (; output < part.outputs; output += kTileOutputs) {
      expand_tiles<V, W, kRows, 1>(part, output);
    }
  } else if (output < part.outputs) {
    expand_tiles<V, W, kRows, 1>(part, output);
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

template <class V, class W>
struct ShrinkPanel {
  const float* x;
  size_t x_stride;
  size_t inputs;
  const W* a;
  size_t ranks;
  float* t;
  size_t t_stride;

  template <int kRows>
  void run() const {
    shrink_panel<V, W, kRows>(x, x_stride, inputs, a, ranks, t, t_stride);
  }
};

template <class V, class W>
struct ExpandPanel {
  Expand part;

  template <int kRows>
  void run() const {
    expand_panel<V, W, kRows>(part);
  }
};

inline const float* vector_at(const char* weights, int64_t offset) {
  return offset < 0 ? nullptr : reinterpret_cast<const float*>(weights + offset);
}

template <class V, class W>
void expand_part(const LoraJob& job, const LoraPart& part, const float* t, size_t t_stride,
                 const Panels& panels) {
  const char* weights = job.segment->weights;
  ExpandPanel<V, W> panel;
  panel.part.t_stride = t_stride;
  panel.part.b = weights + part.b;
  panel.part.rank = static_cast<size_t>(part.rank);
  panel.part.outputs = static_cast<size_t>(part.outputs);
  panel.part.b_bias = vector_at(weights, part.b_bias);
  panel.part.g = vector_at(weights, part.g);
  panel.part.bias = vector_at(weights, part.bias);
  panel.part.scale = static_cast<float>(job.segment->scale * part.scale);
  panel.part.write = job.out_type == Element::kFloat32 ? &write<V, float> : &write<V, uint16_t>;
  panel.part.out_stride = job.out_stride;
  for (size_t p = 0; p < panels.count; ++p) {
    const size_t row = panels.first_row(p);
    const size_t output = row * job.out_stride + static_cast<size_t>(part.start);
    panel.part.t = t + row * t_stride;
    panel.part.out = static_cast<char*>(job.out) + output * element_size(job.out_type);
    for_rows<V, kMaxPanelRows<V>>(panels.height(p), panel);
  }
}

template <class V, class W>
void run_job(const LoraJob& job) {
  const LoraSegment& segment = *job.segment;
  const Panels panels(job.rows, kMaxPanelRows<V>);
  const auto ranks = static_cast<size_t>(segment.leaf.ranks);
  const size_t t_stride = lora_rank_stride(ranks);
  const auto* a = reinterpret_cast<const W*>(segment.weights + segment.leaf.a);
  float* t = job.scratch;
  if (job.x == nullptr) {
    gather<V>(job, a, t, t_stride);
  } else {
    for (size_t p = 0; p < panels.count; ++p) {
      const size_t row = panels.first_row(p);
      const ShrinkPanel<V, W> panel{job.x + row * job.x_stride,
                                    job.x_stride,
                                    static_cast<size_t>(segment.leaf.inputs),
                                    a,
                                    ranks,
                                    t + row * t_stride,
                                    t_stride};
      for_rows<V, kMaxPanelRows<V>>(panels.height(p), panel);
    }
  }
  if (job.next != nullptr) fetch<kFetchAhead>(job.next);
  for (int64_t i = 0; i < segment.leaf.num_parts; ++i) {
    expand_part<V, W>(job, segment.parts[i], t, t_stride, panels);
    t += segment.parts[i].rank;
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
  return {&widen<V>, &run_job<V, float>, &run_job<V, uint16_t>};
}

}  // namespace
}  // namespace plait
