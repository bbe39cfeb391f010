// The kernels of linear.h as templates over the vector type; linear_*.cpp make them, each for one
// instruction set. Everything here has internal linkage, see vec.h.
//
// A micro-kernel multiplies a panel of up to six rows with one, two or four tiles and keeps all its
// sums in registers. One panel alone passes by all weights once, from several places in turn, and
// fetches each line shortly ahead. Several panels pass by a block of weights that stays in cache,
// and share the fetching of the next block.

#pragma once

#include "linear.h"
#include "vec.h"

namespace plait {
namespace {

#define PLAIT_INLINE inline __attribute__((always_inline))

// Vectors in one tile's step, and the sums that fit beside them in registers.
template <class V>
constexpr int kTileVecs = static_cast<int>(kTileOutputs / V::kLanes);
template <class V>
constexpr int kMaxSums = V::kRegisters == 32 ? 24 : 12;
template <class V>
constexpr int kMaxPanelRows = kMaxSums<V> / kTileVecs<V> < 6 ? kMaxSums<V> / kTileVecs<V> : 6;

// --- formats: what one step does ---------------------------------------------------------------

template <class V, int kRows, int kVecs>
PLAIT_INLINE void multiply_add(typename V::F (&sums)[kRows][kVecs], const float* x,
                               const typename V::F (&weight)[kVecs]) {
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const typename V::F value = V::broadcast(x[r]);
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) sums[r][v] = V::fma(value, weight[v], sums[r][v]);
  }
}

// Where vector v of a step begins, when tiles are tile_bytes apart.
template <class V>
PLAIT_INLINE const char* vector_at(const char* weight, size_t tile_bytes, int v) {
  return weight + static_cast<size_t>(v / kTileVecs<V>) * tile_bytes +
         static_cast<size_t>(v % kTileVecs<V>) * V::kLanes * sizeof(float);
}

// fp32: a step is one input.
template <class V>
struct FloatFormat {
  using Vec = V;
  using Input = float;  // an element of x
  using Item = float;   // an element of a panel
  static constexpr size_t kInputs = 1;
  static constexpr size_t kItems = 1;            // items of a row in a step
  static constexpr int kTileSums = kMaxSums<V>;  // sums that more than one tile may have

  static Item item(const Input* row, size_t index, size_t) { return row[index]; }

  template <int kRows, int kVecs>
  static PLAIT_INLINE void step(typename V::F (&sums)[kRows][kVecs], const Item* x,
                                const char* weight, size_t tile_bytes) {
    typename V::F w[kVecs];
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      w[v] = V::load(reinterpret_cast<const float*>(vector_at<V>(weight, tile_bytes, v)));
    }
    multiply_add<V>(sums, x, w);
  }
};

// bf16, widened in registers: a step is two inputs, one after the other.
template <class V>
struct WidenFormat {
  using Vec = V;
  using Input = uint16_t;
  using Item = float;
  static constexpr size_t kInputs = 2;
  static constexpr size_t kItems = 2;
  static constexpr int kTileSums = V::kRegisters == 32 ? 24 : 8;  // widening takes registers too

  static Item item(const Input* row, size_t index, size_t in_features) {
    return index < in_features ? bf16_to_float(row[index]) : 0.0f;
  }

  static PLAIT_INLINE typename V::Bits pairs(const char* weight, size_t tile_bytes, int v) {
    return V::load_pairs(reinterpret_cast<const uint16_t*>(vector_at<V>(weight, tile_bytes, v)));
  }

  template <int kRows, int kVecs>
  static PLAIT_INLINE void step(typename V::F (&sums)[kRows][kVecs], const Item* x,
                                const char* weight, size_t tile_bytes) {
    typename V::F w[kVecs];
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) w[v] = V::first_of_pairs(pairs(weight, tile_bytes, v));
    multiply_add<V>(sums, x, w);
    // Keeps the halves apart, or their loads would drive sums out of registers.
    __asm__ volatile("" ::: "memory");
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) w[v] = V::second_of_pairs(pairs(weight, tile_bytes, v));
    multiply_add<V>(sums, x + kRows, w);
  }
};

// How many tiles a micro-kernel takes at once for panels of so many rows.
template <class Format>
constexpr int max_tiles(int rows) {
  const int tiles = Format::kTileSums / (kTileVecs<typename Format::Vec> * rows);
  return tiles >= 4 ? 4 : tiles >= 2 ? 2 : 1;
}

// --- the micro-kernel --------------------------------------------------------------------------

struct Block {
  const void* x;       // of a panel, from the first step on
  const char* weight;  // of the first tile, from the first step on
  size_t tile_bytes;   // from a tile's weights to those of the next one of the call
  size_t steps;
  float* sums;        // [rows][tiles][16]
  bool resume;        // go on from these sums, else from zero
  const char* next;   // weights to fetch meanwhile, …
  size_t next_bytes;  // … so many bytes of them a step
};

using MicroKernel = void (*)(const Block&);

// kStream: the panel is alone, so its call fetches a line of every tile in each step. They are not
// needed again soon, and shall not drive out of the caches what is.
template <class Format, int kRows, int kTiles, bool kStream>
void micro_kernel(const Block& block) {
  using V = typename Format::Vec;
  constexpr int kVecs = kTiles * kTileVecs<V>;
  typename V::F sums[kRows][kVecs];
  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const float* from = block.sums + static_cast<size_t>(r * kVecs + v) * V::kLanes;
      sums[r][v] = block.resume ? V::load(from) : V::zero();
    }
  }

  const auto* x = static_cast<const typename Format::Item*>(block.x);
  const char* weight = block.weight;
  const char* next = block.next;
  const size_t tile_bytes = block.tile_bytes;
  for (size_t s = block.steps; s > 0; --s) {
    if constexpr (kStream) {
      PLAIT_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        __builtin_prefetch(next + static_cast<size_t>(t) * tile_bytes, 0, 0);
      }
    } else {
      __builtin_prefetch(next, 0, 2);
    }
    Format::template step<kRows, kVecs>(sums, x, weight, tile_bytes);
    x += Format::kItems * kRows;
    weight += kStepBytes;
    next += block.next_bytes;
  }

  PLAIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    PLAIT_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      V::store(block.sums + static_cast<size_t>(r * kVecs + v) * V::kLanes, sums[r][v]);
    }
  }
}

template <class Format, int kRows, int kTiles, bool kStream>
constexpr MicroKernel micro_kernel_if_it_fits() {
  using V = typename Format::Vec;
  if constexpr (kRows <= kMaxPanelRows<V> && kTiles <= max_tiles<Format>(kRows)) {
    return &micro_kernel<Format, kRows, kTiles, kStream>;
  } else {
    return nullptr;
  }
}

template <class Format, int kTiles, bool kStream>
MicroKernel micro_kernel_of_rows(size_t rows) {
  static constexpr MicroKernel kTable[] = {
      nullptr,
      micro_kernel_if_it_fits<Format, 1, kTiles, kStream>(),
      micro_kernel_if_it_fits<Format, 2, kTiles, kStream>(),
      micro_kernel_if_it_fits<Format, 3, kTiles, kStream>(),
      micro_kernel_if_it_fits<Format, 4, kTiles, kStream>(),
      micro_kernel_if_it_fits<Format, 5, kTiles, kStream>(),
      micro_kernel_if_it_fits<Format, 6, kTiles, kStream>(),
  };
  return kTable[rows];
}

template <class Format>
MicroKernel find_micro_kernel(size_t rows, size_t tiles, bool stream) {
  switch (tiles) {
    case 4:
      return stream ? micro_kernel_of_rows<Format, 4, true>(rows)
                    : micro_kernel_of_rows<Format, 4, false>(rows);
    case 2:
      return stream ? micro_kernel_of_rows<Format, 2, true>(rows)
                    : micro_kernel_of_rows<Format, 2, false>(rows);
    default:
      return stream ? micro_kernel_of_rows<Format, 1, true>(rows)
                    : micro_kernel_of_rows<Format, 1, false>(rows);
  }
}

// --- around it ---------------------------------------------------------------------------------

template <class Format>
void pack_panel(const void* x, size_t row_stride, size_t rows, size_t in_features, void* panel) {
  using V = typename Format::Vec;
  const auto* input = static_cast<const typename Format::Input*>(x);
  auto* out = static_cast<typename Format::Item*>(panel);
  const size_t items = (in_features + Format::kInputs - 1) / Format::kInputs * Format::kItems;
  size_t done = 0;
  if constexpr (sizeof(typename Format::Item) == sizeof(float) &&
                Format::kItems == Format::kInputs) {
    // One row of values: they only become fp32.
    for (; rows == 1 && done + V::kLanes <= in_features; done += V::kLanes, out += V::kLanes) {
      V::store(out, V::load(input + done));
    }
  }
  for (size_t i = done; i < items; ++i) {
    for (size_t r = 0; r < rows; ++r) *out++ = Format::item(input + r * row_stride, i, in_features);
  }
}

// Rounds sums to the output type, after adding the bias.
template <class V, class Out, class Bias>
void write_tile(const float* sums, const Bias* bias, Out* out, size_t count) {
  float values[kTileOutputs];
  Out rounded[kTileOutputs];
  float bias_values[kTileOutputs] = {};
  if (bias != nullptr) {
    Bias padded[kTileOutputs] = {};
    std::memcpy(padded, bias, count * sizeof(Bias));
    for (size_t i = 0; i < kTileOutputs; i += V::kLanes)
      V::store(bias_values + i, V::load(padded + i));
  }
  for (size_t i = 0; i < kTileOutputs; i += V::kLanes) {
    typename V::F value = V::load(sums + i);
    if (bias != nullptr) value = V::add(value, V::load(bias_values + i));
    V::store(values + i, value);
  }
  if (count == kTileOutputs) {
    for (size_t i = 0; i < kTileOutputs; i += V::kLanes) V::store(out + i, V::load(values + i));
    return;
  }
  for (size_t i = 0; i < kTileOutputs; i += V::kLanes) V::store(rounded + i, V::load(values + i));
  std::memcpy(out, rounded, count * sizeof(Out));
}

// Tiles that lie `stride` tiles apart.
struct Tiles {
  size_t first;
  size_t count;
  size_t stride;
};

template <class V, class Out, class Bias>
void write_panel(const LinearJob& job, const float* sums, size_t first_row, size_t rows,
                 const Tiles& tiles) {
  for (size_t r = 0; r < rows; ++r) {
    for (size_t t = 0; t < tiles.count; ++t, sums += kTileOutputs) {
      const size_t output = (tiles.first + t * tiles.stride) * kTileOutputs;
      const size_t left = job.out_features - output;
      Out* out = static_cast<Out*>(job.out) + (first_row + r) * job.out_stride + output;
      const Bias* bias =
          job.bias == nullptr ? nullptr : static_cast<const Bias*>(job.bias) + output;
      write_tile<V>(sums, bias, out, left < kTileOutputs ? left : kTileOutputs);
    }
  }
}

template <class V>
void write_panel(const LinearJob& job, const float* sums, size_t first_row, size_t rows,
                 const Tiles& tiles) {
  const bool wide_out = job.out_type == Element::kFloat32;
  const bool wide_bias = job.bias_type == Element::kFloat32;
  const auto write =
      wide_out
          ? (wide_bias ? &write_panel<V, float, float> : &write_panel<V, float, uint16_t>)
          : (wide_bias ? &write_panel<V, uint16_t, float> : &write_panel<V, uint16_t, uint16_t>);
  write(job, sums, first_row, rows, tiles);
}

// Which steps and tiles of the weights a call works on.
struct WeightBlock {
  size_t tile;
  size_t tiles;
  size_t step;
  size_t steps;
};

// Multiplies every panel of the chunk with one block of weights. Kernel is the format that the
// micro-kernels run, Stored the one of the weights: they differ where weights are unpacked first.
template <class Kernel, class Stored>
void multiply_block(const LinearJob& job, const Panels& panels, const WeightBlock& block,
                    const char* weight, size_t tile_bytes, const char* next, float* sums) {
  using Item = typename Kernel::Item;
  constexpr size_t kItems = Stored::kItems;
  constexpr size_t kRatio = Stored::kItems / Kernel::kItems;  // micro-kernel steps in a stored step
  const size_t stored_bytes = job.steps * kStepBytes;
  const bool last = block.step + block.steps == job.steps;
  for (size_t p = 0; p < panels.count; ++p) {
    const size_t first_row = panels.first_row(p);
    const size_t rows = panels.height(p);
    Block call;
    call.x =
        static_cast<const Item*>(job.panels) + (first_row * job.steps + block.step * rows) * kItems;
    call.weight = weight;
    call.tile_bytes = tile_bytes;
    call.steps = block.steps * kRatio;
    call.sums = sums + first_row * block.tiles * kTileOutputs;
    call.resume = block.step > 0;
    const bool fetches = p < block.tiles && next != nullptr;
    call.next = fetches ? next + p * stored_bytes : weight;
    call.next_bytes = fetches ? kStepBytes / kRatio : 0;
    if (!fetches && job.fetch != nullptr && job.fetch->count > 0) {
      const FetchSteps other = take_fetch(*job.fetch, call.steps);
      call.next = other.from;
      call.next_bytes = other.step_bytes;
    }
    find_micro_kernel<Kernel>(rows, block.tiles, false)(call);
    if (last) {
      write_panel<typename Kernel::Vec>(job, call.sums, first_row, rows,
                                        {block.tile, block.tiles, 1});
    }
  }
}

// Widens a block of bf16 pairs to [tile][input][16] in fp32.
template <class V>
void unpack_block(const char* weight, size_t tile_bytes, const WeightBlock& block, float* out) {
  for (size_t t = 0; t < block.tiles; ++t) {
    const char* from = weight + t * tile_bytes;
    for (size_t s = 0; s < block.steps; ++s, out += 2 * kTileOutputs, from += kStepBytes) {
      PLAIT_UNROLL
      for (int v = 0; v < kTileVecs<V>; ++v) {
        const size_t lane = static_cast<size_t>(v) * V::kLanes;
        const auto pairs = V::load_pairs(reinterpret_cast<const uint16_t*>(from) + 2 * lane);
        V::store(out + lane, V::first_of_pairs(pairs));
        V::store(out + kTileOutputs + lane, V::second_of_pairs(pairs));
      }
    }
  }
}

template <class V>
void multiply_or_unpack(FloatFormat<V>, const LinearJob& job, const Panels& panels,
                        const WeightBlock& block, const char* weight, const char* next, float* sums,
                        float*) {
  using Format = FloatFormat<V>;
  multiply_block<Format, Format>(job, panels, block, weight, job.steps * kStepBytes, next, sums);
}

// Unpacking once pays where more than two panels use it, or two of full height.
template <class V>
void multiply_or_unpack(WidenFormat<V>, const LinearJob& job, const Panels& panels,
                        const WeightBlock& block, const char* weight, const char* next, float* sums,
                        float* unpacked) {
  const size_t tile_bytes = job.steps * kStepBytes;
  if (panels.count == 2 && panels.height(0) < kMaxPanelRows<V>) {
    multiply_block<WidenFormat<V>, WidenFormat<V>>(job, panels, block, weight, tile_bytes, next,
                                                   sums);
    return;
  }
  unpack_block<V>(weight, tile_bytes, block, unpacked);
  multiply_block<FloatFormat<V>, WidenFormat<V>>(job, panels, block,
                                                 reinterpret_cast<const char*>(unpacked),
                                                 2 * block.steps * kStepBytes, next, sums);
}

constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// Steps whose weights are kept in cache at a time, cut into nearly equal blocks.
template <class Format>
size_t block_steps(size_t steps) {
  constexpr size_t kMost = kUnpackSteps / Format::kInputs;
  const size_t count = (steps + kMost - 1) / kMost;
  return (steps + count - 1) / count;
}

// One panel and tiles begin … end - 1: so many at a time as its sums allow, from places in equal
// distances. An odd distance keeps them from meeting in the same banks of memory.
template <class Format>
void run_stream(const LinearJob& job, size_t begin, size_t end, float* sums) {
  using V = typename Format::Vec;
  constexpr size_t kAhead = 1024;  // bytes: with 2048 it read 17 to 19 GB/s, with 1024 21 GB/s
  const size_t tile_bytes = job.steps * kStepBytes;
  const auto* weight = static_cast<const char*>(job.weight);
  const auto count = static_cast<size_t>(max_tiles<Format>(static_cast<int>(job.rows)));
  size_t stride = (end - begin) / count;
  if (stride > 1 && stride % 2 == 0) --stride;
  const auto run = [&](const Tiles& tiles) {
    Block call;
    call.x = job.panels;
    call.weight = weight + tiles.first * tile_bytes;
    call.tile_bytes = tiles.stride * tile_bytes;
    call.steps = job.steps;
    call.sums = sums;
    call.resume = false;
    call.next = call.weight + kAhead;
    call.next_bytes = kStepBytes;
    find_micro_kernel<Format>(job.rows, tiles.count, true)(call);
    write_panel<V>(job, sums, 0, job.rows, tiles);
  };
  for (size_t t = 0; t < count; ++t) {
    const char* const place = weight + (begin + t * stride) * tile_bytes;
    for (size_t o = 0; o < kAhead; o += kStepBytes) __builtin_prefetch(place + o);
  }
  for (size_t tile = begin; tile < begin + stride; ++tile) run({tile, count, stride});
  for (size_t tile = begin + count * stride; tile < end; ++tile) run({tile, 1, 1});
}

template <class Format>
void run_job(const LinearJob& job, size_t begin, size_t end, float* scratch) {
  using V = typename Format::Vec;
  const Panels panels(job.rows, kMaxPanelRows<V>);
  const size_t num_tiles = (job.out_features + kTileOutputs - 1) / kTileOutputs;
  if (panels.count == 1) {
    run_stream<Format>(job, begin * kGroupTiles, smaller(end * kGroupTiles, num_tiles), scratch);
    return;
  }
  const size_t tile_bytes = job.steps * kStepBytes;
  const size_t most_tiles =
      static_cast<size_t>(max_tiles<Format>(static_cast<int>(panels.height(0))));
  const size_t most_steps = block_steps<Format>(job.steps);
  float* unpacked = scratch + job.rows * kGroupTiles * kTileOutputs;
  const auto* weight = static_cast<const char*>(job.weight);

  for (size_t group = begin; group < end; ++group) {
    const size_t first_tile = group * kGroupTiles;
    const size_t group_tiles = smaller(kGroupTiles, num_tiles - first_tile);
    WeightBlock block{};
    for (block.step = 0; block.step < job.steps; block.step += block.steps) {
      block.steps = smaller(most_steps, job.steps - block.step);
      for (size_t t = 0; t < group_tiles; t += block.tiles) {
        block.tile = first_tile + t;
        block.tiles = smaller(most_tiles, group_tiles - t);
        if (block.tiles == 3) block.tiles = 2;
        // What comes next: the group's other tiles, then its other steps, then the next group.
        const char* here = weight + block.tile * tile_bytes + block.step * kStepBytes;
        const char* next = here + block.tiles * tile_bytes;
        if (t + block.tiles == group_tiles) {
          const bool more = block.step + block.steps < job.steps;
          next = more ? here - t * tile_bytes + block.steps * kStepBytes
                      : weight + (first_tile + group_tiles) * tile_bytes;
          if (!more && group + 1 == end && !job.goes_on) next = nullptr;
        }
        multiply_or_unpack(Format{}, job, panels, block, here, next,
                           scratch + t * kTileOutputs * job.rows, unpacked);
      }
    }
  }
}

template <class Format>
LinearKernel make_kernel() {
  return {static_cast<size_t>(kMaxPanelRows<typename Format::Vec>),
          Format::kItems * sizeof(typename Format::Item), &pack_panel<Format>, &run_job<Format>};
}

}  // namespace
}  // namespace plait
