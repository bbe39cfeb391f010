// The micro-kernel of quantized weights: a panel of a few rows by a tile, or by several that lie
// far apart. For each row group it sums the products of codes in whole numbers, in registers, and
// folds them with the scales into the outputs' chains. quantized_kernel.h chooses the tiles.
//
// Memory gives most where several places are read in turn, each in order. So one row takes up to
// four tiles at a time that lie far apart; on AVX2 it fetches their lines of 4-bit codes and the
// headers between them at an even pace, those of 8-bit codes not at all. Where memory gave 25 GB/s,
// 4 bits came with 22.5 GB/s; with all headers of a tile in front of its codes it was 20.5.

#pragma once

#include "linear_kernel.h"
#include "quantized_linear.h"

namespace plait {

constexpr size_t kMostTiles = 4;      // that a micro-kernel takes at once
constexpr size_t kPacedAhead = 1024;  // bytes of a tile that are fetched line by line before use

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

// Whether each row group of several tiles does not fetch its share of what follows.
template <class Q>
constexpr bool paces_itself(int rows) {
  return Q::kFetchesInStep && rows == 1;
}

// Whether Q::dot fetches those of codes instead, each while one is used: of 4-bit codes only, as
// the processor's own prefetchers follow 8-bit ones better alone.
template <class Q, Codes kCodes>
constexpr bool fetches_lines(int rows, int tiles) {
  return tiles > 1 && paces_itself<Q>(rows) && kCodes == Codes::kNibbles;
}

struct TileCall {
  // Of the first group: what its header begins with, and codes. After unit_groups both follow
  // behind those codes, the header first, which takes unit_header_bytes. Small codes are unpacked:
  // all headers lie together, and so do codes.
  const uint8_t* header;
  const uint8_t* codes;
  size_t unit_groups;
  size_t unit_header_bytes;
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
  if (count == 5) return fetch_lines<5>(from);
  if (count == 8) return fetch_lines<8>(from);
  if (count == 9) return fetch_lines<9>(from);
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

// While so many bytes of each tile are used.
template <int kTiles>
PLAIT_INLINE void fetch_ahead(const uint8_t* used, size_t bytes, size_t apart) {
  fetch<kTiles>(used + kPacedAhead, used + kPacedAhead + bytes, apart);
}

// A row group's codes and, so many bytes further each, those of the tiles beside it.
struct GroupCodes {
  const uint8_t* codes;
  size_t apart;
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
  Headers(ScaleType scales, size_t planes, size_t group, const uint8_t* header)
      : scales_(scales),
        plane_bytes_(kQuantTileOutputs * (scales == ScaleType::kFloat  ? 4
                                          : scales == ScaleType::kHalf ? 2
                                                                       : 1)),
        factor_bytes_(2 * kQuantTileOutputs * planes),
        groups_in_block_(group == 0 ? 1 : kBlockInputs / group),
        left_(0),
        factors_(header),
        header_(header) {}

  // Goes on with the headers of another unit.
  PLAIT_INLINE void move_to(const uint8_t* header) { header_ = header; }

  // The scales of the group and, where there are some, its minimums, of tiles `apart` bytes apart.
  template <class Q, bool kMins, int kTiles>
  PLAIT_INLINE void next(size_t apart, typename Q::V::F (&scale)[kTiles][Q::kVecs],
                         typename Q::V::F (&min)[kTiles][Q::kVecs]) {
    if (scales_ == ScaleType::kTwoLevels && left_-- == 0) {
      left_ = groups_in_block_ - 1;
      factors_ = header_;
      header_ += factor_bytes_;
    }
    PLAIT_UNROLL
    for (size_t t = 0; t < kTiles; ++t) {
      load_plane<Q>(scales_, factors_ + t * apart, header_ + t * apart, scale[t]);
      if constexpr (kMins) {
        load_plane<Q>(scales_, factors_ + t * apart + 2 * kQuantTileOutputs,
                      header_ + t * apart + plane_bytes_, min[t]);
      }
    }
    header_ += kMins ? 2 * plane_bytes_ : plane_bytes_;
  }

 private:
  ScaleType scales_;
  size_t plane_bytes_;
  size_t factor_bytes_;
  size_t groups_in_block_;
  size_t left_;  // of the block
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

// kHalves: every row group has scales of its own, as fp16. They are then loaded where they are
// used, and take no registers meanwhile.
template <class Q, Codes kCodes, int kSteps, bool kMins, int kRows, int kTiles, bool kHalves>
PLAIT_INLINE void multiply_tile(const TileCall& call) {
  using V = typename Q::V;
  using F = typename V::F;
  constexpr int kVecs = Q::kVecs;
  constexpr size_t kCodeBytes = kSteps * kQuantLineBytes / (kCodes == Codes::kNibbles ? 2 : 1);
  constexpr size_t kXBytes = kRows * kSteps * Q::template step_bytes<kCodes, kRows, kMins>();
  constexpr bool kFetchesLines = fetches_lines<Q, kCodes>(kRows, kTiles);

  F sums[kTiles * kRows][kVecs];
  load_sums<Q>(call, sums);
  const uint8_t* codes = kHalves ? call.header : call.codes;
  const char* x = call.x;
  const uint8_t* next = call.next;
  const size_t next_bytes = call.next_bytes;
  const size_t next_lines = call.next_lines;
  const uint8_t* wanted = next;
  const ScaleType scales = kHalves                   ? ScaleType::kHalf
                           : kCodes == Codes::kSmall ? ScaleType::kFloat
                                                     : call.scales;
  Headers headers(scales, kMins ? 2 : 1, call.group, call.header);
  size_t left = call.unit_groups;
  for (size_t g = 0; g < call.groups; ++g, --left) {
    if constexpr (kHalves) {
      // A line of scales and minimums, or of two groups' scales.
      if (kMins || g % 2 == 0) {
        if constexpr (kFetchesLines) fetch_ahead<kTiles>(codes, kQuantLineBytes, call.apart);
        headers.move_to(codes);
        codes += kQuantLineBytes;
      }
    } else if (kCodes != Codes::kSmall && left == 0) {
      left = call.unit_groups;
      headers.move_to(codes);
      if constexpr (kFetchesLines) fetch_ahead<kTiles>(codes, call.unit_header_bytes, call.apart);
      codes += call.unit_header_bytes;
    }
    F scale[kTiles][kVecs], min[kTiles][kVecs];
    if constexpr (!kHalves) headers.next<Q, kMins, kTiles>(call.apart, scale, min);
    for (size_t part = 0; part < (kHalves ? 1 : call.parts); ++part) {
      if constexpr (kTiles > 1 && !paces_itself<Q>(kRows)) {
        wanted += next_bytes;
        next = fetch<kTiles>(next, wanted, call.apart);
      } else if constexpr (kTiles == 1) {
        fetch_lines(next, next_lines);
        next += next_bytes;
      }
      const char* const ends = x + kXBytes;
      typename Q::I dots[kTiles][kRows][kVecs];
      Q::template dot<kCodes, kSteps, kMins, kTiles, kRows>({codes, call.apart}, x,
                                                            ends + 4 * kRows, dots);
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
