// The kernels of quantized_linear.h as templates over an instruction set's vectors and integer dot
// products; quantized_linear*.cpp make them. Everything here has internal linkage, see vec.h.
//
// Few rows read the packed codes as they are, in one pass over memory; for many, a block of the
// tile is unpacked once, and every panel passes by while it lies in cache. See quantized_tile.h for
// what is done with a tile.

#pragma once

#include "quantized_tile.h"

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
// Bytes of a tile that are fetched before use, where not line by line. Several tiles of 8-bit codes
// came a sixth slower with the greater number, one alone a twentieth slower with the smaller one.
constexpr size_t tile_ahead(int bits, size_t tiles) { return bits == 8 && tiles > 1 ? 1024 : 2048; }

constexpr size_t quantized_scratch_bytes(size_t rows) {
  const size_t headers = kUnpackInputs / 16 * 2 * kQuantTileOutputs * sizeof(float);
  const size_t sums = (rows + kMostTiles * 8) * kQuantTileOutputs * sizeof(float);
  return kUnpackInputs * kQuantTileOutputs + headers + sums;
}

namespace {

// A part of the inputs of one tile, or of several that lie evenly apart, in whole groups.
struct TileBlock {
  size_t tile;
  size_t tiles;
  size_t stride;  // from one to the next, in tiles
  size_t part;    // the first of its row groups
  size_t parts;   // its row groups
  size_t groups;  // that have scales of their own

  const uint8_t* header;
  const uint8_t* codes;
  size_t unit_groups;
  size_t unit_header_bytes;
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
    call.header = block.header;
    call.codes = block.codes;
    call.unit_groups = block.unit_groups;
    call.unit_header_bytes = block.unit_header_bytes;
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

// Writes the headers of a block of 4-bit codes as fp32, one after the other, and a code a byte.
template <class Q>
void unpack(const QuantizedWeight& weight, const TileBlock& block, float* header, uint8_t* codes) {
  using V = typename Q::V;
  const size_t group_bytes = weight.code_bytes(block.parts / block.groups * weight.row_group());
  Headers headers(weight.scales, weight.planes(), weight.group, block.header);
  const uint8_t* from = block.codes;
  size_t left = block.unit_groups;
  for (size_t g = 0; g < block.groups; ++g, --left) {
    if (left == 0) {
      left = block.unit_groups;
      headers.move_to(from);
      from += block.unit_header_bytes;
    }
    typename V::F planes[2][1][Q::kVecs];
    if (weight.has_mins) {
      headers.next<Q, true, 1>(0, planes[0], planes[1]);
    } else {
      headers.next<Q, false, 1>(0, planes[0], planes[1]);
    }
    for (size_t p = 0; p < weight.planes(); ++p) {
      PLAIT_UNROLL
      for (int v = 0; v < Q::kVecs; ++v, header += V::kLanes) V::store(header, planes[p][0][v]);
    }
    Q::unpack_nibbles(from, group_bytes / kQuantLineBytes, codes);
    from += group_bytes;
    codes += 2 * group_bytes;
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
  block.header = weight.blob + tile * tile_bytes;
  block.codes = block.header + weight.unit_header_bytes();
  block.unit_groups = weight.unit_groups();
  block.unit_header_bytes = weight.unit_header_bytes();
  block.scales = weight.scales;
  block.next = block.header + tile_ahead(weight.bits, tiles);
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
  for (size_t t = 0; t < together && !paces_itself<Q>(static_cast<int>(rows)); ++t) {
    const uint8_t* const place = job.weight.blob + (begin + t * stride) * tile_bytes;
    fetch<1>(place, place + tile_ahead(job.weight.bits, together), 0);
  }
  for (size_t tile = begin; tile < begin + stride; ++tile) {
    run_tiles<Q>(job, tile, together, stride, sums);
  }
  size_t tile = begin + together * stride;
  for (; tile + together <= end; tile += together) run_tiles<Q>(job, tile, together, 1, sums);
  for (; tile < end; ++tile) run_tiles<Q>(job, tile, 1, 0, sums);
}

// Many rows: a block of the tile's inputs at a time, unpacked first.
template <class Q>
void run_tile_in_blocks(const QuantizedJob& job, size_t tile, float* sums, float* header,
                        uint8_t* codes) {
  const QuantizedWeight& weight = job.weight;
  const size_t row_group = weight.row_group();
  const size_t row_groups = weight.row_groups();
  const uint8_t* const tile_begin = weight.blob + tile * weight.tile_bytes();
  const size_t parts_in_group = weight.group == 0 ? row_groups : weight.group / row_group;
  TileBlock block{};
  block.tile = tile;
  block.tiles = 1;
  for (; block.part < row_groups; block.part += block.parts) {
    const size_t input = block.part * row_group;
    block.parts = smaller(kUnpackInputs / row_group, row_groups - block.part);
    block.groups = weight.group == 0 ? 1 : block.parts / parts_in_group;
    block.header = tile_begin + weight.span_at(input);
    block.codes = tile_begin + weight.codes_at(input);
    block.unit_groups = weight.unit_groups();
    block.unit_header_bytes = weight.unit_header_bytes();
    block.scales = weight.scales;
    block.next = tile_begin + weight.begin_at(input + block.parts * row_group);
    block.next_bytes = weight.code_bytes(row_group);
    if (weight.bits == 4) {
      unpack<Q>(weight, block, header, codes);
      block.header = reinterpret_cast<const uint8_t*>(header);
      block.codes = codes;
      block.unit_groups = block.groups;
      block.scales = ScaleType::kFloat;
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
