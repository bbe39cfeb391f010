// The kernels of quantized_linear.h as templates over an instruction set's vectors and integer dot
// products; quantized_linear*.cpp make them. Everything here has internal linkage, see vec.h.
//
// A micro-kernel multiplies a panel of a few rows with one tile: for each row group it sums the
// products of codes in whole numbers, in registers, and folds them with the scales into the
// outputs' chains. Few rows read the packed codes as they are, in one pass over memory; for many,
// a block of the tile is unpacked once, and every panel passes by while it lies in cache.

#pragma once

#include "linear_kernel.h"
#include "quantized_linear.h"

namespace plait {

// Rows against some of the tiles.
struct QuantizedJob {
  LinearJob output;  // where results go, and the bias
  QuantizedWeight weight;

  const char* x;        // codes of rows, as the kernel reads them
  size_t x_stride;      // in bytes
  const float* scales;  // [rows][row_groups]
  const void* offsets;  // [rows][row_groups], see below
  size_t rows;
  size_t row_groups;
};

// What stands for the sum of a row group's codes beside each scale: with stored minimums a float,
// scale * sum; else an int32, zero_point * sum.
static_assert(sizeof(float) == sizeof(int32_t));

struct QuantizedKernels {
  // Rows begin … end - 1.
  void (*quantize_rows)(const QuantizeRowsArgs& args, size_t begin, size_t end);
  // Rows' codes for 8-bit weights, twice as wide, where the kernel wants them so; else null.
  void (*widen)(const int8_t* codes, size_t count, int16_t* out);
  // Computes the tiles of groups begin … end - 1.
  void (*run)(const QuantizedJob& job, size_t begin, size_t end, char* scratch);
  // For exact weights: packs rows for run_exact.
  size_t exact_panel_rows;
  void (*pack_exact)(const void* x, Element type, size_t row_stride, size_t rows,
                     size_t in_features, float* panel);
  void (*run_exact)(const LinearJob& job, const QuantizedWeight& weight, size_t begin, size_t end,
                    char* scratch);
};

constexpr size_t kUnpackInputs = 1024;  // of a tile, unpacked at a time

constexpr size_t quantized_scratch_bytes(size_t rows) {
  const size_t headers = kUnpackInputs / 16 * 2 * kQuantTileOutputs * sizeof(float);
  return kUnpackInputs * kQuantTileOutputs + headers + rows * kQuantTileOutputs * sizeof(float);
}

namespace {

// How codes lie before a micro-kernel: pairs of 4 bits; 4 bits in bytes; bytes.
enum class Codes { kNibbles, kSmall, kBytes };

struct TileCall {
  const uint8_t* header;  // of the block's first group
  const uint8_t* codes;
  const char* x;  // from the block's first input on
  size_t x_stride;
  const float* scales;   // of rows, from the block's first row group on
  const float* offsets;  // or int32_t
  size_t row_groups;     // from a row's scales to the next row's
  size_t groups;         // of the block
  size_t parts;          // row groups in a group
  bool wide;             // the header is fp32
  bool resume;           // go on from these sums, else from zero
  float* sums;           // [rows][16]
  const uint8_t* next;   // weights to fetch meanwhile, …
  size_t next_bytes;     // … so many bytes of them a row group
};

using TileKernel = void (*)(const TileCall&);

template <class Q>
PLAIT_INLINE void load_plane(const uint8_t* plane, bool wide, typename Q::V::F (&out)[Q::kVecs]) {
  using V = typename Q::V;
  PLAIT_UNROLL
  for (int v = 0; v < Q::kVecs; ++v) {
    const size_t lane = static_cast<size_t>(v) * V::kLanes;
    out[v] = wide ? V::load(reinterpret_cast<const float*>(plane) + lane)
                  : Q::load_half(reinterpret_cast<const uint16_t*>(plane) + lane);
  }
}

template <class Q, int kRows>
PLAIT_INLINE void load_sums(const TileCall& call, typename Q::V::F (&sums)[kRows][Q::kVecs]) {
  using V = typename Q::V;
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < Q::kVecs; ++v) {
      const float* from = call.sums + static_cast<size_t>(r * Q::kVecs + v) * V::kLanes;
      sums[r][v] = call.resume ? V::load(from) : V::zero();
    }
  }
}

template <class Q, Codes kCodes, int kSteps, bool kMins, int kRows>
void tile_kernel(const TileCall& call) {
  using V = typename Q::V;
  using F = typename V::F;
  constexpr int kVecs = Q::kVecs;
  constexpr size_t kCodeBytes = kSteps * kQuantLineBytes / (kCodes == Codes::kNibbles ? 2 : 1);
  constexpr size_t kXBytes = static_cast<size_t>(kSteps) * Q::template x_step_bytes<kCodes>();
  const size_t plane = kQuantTileOutputs * (call.wide ? 4 : 2);

  F sums[kRows][kVecs];
  load_sums<Q>(call, sums);
  const uint8_t* header = call.header;
  const uint8_t* codes = call.codes;
  const char* x = call.x;
  const uint8_t* next = call.next;
  size_t at = 0;  // the row group
  for (size_t g = 0; g < call.groups; ++g) {
    F scale[kVecs], min[kVecs];
    load_plane<Q>(header, call.wide, scale);
    header += plane;
    if constexpr (kMins) {
      load_plane<Q>(header, call.wide, min);
      header += plane;
    }
    for (size_t part = 0; part < call.parts; ++part, ++at) {
      for (size_t o = 0; o < call.next_bytes; o += kQuantLineBytes) {
        __builtin_prefetch(next + o, 0, 2);
      }
      next += call.next_bytes;
      typename Q::I dots[kRows][kVecs];
      Q::template dot<kCodes, kSteps, kRows>(codes, x, call.x_stride, dots);
      codes += kCodeBytes;
      x += kXBytes;
      PLAIT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const size_t place = static_cast<size_t>(r) * call.row_groups + at;
        const F row_scale = V::broadcast(call.scales[place]);
        PLAIT_UNROLL
        for (int v = 0; v < kVecs; ++v) {
          auto dot = dots[r][v];
          if constexpr (!kMins) dot = Q::minus(dot, call.offsets + place);
          sums[r][v] = V::fma(Q::to_float(dot), V::mul(scale[v], row_scale), sums[r][v]);
          if constexpr (kMins) {
            sums[r][v] = V::fma(min[v], V::broadcast(call.offsets[place]), sums[r][v]);
          }
        }
      }
    }
  }
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      V::store(call.sums + static_cast<size_t>(r * kVecs + v) * V::kLanes, sums[r][v]);
    }
  }
}

template <class Q, Codes kCodes, int kSteps, bool kMins, int kRows>
constexpr TileKernel tile_kernel_if_it_fits() {
  if constexpr (kRows <= Q::kMaxRows) {
    return &tile_kernel<Q, kCodes, kSteps, kMins, kRows>;
  } else {
    return nullptr;
  }
}

template <class Q, Codes kCodes, int kSteps, bool kMins>
TileKernel tile_kernel_of_rows(size_t rows) {
  static_assert(Q::kMaxRows <= 8);
  static constexpr TileKernel kTable[] = {
      nullptr,
      tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 1>(),
      tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 2>(),
      tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 3>(),
      tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 4>(),
      tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 5>(),
      tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 6>(),
      tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 7>(),
      tile_kernel_if_it_fits<Q, kCodes, kSteps, kMins, 8>(),
  };
  return kTable[rows];
}

template <class Q, Codes kCodes>
TileKernel find_tile_kernel(const QuantizedWeight& weight, size_t rows) {
  constexpr int kSteps = kRowGroup / kStepInputs;
  if (weight.row_group() == kRowGroup) {
    return weight.has_mins ? tile_kernel_of_rows<Q, kCodes, kSteps, true>(rows)
                           : tile_kernel_of_rows<Q, kCodes, kSteps, false>(rows);
  }
  return weight.has_mins ? tile_kernel_of_rows<Q, kCodes, kSteps / 2, true>(rows)
                         : tile_kernel_of_rows<Q, kCodes, kSteps / 2, false>(rows);
}

// A part of one tile's inputs, in whole groups.
struct TileBlock {
  size_t tile;
  size_t part;    // the first of its row groups
  size_t parts;   // its row groups
  size_t groups;  // that have scales of their own

  const uint8_t* header;
  const uint8_t* codes;
  bool wide;
  const uint8_t* next;
  size_t next_bytes;
};

// Multiplies every panel of rows with one block.
template <class Q, Codes kCodes>
void multiply_tile(const QuantizedJob& job, const TileBlock& block, float* sums) {
  const size_t x_bytes = job.weight.row_group() / kStepInputs * Q::template x_step_bytes<kCodes>();
  const Panels panels(job.rows, Q::kMaxRows);
  for (size_t p = 0; p < panels.count; ++p) {
    const size_t row = panels.first_row(p);
    const size_t rows = panels.height(p);
    const size_t place = row * job.row_groups + block.part;
    TileCall call;
    call.header = block.header;
    call.codes = block.codes;
    call.x = job.x + row * job.x_stride + block.part * x_bytes;
    call.x_stride = job.x_stride;
    call.scales = job.scales + place;
    call.offsets = static_cast<const float*>(job.offsets) + place;
    call.row_groups = job.row_groups;
    call.groups = block.groups;
    call.parts = block.parts / block.groups;
    call.wide = block.wide;
    call.resume = block.part > 0;
    call.sums = sums + row * kQuantTileOutputs;
    call.next = block.next;
    call.next_bytes = p == 0 ? block.next_bytes : 0;
    find_tile_kernel<Q, kCodes>(job.weight, rows)(call);
    if (block.part + block.parts == job.row_groups) {
      write_panel<typename Q::V>(job.output, call.sums, row, rows, block.tile, 1);
    }
  }
}

// Widens the header of a block to fp32.
template <class Q>
void unpack_header(const QuantizedWeight& weight, const TileBlock& block, float* out) {
  using V = typename Q::V;
  const uint8_t* plane = block.header;
  for (size_t p = 0; p < block.groups * (weight.has_mins ? 2 : 1); ++p) {
    typename V::F values[Q::kVecs];
    load_plane<Q>(plane, weight.wide, values);
    PLAIT_UNROLL
    for (int v = 0; v < Q::kVecs; ++v) {
      V::store(out + static_cast<size_t>(v) * V::kLanes, values[v]);
    }
    plane += weight.plane_bytes();
    out += kQuantTileOutputs;
  }
}

// Few rows: the whole tile in one pass.
template <class Q>
void run_tile(const QuantizedJob& job, size_t tile, float* sums) {
  constexpr size_t kAhead = 4096;  // bytes: what memory delivers in about twice its latency
  const QuantizedWeight& weight = job.weight;
  const size_t tile_bytes = weight.tile_bytes();
  TileBlock block{};
  block.tile = tile;
  block.parts = job.row_groups;
  block.groups = weight.groups();
  block.header = weight.blob + tile * tile_bytes;
  block.codes = block.header + weight.header_bytes();
  block.wide = weight.wide;
  block.next = block.header + kAhead;
  block.next_bytes = tile_bytes / job.row_groups;
  if (weight.bits == 4) {
    multiply_tile<Q, Codes::kNibbles>(job, block, sums);
  } else {
    multiply_tile<Q, Codes::kBytes>(job, block, sums);
  }
}

// Many rows: a block of the tile's inputs at a time, unpacked first.
template <class Q>
void run_tile_in_blocks(const QuantizedJob& job, size_t tile, float* sums, float* header,
                        uint8_t* codes) {
  const QuantizedWeight& weight = job.weight;
  const size_t part_bytes = weight.code_bytes() / job.row_groups;
  const size_t most_parts = kUnpackInputs / weight.row_group();
  const uint8_t* const tile_header = weight.blob + tile * weight.tile_bytes();
  const size_t parts_in_group = weight.group == 0 ? most_parts : weight.group / weight.row_group();
  TileBlock block{};
  block.tile = tile;
  for (; block.part < job.row_groups; block.part += block.parts) {
    block.parts = smaller(most_parts, job.row_groups - block.part);
    block.groups = weight.group == 0 ? 1 : block.parts / parts_in_group;
    block.header = tile_header + block.part / parts_in_group * weight.group_header_bytes();
    if (weight.group == 0) block.header = tile_header;
    block.codes = tile_header + weight.header_bytes() + block.part * part_bytes;
    block.wide = weight.wide;
    block.next_bytes = part_bytes;
    block.next = block.codes + block.parts * part_bytes;
    if (weight.bits == 4) {
      unpack_header<Q>(weight, block, header);
      Q::unpack_nibbles(block.codes, block.parts * part_bytes / kQuantLineBytes, codes);
      block.header = reinterpret_cast<const uint8_t*>(header);
      block.wide = true;
      block.codes = codes;
      multiply_tile<Q, Codes::kSmall>(job, block, sums);
    } else {
      multiply_tile<Q, Codes::kBytes>(job, block, sums);
    }
  }
}

template <class Q>
void run_quantized(const QuantizedJob& job, size_t begin, size_t end, char* scratch) {
  auto* codes = reinterpret_cast<uint8_t*>(scratch);
  auto* header = reinterpret_cast<float*>(scratch + kUnpackInputs * kQuantTileOutputs);
  float* sums = header + kUnpackInputs / 16 * 2 * kQuantTileOutputs;
  const size_t last = smaller(end * kGroupTiles, job.weight.tiles());
  for (size_t tile = begin * kGroupTiles; tile < last; ++tile) {
    if (job.rows <= Q::kDirectRows) {
      run_tile<Q>(job, tile, sums);
    } else {
      run_tile_in_blocks<Q>(job, tile, sums, header, codes);
    }
  }
}

}  // namespace
}  // namespace plait
