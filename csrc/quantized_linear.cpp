#include "quantized_linear.h"

#include <algorithm>

#include "quantized_exact.h"
#include "thread_scratch.h"

namespace plait {
namespace {

// For any processor.
struct PlainQuant {
  using V = PlainVec;
  typedef int32_t I __attribute__((vector_size(16)));
  static constexpr int kVecs = 4;
  static constexpr int kMaxRows = 4;
  static constexpr size_t kMostTiles = 3;
  static constexpr size_t kDirectRows = 4;
  static constexpr Codes kUnpacked = Codes::kBytes;

  static constexpr bool kPairs = false;
  static constexpr bool kFetchesInStep = false;

  template <Codes, int, bool>
  static constexpr size_t step_bytes() {
    return kStepInputs;
  }
  template <Codes, int>
  static constexpr int zero_code() {
    return 0;
  }

  static I load_codes(const uint8_t* p) {
    I v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static V::F load_half(const uint16_t* p) {
    return V::F{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
  }
  static V::F load_small(const int8_t* p) {
    return V::F{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
                static_cast<float>(p[3])};
  }
  // PlainVec's fma rounds twice; in fp64 the product is exact.
  static V::F scale_once(V::F scale, V::F code, V::F min) {
    V::F result;
    for (size_t i = 0; i < V::kLanes; ++i) {
      const double product = static_cast<double>(scale[i]) * static_cast<double>(code[i]);
      result[i] = static_cast<float>(product + static_cast<double>(min[i]));
    }
    return result;
  }
  static V::F to_float(I v) { return __builtin_convertvector(v, V::F); }
  template <int kBits, int kShift>
  static I bits(I v) {
    typedef uint32_t U __attribute__((vector_size(16)));
    return (I)(((U)v >> kShift) & ((1u << kBits) - 1));
  }

  template <Codes kCodes, int kSteps, bool kMins, int kTiles, int kRows>
  static void dot(const GroupCodes& group, const char* x, const char* offsets,
                  I (&out)[kTiles][kRows][kVecs]) {
    int32_t sums[kTiles][kRows][kQuantTileOutputs] = {};
    for (size_t t = 0; t < kTiles; ++t) {
      if constexpr (!kMins) begin<kRows>(offsets, sums[t]);
      add<kCodes, kSteps, kRows>(group.codes + t * group.apart, x, sums[t]);
    }
    std::memcpy(out, sums, sizeof(sums));
  }

  static void unpack_nibbles(const uint8_t* lines, size_t count, uint8_t* out) {
    for (size_t i = 0; i < count; ++i, out += 2 * kQuantLineBytes) {
      for (size_t b = 0; b < kQuantLineBytes; ++b) {
        const uint8_t pair = lines[i * kQuantLineBytes + b];
        out[b] = pair & 15;
        out[kQuantLineBytes + b] = pair >> 4;
      }
    }
  }

  // Returns the sum of the codes. Sizes are compared by their bits, among which NaN is greater than
  // infinity.
  template <class T, int kGroup>
  static int32_t quantize_group(const T* x, int8_t* codes, float* scale) {
    float values[kGroup];
    uint32_t most = 0;
    for (size_t i = 0; i < kGroup; i += V::kLanes) V::store(values + i, V::load(x + i));
    for (const float value : values) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      most = std::max(most, bits & 0x7fffffff);
    }
    float size;
    std::memcpy(&size, &most, sizeof(size));
    const GroupScale group(size);
    *scale = group.scale;
    int32_t sum = 0;
    for (size_t i = 0; i < kGroup; ++i) {
      const float whole =
          group.inverse == 0 ? 0.0f : __builtin_nearbyintf(values[i] * group.inverse);
      codes[i] = static_cast<int8_t>(whole);
      sum += codes[i];
    }
    return sum;
  }

 private:
  template <int kRows>
  static void begin(const char* offsets, int32_t (&sums)[kRows][kQuantTileOutputs]) {
    for (size_t r = 0; r < kRows; ++r) {
      for (int32_t& sum : sums[r]) std::memcpy(&sum, offsets + 4 * r, sizeof(sum));
    }
  }

  template <Codes kCodes, size_t kSteps, int kRows>
  static void add(const uint8_t* codes, const char* x, int32_t (&sums)[kRows][kQuantTileOutputs]) {
    for (size_t s = 0; s < kSteps; ++s) {
      const bool halves = kCodes == Codes::kNibbles;
      const uint8_t* line = codes + (halves ? s / 2 : s) * kQuantLineBytes;
      const int shift = halves && s % 2 == 1 ? 4 : 0;
      const int mask = kCodes == Codes::kBytes ? 255 : 15;
      for (size_t r = 0; r < kRows; ++r) {
        const auto* row = reinterpret_cast<const int8_t*>(x) + (s * kRows + r) * kStepInputs;
        for (size_t n = 0; n < kQuantTileOutputs; ++n) {
          for (size_t i = 0; i < kStepInputs; ++i) {
            sums[r][n] += (line[n * kStepInputs + i] >> shift & mask) * row[i];
          }
        }
      }
    }
  }

  static float half_to_float(uint16_t half) {
    const uint32_t exponent = half >> 10 & 31;
    const uint32_t fraction = half & 1023;
    uint32_t bits =
        exponent == 31 ? 0x7f800000 | fraction << 13 : (exponent + 112) << 23 | fraction << 13;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    if (exponent == 0) value = static_cast<float>(fraction) * 0x1p-24f;
    return (half & 0x8000) != 0 ? -value : value;
  }
};

thread_local ThreadScratch rows_buffer;  // of the thread that calls
thread_local ThreadScratch work_buffer;

constexpr size_t floats_of(size_t bytes) { return (bytes + 3) / 4; }

constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// Work shorter than this runs on the calling thread, see linear.cpp; quantised products are
// quicker.
constexpr size_t kGrainProducts = 1'000'000;
constexpr size_t kGrainBytes = 400'000;

size_t grain_groups(const QuantizedWeight& weight, size_t rows) {
  const size_t products = rows * weight.in_features * kGroupTiles * kTileOutputs;
  return std::max<size_t>(1, std::min(ceil_div(kGrainProducts, products),
                                      ceil_div(kGrainBytes, kGroupTiles * weight.tile_bytes())));
}

// Rows of one call that stay in cache while all tiles pass by.
size_t chunk_rows(const QuantizedWeight& weight, size_t rows) {
  constexpr size_t kBytes = 256 * 1024;
  const size_t most = std::clamp<size_t>(kBytes / weight.padded_inputs(), 32, 256);
  return ceil_div(rows, ceil_div(rows, most));
}

LinearJob output_of(const QuantizedLinearArgs& args, size_t first_row, size_t rows) {
  LinearJob job{};
  job.rows = rows;
  job.steps = args.weight.in_features;
  job.out_features = args.weight.out_features;
  job.bias = args.bias;
  job.bias_type = args.bias_type;
  job.out =
      static_cast<char*>(args.out) + first_row * args.out_stride * element_size(args.out_type);
  job.out_stride = args.out_stride;
  job.out_type = args.out_type;
  return job;
}

const void* row_of(const QuantizedLinearArgs& args, size_t row) {
  return static_cast<const char*>(args.x) + row * args.x_stride * element_size(args.x_type);
}

void exact_chunk(const QuantizedKernels& kernels, const QuantizedLinearArgs& args, size_t first_row,
                 size_t rows, const ParallelFor& parallel_for) {
  const QuantizedWeight& weight = args.weight;
  float* panels = rows_buffer.at_least(rows * weight.in_features);
  const Panels split(rows, kernels.max_exact_rows);
  const size_t pack_grain = ceil_div(20'000, weight.in_features * kernels.max_exact_rows);
  parallel_for(split.count, pack_grain, [&](size_t begin, size_t end) {
    for (size_t p = begin; p < end; ++p) {
      const size_t row = split.first_row(p);
      kernels.pack_exact(row_of(args, first_row + row), args.x_type, args.x_stride, split.height(p),
                         weight.in_features, panels + row * weight.in_features);
    }
  });
  LinearJob job = output_of(args, first_row, rows);
  job.panels = panels;
  const Body run = [&](size_t begin, size_t end) {
    float* scratch = work_buffer.at_least(floats_of(exact_scratch_bytes(rows)));
    kernels.run_exact(job, weight, begin, end, reinterpret_cast<char*>(scratch));
  };
  const size_t groups = ceil_div(weight.tiles(), kGroupTiles);
  if (args.companion != nullptr && rows == args.rows) {
    run_with(*args.companion, job, groups, [&](size_t group) {
      job.fetch->most_bytes = kQuantLineBytes;  // the kernel fetches a line a step
      run(group, group + 1);
    });
  } else {
    parallel_for(groups, grain_groups(weight, rows), run);
  }
}

// The rows of a chunk, quantised: those that were given, or made here in `buffer`.
QuantizedRows quantize_chunk(const QuantizedKernels& kernels, const QuantizedLinearArgs& args,
                             size_t first_row, size_t rows, float* buffer,
                             const ParallelFor& parallel_for) {
  const QuantizedWeight& weight = args.weight;
  const size_t inputs = weight.padded_inputs();
  const size_t row_groups = weight.row_groups();
  if (args.quantized != nullptr) {
    QuantizedRows part = *args.quantized;
    part.codes += first_row * inputs;
    part.scales += first_row * row_groups;
    part.sums += first_row * row_groups;
    return part;
  }
  QuantizeRowsArgs rounding{};
  rounding.x = row_of(args, first_row);
  rounding.x_type = args.x_type;
  rounding.rows = rows;
  rounding.x_stride = args.x_stride;
  rounding.in_features = weight.in_features;
  rounding.padded_inputs = inputs;
  rounding.row_group = weight.row_group();
  rounding.scales = buffer;
  rounding.sums = reinterpret_cast<int32_t*>(buffer + rows * row_groups);
  rounding.codes = reinterpret_cast<int8_t*>(buffer + 2 * rows * row_groups);
  quantize_rows(kernels, rounding, parallel_for);
  return {rounding.codes, rounding.scales, rounding.sums, rows, inputs, row_groups};
}

void quantized_chunk(const QuantizedKernels& kernels, const QuantizedLinearArgs& args,
                     size_t first_row, size_t rows, const ParallelFor& parallel_for) {
  const QuantizedWeight& weight = args.weight;
  const size_t row_panel_bytes = weight.row_groups() * kernels.panel_bytes(weight);
  const size_t panel_floats = floats_of(rows * row_panel_bytes);
  const size_t row_floats =
      2 * rows * weight.row_groups() + floats_of(rows * weight.padded_inputs());
  float* buffer = rows_buffer.at_least(panel_floats + row_floats);
  auto* panels = reinterpret_cast<char*>(buffer);
  const QuantizedRows from =
      quantize_chunk(kernels, args, first_row, rows, buffer + panel_floats, parallel_for);
  const Panels split(rows, kernels.max_panel_rows);
  const size_t pack_grain = ceil_div(80'000, weight.padded_inputs() * kernels.max_panel_rows);
  parallel_for(split.count, pack_grain, [&](size_t begin, size_t end) {
    for (size_t p = begin; p < end; ++p) {
      const size_t row = split.first_row(p);
      kernels.pack(weight, from, row, split.height(p), panels + row * row_panel_bytes);
    }
  });

  QuantizedJob job;
  job.output = output_of(args, first_row, rows);
  job.weight = weight;
  job.panels = panels;
  const Body run = [&](size_t begin, size_t end) {
    float* scratch = work_buffer.at_least(floats_of(quantized_scratch_bytes(rows)));
    kernels.run(job, begin, end, reinterpret_cast<char*>(scratch));
  };
  const size_t groups = ceil_div(weight.tiles(), kGroupTiles);
  if (args.companion != nullptr && rows == args.rows && split.count > 1) {
    // The first panel's steps fetch the weights themselves.
    const size_t steps = (split.count - 1) * kGroupTiles * weight.row_groups();
    run_with(*args.companion, job.output, groups, [&](size_t group) {
      const size_t lines = ceil_div(job.output.fetch->bytes, steps * kQuantLineBytes);
      job.output.fetch->most_bytes = (lines < 4 ? 4 : 8) * kQuantLineBytes;
      run(group, group + 1);
    });
  } else {
    parallel_for(groups, grain_groups(weight, rows), run);
  }
}

}  // namespace

const QuantizedKernels& quantized_kernels_plain() {
  static constexpr QuantizedKernels kKernels = make_quantized_kernels<PlainQuant>();
  return kKernels;
}

const QuantizedKernels& quantized_kernels([[maybe_unused]] CpuIsa isa) {
#if PLAIT_HAS_X86_SOURCES
  if (isa >= CpuIsa::kAvx512Vnni) return quantized_kernels_vnni();
  if (isa >= CpuIsa::kAvx512) return quantized_kernels_avx512();
  if (isa >= CpuIsa::kAvx2) return quantized_kernels_avx2();
#endif
  return quantized_kernels_plain();
}

void quantize_rows(const QuantizedKernels& kernels, const QuantizeRowsArgs& args,
                   const ParallelFor& parallel_for) {
  if (args.rows == 0) return;
  parallel_for(args.rows, ceil_div(20'000, args.padded_inputs),
               [&](size_t begin, size_t end) { kernels.quantize_rows(args, begin, end); });
}

void quantized_linear(const QuantizedKernels& kernels, const QuantizedLinearArgs& args,
                      const ParallelFor& parallel_for) {
  if (args.rows == 0 || args.weight.out_features == 0) return;
  const size_t chunk = args.weight.exact ? ceil_div(args.rows, ceil_div(args.rows, kChunkRows))
                                         : chunk_rows(args.weight, args.rows);
  for (size_t first_row = 0; first_row < args.rows; first_row += chunk) {
    const size_t rows = std::min(chunk, args.rows - first_row);
    if (args.weight.exact) {
      exact_chunk(kernels, args, first_row, rows, parallel_for);
    } else {
      quantized_chunk(kernels, args, first_row, rows, parallel_for);
    }
  }
}

}  // namespace plait
