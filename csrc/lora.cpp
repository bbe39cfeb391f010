#include "lora.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "lora_kernel.h"

namespace plait {
namespace {

// Rows that are computed one after the other by one thread, with the segments they are all in.
struct Item {
  size_t row;
  size_t rows;
  size_t segment;  // the first
  size_t num_segments;
};

thread_local std::vector<Item> items_buffer;
thread_local std::vector<float> scratch_buffer;

constexpr size_t kBlockRows = 24;           // of a job at most, …
constexpr size_t kLeastBlockRows = 6;       // … and at least, where there are as many
constexpr size_t kBlockBytes = 128 * 1024;  // of inputs in fp32

// Work under both runs on the calling thread: about 20 µs.
constexpr size_t kGrainFlops = 1'000'000;
constexpr size_t kGrainBytes = 400'000;

bool same_rows(const LoraSegment& a, const LoraSegment& b) {
  return a.start == b.start && a.end == b.end;
}

void find_items(const LoraArgs& args, std::vector<Item>& items) {
  const size_t most = lora_job_rows(args);
  items.clear();
  for (size_t first = 0; first < args.num_segments;) {
    const LoraSegment& segment = args.segments[first];
    size_t count = 1;
    while (first + count < args.num_segments && same_rows(segment, args.segments[first + count])) {
      ++count;
    }
    const Panels blocks(segment.end - segment.start, most);
    for (size_t b = 0; b < blocks.count; ++b) {
      items.push_back({segment.start + blocks.first_row(b), blocks.height(b), first, count});
    }
    first += count;
  }
}

bool is_worth_threads(const LoraArgs& args) {
  size_t flops = 0;
  size_t bytes = 0;
  for (size_t i = 0; i < args.num_segments; ++i) {
    const LoraSegment& segment = args.segments[i];
    const size_t read = (args.x == nullptr ? 0 : lora_a_bytes(segment)) + lora_b_bytes(segment);
    const size_t a_values = static_cast<size_t>(segment.leaf.inputs * segment.leaf.ranks);
    const size_t values = lora_values(segment) - (args.x == nullptr ? a_values : 0);
    flops += 2 * values * (segment.end - segment.start);
    bytes += read;
  }
  return flops > kGrainFlops || bytes > kGrainBytes;
}

const char* weights_of(const LoraSegment& segment) { return segment.weights + segment.leaf.a; }

void run_item(const LoraKernels& kernels, const LoraArgs& args, const Item& item, const Item* next,
              size_t t_stride) {
  const size_t inputs = item.rows * lora_widened_inputs(args);
  const size_t needed = inputs + item.rows * t_stride;
  if (scratch_buffer.size() < needed) scratch_buffer.resize(needed);
  LoraJob job = make_lora_job(kernels, args, item.row, item.rows, scratch_buffer.data());
  job.t = scratch_buffer.data() + inputs;
  for (size_t s = 0; s < item.num_segments; ++s) {
    job.segment = &args.segments[item.segment + s];
    if (s + 1 < item.num_segments) {
      job.next = weights_of(job.segment[1]);
    } else {
      job.next = next == nullptr ? nullptr : weights_of(args.segments[next->segment]);
    }
    const LoraKernel& kernel = kernels.of(job.segment->type);
    kernel.shrink(job);
    kernel.expand(job, 0, SIZE_MAX);
  }
}

}  // namespace

LoraKernels lora_kernels_plain() { return make_lora_kernels<PlainCodes>(); }

size_t lora_a_bytes(const LoraSegment& segment) {
  const auto ranks = static_cast<size_t>(segment.leaf.ranks);
  const auto inputs = static_cast<size_t>(segment.leaf.inputs);
  const size_t factors = segment.type == LoraType::kInt8 ? ranks * sizeof(float) : 0;
  return factors + ranks * lora_row_bytes(segment.type, inputs);
}

size_t lora_b_bytes(const LoraSegment& segment) {
  size_t bytes = 0;
  for (int64_t p = 0; p < segment.leaf.num_parts; ++p) {
    const LoraPart& part = segment.parts[p];
    bytes += static_cast<size_t>(part.outputs) *
             lora_row_bytes(segment.type, static_cast<size_t>(part.rank));
  }
  return bytes;
}

size_t lora_values(const LoraSegment& segment) {
  int64_t values = segment.leaf.inputs * segment.leaf.ranks;
  for (int64_t p = 0; p < segment.leaf.num_parts; ++p) {
    values += segment.parts[p].outputs * segment.parts[p].rank;
  }
  return static_cast<size_t>(values);
}

size_t lora_widened_inputs(const LoraArgs& args) {
  return args.x == nullptr || args.x_type == Element::kFloat32 ? 0 : args.inputs;
}

size_t lora_job_rows(const LoraArgs& args) {
  const size_t fitting = kBlockBytes / (sizeof(float) * std::max<size_t>(args.inputs, 1));
  return std::clamp(fitting, kLeastBlockRows, kBlockRows);
}

LoraJob make_lora_job(const LoraKernels& kernels, const LoraArgs& args, size_t row, size_t rows,
                      float* widened) {
  LoraJob job{};
  job.rows = rows;
  if (args.x == nullptr) {
    job.token_ids = args.token_ids + row;
  } else if (args.x_type == Element::kFloat32) {
    job.x = static_cast<const float*>(args.x) + row * args.x_stride;
    job.x_stride = args.x_stride;
  } else {
    const auto* x = static_cast<const uint16_t*>(args.x) + row * args.x_stride;
    for (size_t r = 0; r < rows; ++r) {
      kernels.widen(x + r * args.x_stride, args.inputs, widened + r * args.inputs);
    }
    job.x = widened;
    job.x_stride = args.inputs;
  }
  job.out = static_cast<char*>(args.out) + row * args.out_stride * element_size(args.out_type);
  job.out_type = args.out_type;
  job.out_stride = args.out_stride;
  return job;
}

void lora(const LoraKernels& kernels, const LoraArgs& args, const ParallelFor& parallel_for) {
  std::vector<Item>& items = items_buffer;
  find_items(args, items);
  size_t t_stride = 0;
  for (size_t i = 0; i < args.num_segments; ++i) {
    t_stride = std::max(t_stride, lora_t_stride(args.segments[i].type, args.segments[i].leaf));
  }
  // Items differ in size, so threads take one after the other rather than equal shares.
  std::atomic<size_t> taken{0};
  const size_t count = items.size();
  const Body run = [&](size_t, size_t) {
    for (size_t i = taken++; i < count; i = taken++) {
      run_item(kernels, args, items[i], i + 1 < count ? &items[i + 1] : nullptr, t_stride);
    }
  };
  if (count > 1 && is_worth_threads(args)) {
    parallel_for(count, 1, run);
  } else {
    run(0, count);
  }
}

}  // namespace plait
