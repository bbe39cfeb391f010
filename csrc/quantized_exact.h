// Exact weights, see quantized_linear.h: a block of weights is widened to fp32, which then runs
// through the micro-kernels of linear_kernel.h.

#pragma once

#include "quantize_rows_kernel.h"
#include "quantized_kernel.h"

namespace plait {

constexpr size_t kExactInputs = 256;  // widened at a time: a multiple of every group

constexpr size_t exact_scratch_bytes(size_t rows) {
  return (rows + kExactInputs) * kGroupTiles * kTileOutputs * sizeof(float);
}

namespace {

// bf16 rows in panels of fp32.
template <class V>
struct HalfRows {
  using Vec = V;
  using Input = uint16_t;
  using Item = float;
  static constexpr size_t kInputs = 1;
  static constexpr size_t kItems = 1;
  static Item item(const Input* row, size_t index, size_t) { return bf16_to_float(row[index]); }
};

template <class V>
void pack_exact(const void* x, Element type, size_t row_stride, size_t rows, size_t in_features,
                float* panel) {
  const auto pack =
      type == Element::kFloat32 ? &pack_panel<FloatFormat<V>> : &pack_panel<HalfRows<V>>;
  pack(x, row_stride, rows, in_features, panel);
}

// Input i of a line: bits `shift` and up of each output's four bytes.
template <class Q, int kBits, int kShift>
PLAIT_INLINE void widen_input(const QuantizedWeight& weight, const typename Q::I (&line)[Q::kVecs],
                              const typename Q::V::F (&scale)[Q::kVecs],
                              const typename Q::V::F (&min)[Q::kVecs], float* out) {
  using V = typename Q::V;
  PLAIT_UNROLL
  for (int v = 0; v < Q::kVecs; ++v) {
    const auto code = Q::to_float(Q::template bits<kBits, kShift>(line[v]));
    const auto value = weight.has_mins ? Q::scale_once(scale[v], code, min[v])
                                       : V::mul(scale[v], V::sub(code, min[v]));
    V::store(out + static_cast<size_t>(v) * V::kLanes, value);
  }
}

// Inputs begin … begin + count - 1 of a tile, both multiples of a line's, to [input][16].
template <class Q, int kBits>
void widen_tile(const QuantizedWeight& weight, const uint8_t* tile, size_t begin, size_t count,
                float* out) {
  using V = typename Q::V;
  constexpr size_t kLineInputs = kBits == 4 ? 8 : 4;
  typename V::F scale[Q::kVecs] = {}, min[Q::kVecs];
  PLAIT_UNROLL
  for (int v = 0; v < Q::kVecs; ++v) min[v] = V::broadcast(static_cast<float>(weight.zero_point));
  const uint8_t* from = nullptr;
  for (size_t k = begin; k < begin + count; k += kLineInputs, out += kLineInputs * kTileOutputs) {
    if (k == begin || (weight.group != 0 && k % weight.group == 0)) {
      const uint8_t* factors = tile + weight.span_at(k);
      const uint8_t* header = tile + weight.group_at(k);
      load_plane<Q>(weight.scales, factors, header, scale);
      if (weight.has_mins) {
        load_plane<Q>(weight.scales, factors + 2 * kQuantTileOutputs, header + weight.plane_bytes(),
                      min);
      }
      from = tile + weight.codes_at(k);
    }
    typename Q::I line[Q::kVecs];
    PLAIT_UNROLL
    for (int v = 0; v < Q::kVecs; ++v) {
      line[v] = Q::load_codes(from + static_cast<size_t>(v) * V::kLanes * kStepInputs);
    }
    from += kQuantLineBytes;
    widen_input<Q, kBits, 0>(weight, line, scale, min, out);
    widen_input<Q, kBits, 8>(weight, line, scale, min, out + kTileOutputs);
    widen_input<Q, kBits, 16>(weight, line, scale, min, out + 2 * kTileOutputs);
    widen_input<Q, kBits, 24>(weight, line, scale, min, out + 3 * kTileOutputs);
    if constexpr (kBits == 4) {
      widen_input<Q, kBits, 4>(weight, line, scale, min, out + 4 * kTileOutputs);
      widen_input<Q, kBits, 12>(weight, line, scale, min, out + 5 * kTileOutputs);
      widen_input<Q, kBits, 20>(weight, line, scale, min, out + 6 * kTileOutputs);
      widen_input<Q, kBits, 28>(weight, line, scale, min, out + 7 * kTileOutputs);
    }
  }
}

template <class Q>
void run_exact(const LinearJob& job, const QuantizedWeight& weight, size_t begin, size_t end,
               char* scratch) {
  using V = typename Q::V;
  using Format = FloatFormat<V>;
  constexpr size_t kTileBytes = kExactInputs * kTileOutputs * sizeof(float);
  const Panels panels(job.rows, kMaxPanelRows<V>);
  const size_t most_tiles =
      static_cast<size_t>(max_tiles<Format>(static_cast<int>(panels.height(0))));
  const size_t line_inputs = weight.bits == 4 ? 8 : 4;
  const auto widen = weight.bits == 4 ? &widen_tile<Q, 4> : &widen_tile<Q, 8>;
  auto* widened = scratch;
  auto* sums = reinterpret_cast<float*>(scratch + kGroupTiles * kTileBytes);

  for (size_t group = begin; group < end; ++group) {
    const size_t first_tile = group * kGroupTiles;
    const size_t group_tiles = smaller(kGroupTiles, weight.tiles() - first_tile);
    WeightBlock block{};
    for (block.step = 0; block.step < job.steps; block.step += block.steps) {
      block.steps = smaller(kExactInputs, job.steps - block.step);
      const size_t inputs = (block.steps + line_inputs - 1) / line_inputs * line_inputs;
      for (size_t t = 0; t < group_tiles; t += block.tiles) {
        block.tile = first_tile + t;
        block.tiles = smaller(most_tiles, group_tiles - t);
        if (block.tiles == 3) block.tiles = 2;
        for (size_t i = 0; i < block.tiles; ++i) {
          widen(weight, weight.blob + (block.tile + i) * weight.tile_bytes(), block.step, inputs,
                reinterpret_cast<float*>(widened + i * kTileBytes));
        }
        multiply_block<Format, Format>(job, panels, block, widened, kTileBytes, nullptr,
                                       sums + t * kTileOutputs * job.rows);
      }
    }
  }
}

template <class Q>
constexpr QuantizedKernels make_quantized_kernels() {
  return {&quantize_rows_of<Q>,
          static_cast<size_t>(Q::kMaxRows),
          {Q::template step_bytes<Codes::kSmall, 2, false>(),
           Q::template step_bytes<Codes::kBytes, 2, false>()},
          &pack_rows<Q>,
          &run_quantized<Q>,
          static_cast<size_t>(kMaxPanelRows<typename Q::V>),
          &pack_exact<typename Q::V>,
          &run_exact<Q>};
}

}  // namespace
}  // namespace plait
