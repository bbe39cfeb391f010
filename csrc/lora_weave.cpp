#include "lora_weave.h"

#include <algorithm>
#include <chrono>

namespace plait {
namespace {

// Outputs of an expand: for rank 16 in bf16 a piece of 8 KB.
constexpr size_t kBlockOutputs = 256;

// Less is in cache soon, and most of what stays there may be from the last step.
constexpr size_t kLeastBytes = 256 * 1024;

constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

size_t total_bytes(const LoraArgs& args) {
  size_t bytes = 0;
  for (size_t i = 0; i < args.num_segments; ++i) {
    bytes += lora_a_bytes(args.segments[i]) + lora_b_bytes(args.segments[i]);
  }
  return bytes;
}

}  // namespace

bool LoraWeave::pays(const LoraArgs& args) {
  return args.x != nullptr && total_bytes(args) >= kLeastBytes;
}

void LoraWeave::begin(const LoraKernels& kernels, const LoraArgs& args, size_t outputs) {
  kernels_ = kernels;
  args_ = args;
  outputs_ = outputs;
  num_items_ = args.num_segments * (1 + ceil_div(outputs, kBlockOutputs));
  num_planned_ = num_run_ = done_ = 0;
  nanoseconds_ = 0;
  bytes_left_ = total_bytes(args);
  t_at_.resize(args.num_segments);
  size_t floats = 0;
  for (size_t i = 0; i < args.num_segments; ++i) {
    const LoraSegment& segment = args.segments[i];
    t_at_[i] = floats;
    floats += (segment.end - segment.start) * lora_t_stride(segment.type, segment.leaf);
  }
  if (t_.size() < floats) t_.resize(floats);
  const size_t widened = lora_job_rows(args) * lora_widened_inputs(args);
  if (widened_.size() < widened) widened_.resize(widened);
}

LoraWeave::Item LoraWeave::item(size_t index) const {
  const size_t segment = index % args_.num_segments;
  const size_t round = index / args_.num_segments;
  if (round == 0) return {segment, true, 0, 0};
  const size_t end = round * kBlockOutputs;
  return {segment, false, end - kBlockOutputs, std::min(end, outputs_)};
}

FetchList& LoraWeave::ahead(size_t groups_left) {
  ranges_.clear();
  fetch_.bytes = 0;
  const size_t share = ceil_div(bytes_left_, std::max<size_t>(groups_left, 1));
  while (fetch_.bytes < share && num_planned_ < num_items_) {
    fetch_.bytes += plan(item(num_planned_++));
  }
  bytes_left_ -= std::min(bytes_left_, fetch_.bytes);
  fetch_.ranges = ranges_.data();
  fetch_.count = ranges_.size();
  return fetch_;
}

// Returns the bytes that the item reads.
size_t LoraWeave::plan(const Item& item) {
  const LoraSegment& segment = args_.segments[item.segment];
  if (item.shrinks) {
    const size_t bytes = lora_a_bytes(segment);
    plan_range(segment.weights + segment.leaf.a, bytes);
    return bytes;
  }
  size_t total = 0;
  for (int64_t p = 0; p < segment.leaf.num_parts; ++p) {
    const LoraPart& part = segment.parts[p];
    const size_t row_bytes = lora_row_bytes(segment.type, static_cast<size_t>(part.rank));
    const size_t from = lora_cut(part, item.begin) * row_bytes;
    const size_t bytes = lora_cut(part, item.end) * row_bytes - from;
    if (bytes > 0) plan_range(segment.weights + part.b + from, bytes);
    total += bytes;
  }
  return total;
}

// What follows the last range lengthens it.
void LoraWeave::plan_range(const char* from, size_t bytes) {
  if (!ranges_.empty() && ranges_.back().end == from) {
    ranges_.back().end += bytes;
  } else {
    ranges_.push_back({from, from + bytes});
  }
}

void LoraWeave::advance(size_t outputs) {
  done_ = outputs;
  run_until(num_planned_);
}

void LoraWeave::finish() {
  done_ = outputs_;
  run_until(num_items_);
}

void LoraWeave::run_until(size_t end) {
  const auto before = std::chrono::steady_clock::now();
  for (; num_run_ < end; ++num_run_) {
    const Item next = item(num_run_);
    if (!next.shrinks && next.end > done_) break;
    run(next);
  }
  nanoseconds_ += std::chrono::duration_cast<std::chrono::nanoseconds>(
                      std::chrono::steady_clock::now() - before)
                      .count();
}

void LoraWeave::run(const Item& item) {
  const LoraSegment& segment = args_.segments[item.segment];
  const LoraKernel& kernel = kernels_.of(segment.type);
  const size_t stride = lora_t_stride(segment.type, segment.leaf);
  const size_t count = segment.end - segment.start;
  LoraArgs args = args_;
  if (!item.shrinks) args.x_type = Element::kFloat32;  // inputs are not read: nothing to convert
  const Panels blocks(count, item.shrinks ? lora_job_rows(args_) : count);
  for (size_t b = 0; b < blocks.count; ++b) {
    const size_t first = blocks.first_row(b);
    LoraJob job =
        make_lora_job(kernels_, args, segment.start + first, blocks.height(b), widened_.data());
    job.segment = &segment;
    job.t = t_.data() + t_at_[item.segment] + first * stride;
    if (item.shrinks) {
      kernel.shrink(job);
    } else {
      kernel.expand(job, item.begin, item.end);
    }
  }
}

}  // namespace plait
