// The kernels of quantized_linear.h as templates over an instruction set's vectors and integer dot
// products; quantized_linear*.cpp make them. Everything here has internal linkage, see vec.h.
//
// A micro-kernel multiplies a panel of a few rows with a tile: for each row group it sums the
// products of codes in whole numbers, in registers, and folds them with the scales into the
// outputs' chains. Few rows read the packed codes as they are, in one pass over memory; for many,
// a block of the tile is unpacked once, and every panel passes by while it lies in cache.
//
// Memory gives most where several places are read in turn and each line is fetched once, shortly
// ahead. So one row takes three tiles at a time that lie far apart: on a core that could read
// 24 GB/s it got 17 GB/s from one place, 22 GB/s from two, 24 GB/s from three. Where a kernel has
// little to compute, the processor's own prefetchers do that better alone, see kFetches.

#pragma once

#include "linear_kernel.h"
#include "quantized_linear.h"

namespace plait {

// A chunk of rows, in panels, against some of the tiles.
//
// A panel holds a few rows, one row group after the other: [steps][rows][4 codes], then [rows]
// scales, then [rows] offsets. With stored minimums they stand for the sum of the group's codes
// beside each scale: scale * sum, in fp32. Else sums of products begin with them: -zero_point *
// sum, in an int32; or, where products of 4-bit codes are summed in int16, in two: of the first and
// the last two codes of each step.
struct QuantizedJob {
  LinearJob output;  // where results go, and the bias
  QuantizedWeight weight;
  const char* panels;
};

struct QuantizedKernels {
  // Rows begin … end - 1.
  void (*quantize_rows)(const QuantizeRowsArgs& args, size_t begin, size_t end);

  size_t max_panel_rows;
  size_t step_bytes[2];  // of a row in a panel, at most: with 4-bit and with 8-bit weights
  // Packs `rows` rows from first_row on into one panel.
  void (*pack)(const QuantizedWeight& weight, const QuantizedRows& from, size_t first_row,
               size_t rows, char* panel);
  // Computes the tiles of groups begin … end - 1.
  void (*run)(const QuantizedJob& job, size_t begin, size_t end, char* scratch);

  // The same for exact weights, see quantized_exact.h.
  size_t max_exact_rows;
  void (*pack_exact)(const void* x, Element type, size_t row_stride, size_t rows,
                     size_t in_features, float* panel);
  void (*run_exact)(const LinearJob& job, const QuantizedWeight& weight, size_t begin, size_t end,
                    char* scratch);

  // Of a row's group in a panel.
  size_t panel_bytes(const QuantizedWeight& weight) const {
    return weight.row_group() / kStepInputs * step_bytes[weight.bits == 4 ? 0 : 1] + 8;
  }
};

constexpr size_t kUnpackInputs = 1024;  // of a tile, unpacked at a time
constexpr size_t kMostTiles = 3;        // that a micro-kernel takes at once
constexpr size_t kTileAhead = 2048;     // bytes of a tile's place that are fetched before use

constexpr size_t quantized_scratch_bytes(size_t rows) {
  const size_t headers = kUnpackInputs / 16 * 2 * kQuantTileOutputs * sizeof(float);
  const size_t sums = (rows + kMostTiles * 8) * kQuantTileOutputs * sizeof(float);
  return kUnpackInputs * kQuantTileOutputs + headers + sums;
}

namespace {

// How codes lie before a micro-kernel: pairs of 4 bits; 4 bits in bytes; bytes.
enum class Codes { kNibbles, kSmall, kBytes };

// Tiles that a micro-kernel takes at once.
template <class Q>
constexpr int tiles_at_once(int rows) {
  const int tiles = Q::kMaxRows / rows;
  return tiles > static_cast<int>(kMostTiles) ? static_cast<int>(kMostTiles) : tiles;
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
  for (size_t g = 0; g < call.groups; ++g) {
    F scale[kTiles][kVecs], min[kTiles][kVecs];
    if constexpr (!kHalves) headers.next<Q, kMins, kTiles>(call.apart, scale, min);
    for (size_t part = 0; part < (kHalves ? 1 : call.parts); ++part) {
      if constexpr (kTiles > 1 && Q::template kFetches<kCodes, kRows>) {
        wanted += next_bytes;
        next = fetch<kTiles>(next, wanted, call.apart);
      } else if constexpr (kTiles == 1) {
        fetch_lines(next, next_lines);
        next += next_bytes;
      }
      const char* const ends = x + kXBytes;
      typename Q::I dots[kTiles][kRows][kVecs];
      Q::template dot<kCodes, kSteps, kMins, kTiles, kRows>(codes, call.apart, x, ends + 4 * kRows,
                                                            dots);
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

// A part of the inputs of one tile, or of several that lie evenly apart, in whole groups.
struct TileBlock {
  size_t tile;
  size_t tiles;
  size_t stride;  // from one to the next, in tiles
  size_t part;    // the first of its row groups
  size_t parts;   // its row groups
  size_t groups;  // that have scales of their own

  const uint8_t* factors;
  const uint8_t* header;
  const uint8_t* codes;
  ScaleType scales;
  const uint8_t* next;
  size_t next_bytes;
};

// Multiplies every panel of rows with one block.
template <class Q, Codes kCodes>
void multiply_tiles(const QuantizedJob& job, const TileBlock& block, float* sums) {
  const size_t row_groups = job.weight.row_groups();
  // One row alone may be shorter, but begins at the same place.
  const size_t panel_bytes =
      job.weight.row_group() / kStepInputs * Q::template step_bytes<kCodes, 2, false>() + 8;
  const Panels panels(job.output.rows, Q::kMaxRows);
  for (size_t p = 0; p < panels.count; ++p) {
    const size_t row = panels.first_row(p);
    const size_t rows = panels.height(p);
    TileCall call;
    call.factors = block.factors;
    call.header = block.header;
    call.codes = block.codes;
    call.apart = block.stride * job.weight.tile_bytes();
    call.x = job.panels + (row * row_groups + block.part * rows) * panel_bytes;
    call.groups = block.groups;
    call.parts = block.parts / block.groups;
    call.group = job.weight.group;
    call.scales = block.scales;
    call.resume = block.part > 0;
    call.sums = sums + row * kQuantTileOutputs;
    call.next = block.next;
    call.next_bytes = p == 0 ? block.next_bytes : 0;
    call.next_lines = (call.next_bytes + kQuantLineBytes - 1) / kQuantLineBytes;
    if (p > 0 && job.output.fetch != nullptr && job.output.fetch->count > 0) {
      const FetchSteps other = take_fetch(*job.output.fetch, block.parts);
      call.next = reinterpret_cast<const uint8_t*>(other.from);
      call.next_bytes = other.step_bytes;
      // Some twice, and some beyond the end, rather than a number that varies.
      call.next_lines = other.step_bytes <= 4 * kQuantLineBytes ? 4 : 8;
    }
    find_tile_kernel<Q, kCodes>(job.weight, rows, block.tiles == 1)(call);
    if (block.part + block.parts < row_groups) continue;
    for (size_t t = 0; t < block.tiles; ++t) {
      write_panel<typename Q::V>(job.output, call.sums + t * rows * kQuantTileOutputs, row, rows,
                                 {block.tile + t * block.stride, 1, 1});
    }
  }
}

// Widens the header of a block to fp32.
template <class Q>
void unpack_header(const QuantizedWeight& weight, const TileBlock& block, float* out) {
  using V = typename Q::V;
  Headers headers(weight.scales, weight.planes(), weight.group, block.factors, block.header);
  for (size_t g = 0; g < block.groups; ++g) {
    typename V::F planes[2][1][Q::kVecs];
    if (weight.has_mins) {
      headers.next<Q, true, 1>(0, planes[0], planes[1]);
    } else {
      headers.next<Q, false, 1>(0, planes[0], planes[1]);
    }
    for (size_t p = 0; p < weight.planes(); ++p) {
      PLAIT_UNROLL
      for (int v = 0; v < Q::kVecs; ++v, out += V::kLanes) V::store(out, planes[p][0][v]);
    }
  }
}

// Few rows: whole tiles in one pass, `tiles` of them that lie `stride` tiles apart.
template <class Q>
void run_tiles(const QuantizedJob& job, size_t tile, size_t tiles, size_t stride, float* sums) {
  const QuantizedWeight& weight = job.weight;
  const size_t tile_bytes = weight.tile_bytes();
  TileBlock block{};
  block.tile = tile;
  block.tiles = tiles;
  block.stride = stride;
  block.parts = job.weight.row_groups();
  block.groups = weight.groups();
  block.factors = weight.blob + tile * tile_bytes;
  block.header = block.factors + weight.factor_bytes();
  block.codes = block.factors + weight.header_bytes();
  block.scales = weight.scales;
  block.next = block.factors + kTileAhead;
  block.next_bytes = (tile_bytes + block.parts - 1) / block.parts;
  if (weight.bits == 4) {
    multiply_tiles<Q, Codes::kNibbles>(job, block, sums);
  } else {
    multiply_tiles<Q, Codes::kBytes>(job, block, sums);
  }
}

// Few rows: tiles begin … end - 1, from the start, the middle, … of the range in turn.
template <class Q>
void run_few(const QuantizedJob& job, size_t begin, size_t end, float* sums) {
  const size_t tile_bytes = job.weight.tile_bytes();
  const size_t rows = job.output.rows;
  const size_t together =
      rows <= Q::kMaxRows ? static_cast<size_t>(tiles_at_once<Q>(static_cast<int>(rows))) : 1;
  size_t stride = (end - begin) / together;
  if (stride > 1 && stride % 2 == 0) --stride;  // even ones often meet in the same banks of memory
  for (size_t t = 0; t < together; ++t) {
    const uint8_t* const place = job.weight.blob + (begin + t * stride) * tile_bytes;
    fetch<1>(place, place + kTileAhead, 0);
  }
  for (size_t tile = begin; tile < begin + stride; ++tile) {
    run_tiles<Q>(job, tile, together, stride, sums);
  }
  for (size_t tile = begin + together * stride; tile < end; ++tile) {
    run_tiles<Q>(job, tile, 1, 0, sums);
  }
}

// Many rows: a block of the tile's inputs at a time, unpacked first.
template <class Q>
void run_tile_in_blocks(const QuantizedJob& job, size_t tile, float* sums, float* header,
                        uint8_t* codes) {
  const QuantizedWeight& weight = job.weight;
  const size_t part_bytes = weight.code_bytes() / job.weight.row_groups();
  const size_t most_parts = kUnpackInputs / weight.row_group();
  const uint8_t* const tile_header = weight.blob + tile * weight.tile_bytes();
  const size_t parts_in_group = weight.group == 0 ? most_parts : weight.group / weight.row_group();
  TileBlock block{};
  block.tile = tile;
  block.tiles = 1;
  for (; block.part < job.weight.row_groups(); block.part += block.parts) {
    block.parts = smaller(most_parts, job.weight.row_groups() - block.part);
    block.groups = weight.group == 0 ? 1 : block.parts / parts_in_group;
    block.header = tile_header + weight.factor_bytes();
    if (weight.group != 0) {
      block.header += block.part / parts_in_group * weight.group_header_bytes();
    }
    block.factors =
        tile_header + block.part * weight.row_group() / kBlockInputs * weight.block_header_bytes();
    block.codes = tile_header + weight.header_bytes() + block.part * part_bytes;
    block.scales = weight.scales;
    block.next_bytes = part_bytes;
    block.next = block.codes + block.parts * part_bytes;
    if (weight.bits == 4) {
      unpack_header<Q>(weight, block, header);
      Q::unpack_nibbles(block.codes, block.parts * part_bytes / kQuantLineBytes, codes);
      block.header = reinterpret_cast<const uint8_t*>(header);
      block.scales = ScaleType::kFloat;
      block.codes = codes;
      multiply_tiles<Q, Q::kUnpacked>(job, block, sums);
    } else {
      multiply_tiles<Q, Codes::kBytes>(job, block, sums);
    }
  }
}

template <class Q>
void run_quantized(const QuantizedJob& job, size_t begin, size_t end, char* scratch) {
  auto* codes = reinterpret_cast<uint8_t*>(scratch);
  auto* header = reinterpret_cast<float*>(scratch + kUnpackInputs * kQuantTileOutputs);
  float* sums = header + kUnpackInputs / 16 * 2 * kQuantTileOutputs;
  const size_t first = begin * kGroupTiles;
  const size_t last = smaller(end * kGroupTiles, job.weight.tiles());
  if (job.output.rows <= Q::kDirectRows) {
    run_few<Q>(job, first, last, sums);
    return;
  }
  for (size_t tile = first; tile < last; ++tile) {
    run_tile_in_blocks<Q>(job, tile, sums, header, codes);
  }
}

}  // namespace
}  // namespace plait
