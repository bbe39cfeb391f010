// The micro-kernel of quantized weights: a panel of a few rows by a tile, or by several that lie
// far apart. For each row group it sums the products of codes in whole numbers, in registers, and
// folds them with the scales into the outputs' chains. quantized_kernel.h chooses the tiles.
//
// Memory gives most where several places are read in turn, each without jumps. So one row takes up
// to four tiles at a time that lie far apart. On AVX2 it reads their headers before their codes,
// not line by line beside them, and fetches 4-bit codes at an even pace, 8-bit ones not at all:
// where memory gave 24 GB/s, that and the fourth tile took 8 bits from 18 to 22 GB/s, 4 bits
// without minimums from 19 to 20.

#pragma once

#include "linear_kernel.h"
#include "quantized_linear.h"

namespace plait {

constexpr size_t kMostTiles = 4;     // that a micro-kernel takes at once
constexpr size_t kCodesAhead = 256;  // bytes of their codes that are fetched before use

namespace {

// How codes lie before a micro-kernel: pairs of 4 bits; 4 bits in bytes; bytes.
enum class Codes { kNibbles, kSmall, kBytes };

// Tiles that a micro-kernel takes at once.
template <class Q>
constexpr int tiles_at_once(int rows) {
  static_assert(Q::kMostTiles <= kMostTiles);
  const int tiles = Q::kMaxRows / rows;
  return tiles > static_cast<int>(Q::kMostTiles) ? static_cast<int>(Q::kMostTiles) : tiles;
}

// Whether Q::dot fetches ahead by itself where it takes several tiles.
template <class Q>
constexpr bool paces_itself(int rows) {
  return Q::kFetchesInStep && rows == 1;
}

struct TileCall {
  const uint8_t* factors;  // of the first group's block, where scales have two levels
  const uint8_t* header;   // of the first group
  const uint8_t* codes;
  size_t apart;   // bytes from a tile to the next one of the call
  const char* x;  // of the panel, from the block's first row group on
  size_t groups;  // of the block
  size_t parts;   // row groups in a group
  size_t group;   // as in QuantizedWeight
  ScaleType scales;
  bool resume;          // go on from these sums, else from zero
  float* sums;          // [tiles][rows][16]
  const uint8_t* next;  // of the first tile, or memory of somebody else, to fetch meanwhile, …
  size_t next_bytes;    // … so many bytes further each row group, …
  size_t next_lines;    // … and, for a tile alone, so many lines each time
};

template <int kLines>
PLAIT_INLINE void fetch_lines(const uint8_t* from) {
  PLAIT_UNROLL
  for (int i = 0; i < kLines; ++i) {
    __builtin_prefetch(from + static_cast<size_t>(i) * kQuantLineBytes, 0, 2);
  }
}

// A loop costs as much as the fetches; numbers that are frequent do without.
PLAIT_INLINE void fetch_lines(const uint8_t* from, size_t count) {
  if (count == 0) return;
  if (count == 4) return fetch_lines<4>(from);
  if (count == 8) return fetch_lines<8>(from);
  for (size_t i = 0; i < count; ++i) fetch_lines<1>(from + i * kQuantLineBytes);
}

using TileKernel = void (*)(const TileCall&);

// Fetches lines begin … end - 1 of a tile, and those of the tiles beside it; returns the end. What
// one row reads is not needed again before all other weights: it shall not drive out of the caches
// what is.
template <int kTiles>
PLAIT_INLINE const uint8_t* fetch(const uint8_t* begin, const uint8_t* end, size_t apart) {
  for (; begin < end; begin += kQuantLineBytes) {
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t)
      __builtin_prefetch(begin + t * apart, 0, kTiles > 1 ? 0 : 3);
  }
  return begin;
}

// A row group's codes, those of the tiles beside it, and what Q::dot fetches meanwhile where it
// does: as many lines, somewhere ahead.
struct GroupCodes {
  const uint8_t* codes;
  size_t apart;  // bytes from a tile to the next one
  const uint8_t* ahead;
};

template <class Q>
PLAIT_INLINE void load_plane(ScaleType type, const uint8_t* factors, const uint8_t* plane,
                             typename Q::V::F (&out)[Q::kVecs]) {
  using V = typename Q::V;
  PLAIT_UNROLL
  for (int v = 0; v < Q::kVecs; ++v) {
    const size_t lane = static_cast<size_t>(v) * V::kLanes;
    if (type == ScaleType::kHalf) {
      out[v] = Q::load_half(reinterpret_cast<const uint16_t*>(plane) + lane);
    } else if (type == ScaleType::kFloat) {
      out[v] = V::load(reinterpret_cast<const float*>(plane) + lane);
    } else {
      const auto factor = Q::load_half(reinterpret_cast<const uint16_t*>(factors) + lane);
      out[v] = V::mul(factor, Q::load_small(reinterpret_cast<const int8_t*>(plane) + lane));
    }
  }
}

// Walks over the headers of groups, from the first one of a block of 256 inputs on.
class Headers {
 public:
  Headers(ScaleType scales, size_t planes, size_t group, const uint8_t* factors,
          const uint8_t* header)
      : scales_(scales),
        plane_bytes_(kQuantTileOutputs * (scales == ScaleType::kFloat  ? 4
                                          : scales == ScaleType::kHalf ? 2
                                                                       : 1)),
        factor_bytes_(2 * kQuantTileOutputs * planes),
        groups_in_block_(group == 0 ? 1 : kBlockInputs / group),
        left_(groups_in_block_),
        factors_(factors),
        header_(header) {}

  // The scales of the group and, where there are some, its minimums, of tiles `apart` bytes apart.
  template <class Q, bool kMins, int kTiles>
  PLAIT_INLINE void next(size_t apart, typename Q::V::F (&scale)[kTiles][Q::kVecs],
                         typename Q::V::F (&min)[kTiles][Q::kVecs]) {
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t) {
      load_plane<Q>(scales_, factors_ + t * apart, header_ + t * apart, scale[t]);
      if constexpr (kMins) {
        load_plane<Q>(scales_, factors_ + t * apart + 2 * kQuantTileOutputs,
                      header_ + t * apart + plane_bytes_, min[t]);
      }
    }
    header_ += kMins ? 2 * plane_bytes_ : plane_bytes_;
    if (scales_ == ScaleType::kTwoLevels && --left_ == 0) {
      left_ = groups_in_block_;
      factors_ += factor_bytes_;
    }
  }

 private:
  ScaleType scales_;
  size_t plane_bytes_;
  size_t factor_bytes_;
  size_t groups_in_block_;
  size_t left_;
  const uint8_t* factors_;
  const uint8_t* header_;
};

template <class Q, int kCount>
PLAIT_INLINE void load_sums(const TileCall& call, typename Q::V::F (&sums)[kCount][Q::kVecs]) {
  using V = typename Q::V;
  PLAIT_UNROLL
  for (int i = 0; i < kCount; ++i) {
    PLAIT_UNROLL
    for (int v = 0; v < Q::kVecs; ++v) {
      const float* from = call.sums + static_cast<size_t>(i * Q::kVecs + v) * V::kLanes;
      sums[i][v] = call.resume ? V::load(from) : V::zero();
    }
  }
}

// Adds what a row group of a tile gives to the sums of each row; `ends` are the panel's scales and
// offsets.
template <class Q, bool kMins, int kRows>
PLAIT_INLINE void fold(const typename Q::I (&dots)[kRows][Q::kVecs], const float* ends,
                       const typename Q::V::F (&scale)[Q::kVecs],
                       const typename Q::V::F (&min)[Q::kVecs],
                       typename Q::V::F (*sums)[Q::kVecs]) {
  using V = typename Q::V;
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const auto row_scale = V::broadcast(ends[r]);
    PLAIT_UNROLL
    for (int v = 0; v < Q::kVecs; ++v) {
      sums[r][v] = V::fma(Q::to_float(dots[r][v]), V::mul(scale[v], row_scale), sums[r][v]);
      if constexpr (kMins) sums[r][v] = V::fma(min[v], V::broadcast(ends[kRows + r]), sums[r][v]);
    }
  }
}

// Where a call over whole tiles fetches from, whose row groups have kCodeBytes of codes: from their
// codes, and from the end on from those of the tiles that follow, behind their headers.
template <size_t kCodeBytes>
class CodesAhead {
 public:
  explicit CodesAhead(const TileCall& call)
      : header_bytes_(call.codes - call.factors),
        end_(call.codes + call.groups * call.parts * kCodeBytes) {}

  // When `codes` come next.
  PLAIT_INLINE const uint8_t* of(const uint8_t* codes) const {
    const uint8_t* const line = codes + (kCodeBytes > kCodesAhead ? kCodeBytes : kCodesAhead);
    return line < end_ ? line : line + header_bytes_;
  }

 private:
  ptrdiff_t header_bytes_;
  const uint8_t* end_;
};

// Loads, as fetches of so many lines wait for each other.
template <int kTiles>
PLAIT_INLINE void read_headers(const TileCall& call) {
  for (const uint8_t* line = call.factors; line < call.codes; line += kQuantLineBytes) {
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t) {
      static_cast<void>(*static_cast<const volatile uint8_t*>(line + t * call.apart));
    }
  }
}

// kHalves: every row group has scales of its own, as fp16. They are then loaded where they are
// used, and take no registers meanwhile.
template <class Q, Codes kCodes, int kSteps, bool kMins, int kRows, int kTiles, bool kHalves>
PLAIT_INLINE void multiply_tile(const TileCall& call) {
  using V = typename Q::V;
  using F = typename V::F;
  constexpr int kVecs = Q::kVecs;
  constexpr size_t kCodeBytes = kSteps * kQuantLineBytes / (kCodes == Codes::kNibbles ? 2 : 1);
  constexpr size_t kXBytes = kRows * kSteps * Q::template step_bytes<kCodes, kRows, kMins>();

  F sums[kTiles * kRows][kVecs];
  load_sums<Q>(call, sums);
  Headers headers(kHalves ? ScaleType::kHalf : call.scales, kMins ? 2 : 1, call.group, call.factors,
                  call.header);
  const uint8_t* codes = call.codes;
  const char* x = call.x;
  const uint8_t* next = call.next;
  const size_t next_bytes = call.next_bytes;
  const size_t next_lines = call.next_lines;
  const uint8_t* wanted = next;
  const CodesAhead<kCodeBytes> ahead(call);
  constexpr bool kPaced = kTiles > 1 && paces_itself<Q>(kRows);
  if constexpr (kPaced) read_headers<kTiles>(call);
  for (size_t g = 0; g < call.groups; ++g) {
    F scale[kTiles][kVecs], min[kTiles][kVecs];
    if constexpr (!kHalves) headers.next<Q, kMins, kTiles>(call.apart, scale, min);
    for (size_t part = 0; part < (kHalves ? 1 : call.parts); ++part) {
      if constexpr (kTiles > 1 && !kPaced) {
        wanted += next_bytes;
        next = fetch<kTiles>(next, wanted, call.apart);
      } else if constexpr (kTiles == 1) {
        fetch_lines(next, next_lines);
        next += next_bytes;
      }
      const char* const ends = x + kXBytes;
      typename Q::I dots[kTiles][kRows][kVecs];
      Q::template dot<kCodes, kSteps, kMins, kTiles, kRows>(
          {codes, call.apart, kPaced ? ahead.of(codes) : nullptr}, x, ends + 4 * kRows, dots);
      if constexpr (kHalves) headers.next<Q, kMins, kTiles>(call.apart, scale, min);
      PLAIT_UNROLL
      for (size_t t = 0; t < kTiles; ++t) {
        fold<Q, kMins, kRows>(dots[t], reinterpret_cast<const float*>(ends), scale[t], min[t],
                              sums + t * kRows);
      }
      codes += kCodeBytes;
      x += kXBytes + 8 * kRows;
    }
  }
  PLAIT_UNROLL
  for (int i = 0; i < kTiles * kRows; ++i) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      V::store(call.sums + static_cast<size_t>(i * kVecs + v) * V::kLanes, sums[i][v]);
    }
  }
}

template <class Q, Codes kCodes, int kSteps, bool kMins, int kRows, int kTiles>
void tile_kernel(const TileCall& call) {
  if constexpr (kTiles > 1) {
    if (call.scales == ScaleType::kHalf && call.parts == 1) {
      multiply_tile<Q, kCodes, kSteps, kMins, kRows, kTiles, true>(call);
      return;
    }
  }
  multiply_tile<Q, kCodes, kSteps, kMins, kRows, kTiles, false>(call);
}

// Several tiles at once are for codes as they are stored.
template <class Q, Codes kCodes, int kSteps, bool kMins, int kRows>
TileKernel tile_kernel_if_it_fits(bool alone) {
  if constexpr (kRows <= Q::kMaxRows) {
    if constexpr (kCodes != Codes::kSmall) {
      if (!alone) return &tile_kernel<Q, kCodes, kSteps, kMins, kRows, tiles_at_once<Q>(kRows)>;
    }
    return &tile_kernel<Q, kCodes, kSteps, kMins, kRows, 1>;
  }
  return nullptr;
}

template <class Q, Codes kCodes, int kSteps, bool kMins>
TileKernel tile_kernel_of_rows(size_t rows, bool alone) {
  static_assert(Q::kMaxRows <= 8);
  switch (rows) {
    case 1:
      return tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 1>(alone);
    case 2:
      return tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 2>(alone);
    case 3:
      return tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 3>(alone);
    case 4:
      return tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 4>(alone);
    case 5:
      return tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 5>(alone);
    case 6:
      return tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 6>(alone);
    case 7:
      return tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 7>(alone);
    default:
      return tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 8>(alone);
  }
}

template <class Q, Codes kCodes>
TileKernel find_tile_kernel(const QuantizedWeight& weight, size_t rows, bool alone) {
  constexpr int kSteps = kRowGroup / kStepInputs;
  if (weight.row_group() == kRowGroup) {
    return weight.has_mins ? tile_kernel_of_rows<Q, kCodes, kSteps, true>(rows, alone)
                           : tile_kernel_of_rows<Q, kCodes, kSteps, false>(rows, alone);
  }
  return weight.has_mins ? tile_kernel_of_rows<Q, kCodes, kSteps / 2, true>(rows, alone)
                         : tile_kernel_of_rows<Q, kCodes, kSteps / 2, false>(rows, alone);
}

}  // namespace
}  // namespace plait
