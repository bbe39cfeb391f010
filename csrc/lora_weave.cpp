#include "lora_weave.h"

#include <algorithm>
#include <chrono>

namespace plait {
namespace {

// Outputs of an expand: for rank 16 in bf16 a piece of 12 KB.
constexpr size_t kBlockOutputs = 384;

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
  num_rounds_ = 1 + ceil_div(outputs, kBlockOutputs);
  planned_ = run_ = {};
  done_ = 0;
  nanoseconds_ = 0;
  bytes_left_ = total_bytes(args);
  size_t floats = 0;
  for (size_t i = 0; i < args.num_segments; ++i) {
    const LoraSegment& segment = args.segments[i];
    floats += (segment.end - segment.start) * lora_t_stride(segment.type, segment.leaf);
  }
  if (t_.size() < floats) t_.resize(floats);
  block_rows_ = lora_job_rows(args);
  const size_t widened = block_rows_ * lora_widened_inputs(args);
  if (widened_.size() < widened) widened_.resize(widened);
  held_.resize(args.num_segments);
  float* t = t_.data();
  for (size_t i = 0; i < args.num_segments; ++i) t = hold(i, t);
}

// Returns where the next one's t begins.
float* LoraWeave::hold(size_t index, float* t) {
  const LoraSegment& segment = args_.segments[index];
  Held& held = held_[index];
  LoraArgs args = args_;
  args.x_type = Element::kFloat32;  // inputs are not read: nothing to convert
  held.job = make_lora_job(kernels_, args, segment.start, segment.end - segment.start, nullptr);
  held.job.segment = &segment;
  held.job.t = t;
  held.kernel = &kernels_.of(segment.type);
  held.t_stride = lora_t_stride(segment.type, segment.leaf);
  held.a_bytes = lora_a_bytes(segment);
  return t + held.job.rows * held.t_stride;
}

void LoraWeave::go_on(Place& place) const {
  if (++place.segment < args_.num_segments) return;
  place.segment = 0;
  ++place.round;
}

FetchList& LoraWeave::ahead(size_t groups_left) {
  ranges_.clear();
  fetch_.bytes = 0;
  const size_t share = ceil_div(bytes_left_, std::max<size_t>(groups_left, 1));
  for (; fetch_.bytes < share && planned_.round < num_rounds_; go_on(planned_)) {
    fetch_.bytes += plan(planned_);
  }
  bytes_left_ -= std::min(bytes_left_, fetch_.bytes);
  fetch_.ranges = ranges_.data();
  fetch_.count = ranges_.size();
  return fetch_;
}

// Returns the bytes that the item reads.
size_t LoraWeave::plan(const Place& place) {
  const Held& held = held_[place.segment];
  const LoraSegment& segment = *held.job.segment;
  if (place.round == 0) {
    plan_range(segment.weights + segment.leaf.a, held.a_bytes);
    return held.a_bytes;
  }
  const size_t end = place.round * kBlockOutputs;
  size_t total = 0;
  for (int64_t p = 0; p < segment.leaf.num_parts; ++p) {
    const LoraPart& part = segment.parts[p];
    const size_t row_bytes = lora_row_bytes(segment.type, static_cast<size_t>(part.rank));
    const size_t from = lora_cut(part, end - kBlockOutputs) * row_bytes;
    const size_t bytes = lora_cut(part, end) * row_bytes - from;
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
  run_until(planned_);
}

void LoraWeave::finish() {
  done_ = outputs_;
  run_until({num_rounds_, 0});
}

void LoraWeave::run_until(Place end) {
  const auto before = std::chrono::steady_clock::now();
  for (; run_ != end; go_on(run_)) {
    if (run_.round > 0 && std::min(run_.round * kBlockOutputs, outputs_) > done_) break;
    run(run_);
  }
  nanoseconds_ += std::chrono::duration_cast<std::chrono::nanoseconds>(
                      std::chrono::steady_clock::now() - before)
                      .count();
}

void LoraWeave::run(const Place& place) {
  const Held& held = held_[place.segment];
  if (place.round == 0) {
    shrink(held);
  } else {
    const size_t end = place.round * kBlockOutputs;
    held.kernel->expand(held.job, end - kBlockOutputs, std::min(end, outputs_));
  }
}

void LoraWeave::shrink(const Held& held) {
  const LoraSegment& segment = *held.job.segment;
  for (size_t first = 0; first < held.job.rows; first += block_rows_) {
    LoraJob job = make_lora_job(kernels_, args_, segment.start + first,
                                std::min(block_rows_, held.job.rows - first), widened_.data());
    job.segment = &segment;
    job.t = held.job.t + first * held.t_stride;
    held.kernel->shrink(job);
  }
}

}  // namespace plait
