// Shrink over int8 weights, and what expand sums of them. Products of whole numbers are exact: a
// vector instruction takes two inputs of every output, of 16 bits with codes widened to as many.
// Everything here has internal linkage, see vec.h.
//
// A row's t is followed by its codes, part by part at rank + index of the part: fp32 scales of the
// groups, then codes, whose last one of an odd number is followed by a zero.

#pragma once

#include "lora_weights.h"

namespace plait {
namespace {

// Whole numbers beside PlainVec; lora_codes_*.h have the others.
struct PlainCodes {
  using V = PlainVec;
  typedef int32_t I __attribute__((vector_size(16)));
  struct W {
    I first;
    I second;
  };
  static constexpr bool kHasCodes = true;

  static I zero() { return I{}; }
  // The pairs of as many outputs as there are lanes.
  static W load(const int8_t* p) { return {I{p[0], p[2], p[4], p[6]}, I{p[1], p[3], p[5], p[7]}}; }
  static W broadcast(const int16_t* pair) {
    return {I{pair[0], pair[0], pair[0], pair[0]}, I{pair[1], pair[1], pair[1], pair[1]}};
  }
  static void add(I& sum, W codes, W pair) {
    sum += codes.first * pair.first + codes.second * pair.second;
  }
  static V::F to_float(I v) {
    return V::F{static_cast<float>(v[0]), static_cast<float>(v[1]), static_cast<float>(v[2]),
                static_cast<float>(v[3])};
  }
  // Rounds to nearest even; values are below 2^15.
  static void store(int16_t* p, V::F v) {
    v = V::round(v);
    for (size_t i = 0; i < V::kLanes; ++i) p[i] = static_cast<int16_t>(v[i]);
  }
};

// --- rows to codes -------------------------------------------------------------------------------

// Makes codes of `count` values, of an odd number one more, 0; returns their scale. One of values
// that are not all finite is NaN, so that their sums are.
template <class Codes>
PLAIT_INLINE float encode(const float* x, size_t count, int16_t* codes) {
  using V = typename Codes::V;
  uint32_t most_bits = 0;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= 0x7fffffffu;
    most_bits = bits > most_bits ? bits : most_bits;
  }
  float most;
  std::memcpy(&most, &most_bits, sizeof(most));
  if (!(most > 1e-30f) || !(most < __builtin_inff())) {  // 32767 / most could overflow
    std::memset(codes, 0, lora_even(count) * sizeof(*codes));
    return most <= 1e-30f ? 0.0f : __builtin_nanf("");
  }
  const typename V::F inverse = V::broadcast(32767.0f / most);
  size_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    Codes::store(codes + i, V::mul(V::load(x + i), inverse));
  }
  if (i < count) {
    int16_t last[V::kLanes];
    Codes::store(last, V::mul(load_some<V>(x + i, count - i), inverse));
    std::memcpy(codes + i, last, (lora_even(count) - i) * sizeof(*codes));
  }
  return most * (1.0f / 32767.0f);
}

constexpr size_t kEncodedInputs = 1024;  // at a time

template <int kRows>
struct EncodedRows {
  int16_t codes[kRows][kEncodedInputs];
  float scales[kRows][kEncodedInputs / kCodeGroup];
};

template <class Codes, int kRows>
void encode_rows(const float* x, size_t stride, size_t count, EncodedRows<kRows>& rows) {
  for (size_t r = 0; r < kRows; ++r) {
    const float* row = x + r * stride;
    size_t i = 0;
    float* scale = rows.scales[r];
    for (; i + kCodeGroup <= count; i += kCodeGroup) {
      *scale++ = encode<Codes>(row + i, kCodeGroup, rows.codes[r] + i);
    }
    if (i < count) *scale = encode<Codes>(row + i, count - i, rows.codes[r] + i);
  }
}

// Behind each row's t, the codes of its parts.
template <class Codes>
void encode_t(const LoraSegment& segment, float* t) {
  const auto ranks = static_cast<size_t>(segment.leaf.ranks);
  float* to = t + lora_rank_stride(ranks);
  for (int64_t p = 0; p < segment.leaf.num_parts; ++p) {
    const auto rank = static_cast<size_t>(segment.parts[p].rank);
    float* scale = to;
    auto* codes = reinterpret_cast<int16_t*>(to + (rank + kCodeGroup - 1) / kCodeGroup);
    for (size_t i = 0; i < rank; i += kCodeGroup) {
      *scale++ = encode<Codes>(t + i, smaller(kCodeGroup, rank - i), codes + i);
    }
    t += rank;
    to += rank + 1;
  }
}

// --- products ------------------------------------------------------------------------------------

template <class Codes, int kRows, int kVecs>
PLAIT_INLINE void clear(typename Codes::I (&whole)[kRows][kVecs]) {
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) whole[r][v] = Codes::zero();
  }
}

// One pair of tiles that lie tile_step bytes apart; `pair` is of the first row, and those of the
// others follow `stride` codes apart.
template <class Codes, int kRows, int kVecs>
PLAIT_INLINE void add_pair(typename Codes::I (&whole)[kRows][kVecs], const int16_t* pair,
                           size_t stride, const int8_t* codes, size_t tile_step) {
  using V = typename Codes::V;
  constexpr int kTile = kTileVecs<V>;
  typename Codes::W w[kVecs];
  PLAIT_UNROLL
  for (int v = 0; v < kVecs; ++v) {
    w[v] = Codes::load(codes + static_cast<size_t>(v / kTile) * tile_step +
                       static_cast<size_t>(v % kTile) * V::kLanes * 2);
    if constexpr (kRows == 1) Codes::add(whole[0][v], w[v], Codes::broadcast(pair));
  }
  if constexpr (kRows == 1) return;
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const auto x = Codes::broadcast(pair + static_cast<size_t>(r) * stride);
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) Codes::add(whole[r][v], w[v], x);
  }
}

// Begins the chains with a group, or folds it in; scales are `stride` apart.
template <class Codes, bool kBegins, int kRows, int kVecs>
PLAIT_INLINE void fold(const typename Codes::I (&whole)[kRows][kVecs], const float* scales,
                       size_t stride, typename Codes::V::F (&sums)[kRows][kVecs]) {
  using V = typename Codes::V;
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const auto scale = V::broadcast(scales[static_cast<size_t>(r) * stride]);
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const auto value = Codes::to_float(whole[r][v]);
      sums[r][v] = kBegins ? V::mul(value, scale) : V::fma(value, scale, sums[r][v]);
    }
  }
}

// --- shrink --------------------------------------------------------------------------------------

// Ranks of one tile, over the encoded inputs. Goes on from the sums in t, or from zero.
template <class Codes, int kRows, int kVecs>
PLAIT_INLINE void shrink_codes_tile(const EncodedRows<kRows>& rows, size_t count,
                                    const int8_t* codes, size_t width, bool resume, float* t,
                                    size_t t_stride) {
  using V = typename Codes::V;
  constexpr size_t kPairs = 4;  // of inputs, in a turn of the loop
  typename V::F sums[kRows][kVecs];
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const size_t at = static_cast<size_t>(r) * t_stride + static_cast<size_t>(v) * V::kLanes;
      sums[r][v] = resume ? V::load(t + at) : V::zero();
    }
  }
  for (size_t first = 0; first < count; first += kCodeGroup) {
    const size_t end = smaller(first + kCodeGroup, count);
    typename Codes::I whole[kRows][kVecs];
    clear<Codes>(whole);
    size_t k = first;
    for (; k + 2 * kPairs <= end; k += 2 * kPairs) {
      if constexpr (kRows == 1) {
        fetch<2 * kPairs * kVecs * V::kLanes>(reinterpret_cast<const char*>(codes) + kFetchAhead);
      }
      PLAIT_UNROLL
      for (size_t i = 0; i < kPairs; ++i, codes += 2 * width) {
        add_pair<Codes>(whole, rows.codes[0] + k + 2 * i, kEncodedInputs, codes, 0);
      }
    }
    for (; k < end; k += 2, codes += 2 * width) {
      add_pair<Codes>(whole, rows.codes[0] + k, kEncodedInputs, codes, 0);
    }
    fold<Codes, false>(whole, rows.scales[0] + first / kCodeGroup, kEncodedInputs / kCodeGroup,
                       sums);
  }
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const size_t at = static_cast<size_t>(r) * t_stride + static_cast<size_t>(v) * V::kLanes;
      V::store(t + at, sums[r][v]);
    }
  }
}

template <class Codes>
struct ShrinkCodesPanel {
  const float* x;
  size_t x_stride;
  size_t inputs;
  const int8_t* codes;
  size_t ranks;
  float* t;
  size_t t_stride;

  template <int kRows>
  void run() const {
    using V = typename Codes::V;
    EncodedRows<kRows> rows;
    for (size_t first = 0; first < inputs; first += kEncodedInputs) {
      const size_t count = smaller(kEncodedInputs, inputs - first);
      encode_rows<Codes>(x + first, x_stride, count, rows);
      for (size_t rank = 0; rank < ranks; rank += kTileOutputs) {
        const size_t width = smaller(kTileOutputs, ranks - rank);
        const int8_t* tile = codes + rank * lora_even(inputs) + first * width;
        if (width <= V::kLanes) {  // as of rank 8
          shrink_codes_tile<Codes, kRows, 1>(rows, count, tile, width, first > 0, t + rank,
                                             t_stride);
        } else {
          shrink_codes_tile<Codes, kRows, kTileVecs<V>>(rows, count, tile, width, first > 0,
                                                        t + rank, t_stride);
        }
      }
    }
  }
};

// The columns of a that the tokens name.
inline void gather_codes(const LoraJob& job, const int8_t* codes, size_t t_stride) {
  const auto inputs = static_cast<size_t>(job.segment->leaf.inputs);
  const auto ranks = static_cast<size_t>(job.segment->leaf.ranks);
  for (size_t row = 0; row < job.rows; ++row) {
    const auto token = static_cast<size_t>(job.token_ids[row]);
    for (size_t rank = 0; rank < ranks; ++rank) {
      const size_t tile = rank / kTileOutputs * kTileOutputs;
      const size_t width = smaller(kTileOutputs, ranks - tile);
      const size_t step = tile * lora_even(inputs) + token / 2 * 2 * width;
      job.t[row * t_stride + rank] = codes[step + 2 * (rank - tile) + token % 2];
    }
  }
}

template <class Codes>
void shrink_codes(const LoraJob& job) {
  using V = typename Codes::V;
  const LoraSegment& segment = *job.segment;
  const auto ranks = static_cast<size_t>(segment.leaf.ranks);
  const size_t t_stride = lora_t_stride(LoraType::kInt8, segment.leaf);
  const auto* factors = reinterpret_cast<const float*>(segment.weights + segment.leaf.a);
  const auto* codes = reinterpret_cast<const int8_t*>(factors + ranks);
  if (job.x == nullptr) {
    gather_codes(job, codes, t_stride);
  } else {
    ShrinkCodesPanel<Codes> panel{job.x,   job.x_stride, static_cast<size_t>(segment.leaf.inputs),
                                  codes,   ranks,        job.t,
                                  t_stride};
    for_panels<V>(job.rows, [&](size_t row, size_t rows) {
      panel.x = job.x + row * job.x_stride;
      panel.t = job.t + row * t_stride;
      for_rows<V, kMaxPanelRows<V>>(rows, panel);
    });
  }
  for (size_t row = 0; row < job.rows; ++row) {
    float* t = job.t + row * t_stride;
    for (size_t i = 0; i < ranks; i += V::kLanes) {
      V::store(t + i, V::mul(V::load(t + i), load_some<V>(factors + i, ranks - i)));
    }
    encode_t<Codes>(segment, t);
  }
}

}  // namespace
}  // namespace plait
