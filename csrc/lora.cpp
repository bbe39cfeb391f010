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

constexpr size_t kBlockRows = 24;           // of an item at most, …
constexpr size_t kLeastBlockRows = 6;       // … and at least, where there are as many
constexpr size_t kBlockBytes = 128 * 1024;  // of inputs in fp32, which should stay in cache

// Work under both runs on the calling thread: about 20 µs.
constexpr size_t kGrainFlops = 1'000'000;
constexpr size_t kGrainBytes = 400'000;

bool same_rows(const LoraSegment& a, const LoraSegment& b) {
  return a.start == b.start && a.end == b.end;
}

void find_items(const LoraArgs& args, std::vector<Item>& items) {
  const size_t fitting = kBlockBytes / (sizeof(float) * std::max<size_t>(args.inputs, 1));
  const size_t most = std::clamp(fitting, kLeastBlockRows, kBlockRows);
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
    auto weights =
        static_cast<size_t>(args.x == nullptr ? 0 : segment.leaf.inputs * segment.leaf.ranks);
    for (int64_t p = 0; p < segment.leaf.num_parts; ++p) {
      weights += static_cast<size_t>(segment.parts[p].outputs * segment.parts[p].rank);
    }
    flops += 2 * weights * (segment.end - segment.start);
    bytes += weights * element_size(segment.type);
  }
  return flops > kGrainFlops || bytes > kGrainBytes;
}

// The inputs of an item's rows in fp32: where they are, or converted.
LoraJob make_job(const LoraKernels& kernels, const LoraArgs& args, const Item& item,
                 float* widened) {
  LoraJob job{};
  job.rows = item.rows;
  if (args.x == nullptr) {
    job.token_ids = args.token_ids + item.row;
  } else if (args.x_type == Element::kFloat32) {
    job.x = static_cast<const float*>(args.x) + item.row * args.x_stride;
    job.x_stride = args.x_stride;
  } else {
    const auto* x = static_cast<const uint16_t*>(args.x) + item.row * args.x_stride;
    for (size_t r = 0; r < item.rows; ++r) {
      kernels.widen(x + r * args.x_stride, args.inputs, widened + r * args.inputs);
    }
    job.x = widened;
    job.x_stride = args.inputs;
  }
  job.out = static_cast<char*>(args.out) + item.row * args.out_stride * element_size(args.out_type);
  job.out_type = args.out_type;
  job.out_stride = args.out_stride;
  return job;
}

const char* weights_of(const LoraSegment& segment) { return segment.weights + segment.leaf.a; }

void run_item(const LoraKernels& kernels, const LoraArgs& args, const Item& item, const Item* next,
              size_t most_ranks) {
  const bool widens = args.x != nullptr && args.x_type != Element::kFloat32;
  const size_t inputs = widens ? item.rows * args.inputs : 0;
  const size_t needed = inputs + lora_scratch_floats(item.rows, most_ranks);
  if (scratch_buffer.size() < needed) scratch_buffer.resize(needed);
  LoraJob job = make_job(kernels, args, item, scratch_buffer.data());
  job.scratch = scratch_buffer.data() + inputs;
  for (size_t s = 0; s < item.num_segments; ++s) {
    job.segment = &args.segments[item.segment + s];
    if (s + 1 < item.num_segments) {
      job.next = weights_of(job.segment[1]);
    } else {
      job.next = next == nullptr ? nullptr : weights_of(args.segments[next->segment]);
    }
    (job.segment->type == Element::kFloat32 ? kernels.float32 : kernels.bfloat16)(job);
  }
}

}  // namespace

LoraKernels lora_kernels_plain() { return make_lora_kernels<PlainVec>(); }

void lora(const LoraKernels& kernels, const LoraArgs& args, const ParallelFor& parallel_for) {
  std::vector<Item>& items = items_buffer;
  find_items(args, items);
  size_t most_ranks = 0;
  for (size_t i = 0; i < args.num_segments; ++i) {
    most_ranks = std::max(most_ranks, static_cast<size_t>(args.segments[i].leaf.ranks));
  }
  // Items differ in size, so threads take one after the other rather than equal shares.
  std::atomic<size_t> taken{0};
  const size_t count = items.size();
  const Body run = [&](size_t, size_t) {
    for (size_t i = taken++; i < count; i = taken++) {
      run_item(kernels, args, items[i], i + 1 < count ? &items[i + 1] : nullptr, most_ranks);
    }
  };
  if (count > 1 && is_worth_threads(args)) {
    parallel_for(count, 1, run);
  } else {
    run(0, count);
  }
}

}  // namespace plait
