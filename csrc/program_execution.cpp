#include "program_execution.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "checks.h"
#include "kv_write.h"

namespace plait {
namespace {

// A thread is worth having for about so many values: 20 µs.
constexpr size_t kGrainValues = 40'000;
constexpr int64_t kGrainCopiedBytes = 200'000;
constexpr double kAwakeMultiplyAdds = kAttentionGrain / 8;  // the pool's threads spin

}  // namespace

char* Execution::at(const Columns& columns) const {
  return at(columns.reg) + columns.start * value_bytes();
}

int64_t Execution::take_lora(Count& count) {
  const int64_t nanoseconds = lora.nanoseconds;
  count.calls += lora.calls;
  count.nanoseconds += nanoseconds;
  count.bytes += lora.bytes;
  count.operations += lora.operations;
  lora = {};
  return nanoseconds;
}

template <class Args>
void Execution::in_parts(void (*kernel)(const Args&, size_t, size_t), const Args& args,
                         size_t count, size_t values_each) const {
  const size_t grain = kGrainValues / values_each + 1;
  if (runner.pool_->size() == 1) {
    kernel(args, 0, count);
    return;
  }
  runner.pool_->parallel_for(
      count, grain, [kernel, &args](size_t begin, size_t end) { kernel(args, begin, end); });
}

// --- linears -------------------------------------------------------------------------------------

Work Execution::operator()(const LinearOp& op) {
  LinearArgs args{};
  args.x = at(op.input);
  args.rows = rows();
  args.x_stride = op.in_features;
  args.in_features = op.in_features;
  args.weight = op.weight;
  args.weight_type = type();
  args.out_features = op.out_features;
  args.bias = op.bias.data;
  args.bias_type = op.bias.type;
  args.out = at(op.output);
  args.out_stride = op.out_features;
  args.out_type = type();
  args.companion = begin_adapters(op.leaf, op.input, op.output);
  linear(runner.kernels_.linear, args, runner.parallel_for_);
  finish_adapters(args.companion);
  return {static_cast<int64_t>(op.weight_bytes),
          2 * static_cast<int64_t>(rows() * op.in_features * op.out_features)};
}

Work Execution::operator()(const QuantizedLinearOp& op) {
  QuantizedLinearArgs args{};
  args.x = at(op.input);
  args.x_type = type();
  args.rows = rows();
  args.x_stride = op.weight.in_features;
  args.weight = op.weight;
  args.bias = op.bias.data;
  args.bias_type = op.bias.type;
  args.out = at(op.output);
  args.out_stride = op.weight.out_features;
  args.out_type = type();
  args.companion = begin_adapters(op.leaf, op.input, op.output);
  quantized_linear(*runner.kernels_.quantized_linear, args, runner.parallel_for_);
  finish_adapters(args.companion);
  return {static_cast<int64_t>(op.weight.tiles() * op.weight.tile_bytes()),
          2 * static_cast<int64_t>(rows() * op.weight.in_features * op.weight.out_features)};
}

Companion* Execution::begin_adapters(int64_t leaf, size_t input, size_t output) {
  std::vector<LoraSegment>& segments = runner.segments_;
  segments.clear();
  if (leaf < 0 || runner.step_.lora.num_segments == 0) return nullptr;
  find_lora_segments(runner.step_.lora, leaf, static_cast<int64_t>(rows()),
                     static_cast<int64_t>(width(input)), static_cast<int64_t>(width(output)),
                     segments);
  LoraArgs& args = runner.lora_;
  args = {};
  args.x = at(input);
  args.x_type = type();
  args.x_stride = width(input);
  args.inputs = width(input);
  args.out = at(output);
  args.out_type = type();
  args.out_stride = width(output);
  args.segments = segments.data();
  args.num_segments = segments.size();
  // Threads that share the layer's tiles would wait for each other before every expand.
  if (runner.pool_->size() > 1 || !LoraWeave::pays(args)) return nullptr;
  runner.weave_.begin(runner.kernels_.lora, args, width(output));
  return &runner.weave_;
}

void Execution::finish_adapters(const Companion* companion) {
  if (runner.segments_.empty()) return;
  const auto before = std::chrono::steady_clock::now();
  int64_t earlier = 0;
  if (companion != nullptr && runner.weave_.is_under_way()) {
    earlier = runner.weave_.nanoseconds();
    runner.weave_.finish();
  } else {
    plait::lora(runner.kernels_.lora, runner.lora_, runner.parallel_for_);
  }
  for (const LoraSegment& segment : runner.segments_) {
    const auto bytes = static_cast<int64_t>(lora_a_bytes(segment) + lora_b_bytes(segment));
    lora.bytes += bytes;
    lora.operations += 2 * static_cast<int64_t>(lora_values(segment)) *
                       static_cast<int64_t>(segment.end - segment.start);
  }
  lora.calls = 1;
  lora.nanoseconds = earlier + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now() - before)
                                   .count();
}

// --- norms ---------------------------------------------------------------------------------------

Work Execution::operator()(const RmsNormOp& op) {
  RmsNormArgs args{};
  args.x = at(op.input);
  args.type = type();
  args.outer = rows();
  args.inner = 1;
  args.size = width(op.input);
  args.outer_stride = width(op.input);
  args.weight = op.weight.data;
  args.weight_type = op.weight.type;
  args.weight_offset = op.weight_offset;
  args.eps = op.eps;
  args.round_first = op.round_first;
  args.out = at(op.output);
  in_parts(runner.kernels_.rms_norm, args, rows(), width(op.input));
  return {};
}

Work Execution::operator()(const LayerNormOp& op) {
  LayerNormArgs args{};
  args.x = at(op.input);
  args.type = type();
  args.size = width(op.input);
  args.row_stride = width(op.input);
  args.weight = op.weight.data;
  args.weight_type = op.weight.type;
  args.bias = op.bias.data;
  args.bias_type = op.bias.type;
  args.eps = op.eps;
  args.out = at(op.output);
  in_parts(runner.kernels_.layer_norm, args, rows(), width(op.input));
  return {};
}

// The kernel writes rows without gaps between them, so a token's heads are a call of their own.
Work Execution::operator()(const HeadNormOp& op) {
  struct Heads {
    RmsNormArgs norm;
    RmsNormKernel kernel;
    char* first;
    size_t row_bytes;
  };
  Heads heads{};
  heads.norm.type = type();
  heads.norm.outer = 1;
  heads.norm.inner = op.heads.num_heads;
  heads.norm.size = op.heads.head_size;
  heads.norm.inner_stride = op.heads.head_size;
  heads.norm.weight = op.weight.data;
  heads.norm.weight_type = op.weight.type;
  heads.norm.weight_offset = op.weight_offset;
  heads.norm.eps = op.eps;
  heads.norm.round_first = op.round_first;
  heads.kernel = runner.kernels_.rms_norm;
  heads.first = at(op.heads);
  heads.row_bytes = width(op.heads.reg) * value_bytes();
  const auto run = [](const Heads& all, size_t begin, size_t end) {
    RmsNormArgs norm = all.norm;
    for (size_t row = begin; row < end; ++row) {
      char* const data = all.first + row * all.row_bytes;
      norm.x = data;
      norm.out = data;
      all.kernel(norm, 0, 1);
    }
  };
  in_parts<Heads>(run, heads, rows(), op.heads.width());
  return {};
}

// --- attention -----------------------------------------------------------------------------------

Work Execution::operator()(const RopeOp& op) {
  const ProgramRunner::RopeRows& table = runner.rope_rows_[op.table];
  RopeArgs args{};
  args.x = at(op.heads);
  args.type = type();
  args.row_stride = width(op.heads.reg);
  args.num_heads = op.heads.num_heads;
  args.head_stride = op.heads.stride;
  args.cos = table.cos;
  args.sin = table.sin;
  args.rotary = runner.program_.tables[op.table].rotary;
  args.positions = table.positions;
  args.is_interleaved = op.is_interleaved;
  args.round_products = op.round_products;
  in_parts(runner.kernels_.rope, args, rows(), op.heads.width());
  return {};
}

Work Execution::operator()(const AttentionOp& op) {
  write_kv(op);
  AttentionProblem problem = attention_problem(runner.program_, op, runner.step_);
  problem.query = at(op.query);
  problem.query_token_stride = static_cast<int64_t>(width(op.query.reg));
  problem.query_head_stride = static_cast<int64_t>(op.query.stride);
  problem.key_ends = runner.step_.num_ranges > 0 ? runner.key_ends_.data() : nullptr;
  const size_t head_bytes = op.query.head_size * value_bytes();
  const size_t kept_bytes = op.value.head_size * value_bytes();
  const size_t heads = rows() * op.query.num_heads;
  std::vector<char>& wide = runner.wide_heads_;
  const bool is_narrow = kept_bytes < head_bytes;
  if (is_narrow && wide.size() < heads * head_bytes) wide.resize(heads * head_bytes);
  problem.out = is_narrow ? wide.data() : at(op.output);
  paged_attention(problem, runner.kernels_.isa, static_cast<int64_t>(runner.pool_->size()),
                  runner.run_workers_, kAwakeMultiplyAdds);
  if (is_narrow) {
    for (size_t i = 0; i < heads; ++i) {
      std::memcpy(at(op.output) + i * kept_bytes, wide.data() + i * head_bytes, kept_bytes);
    }
  }
  return attention_work(problem, op);
}

void Execution::write_kv(const AttentionOp& op) const {
  const StepGroup& group = runner.step_.groups[op.group];
  const auto size = static_cast<int64_t>(value_bytes());
  const auto source = [&](const Columns& columns) {
    const auto head_bytes = static_cast<int64_t>(columns.head_size) * size;
    const auto row_bytes = static_cast<int64_t>(width(columns.reg)) * size;
    return KvRows{at(columns), row_bytes, static_cast<int64_t>(columns.stride) * size, head_bytes};
  };
  const KvRows key = source(op.key);
  const KvRows value = source(op.value);
  const int64_t stored = group.stored_bytes(type());
  KvPages pages{};
  pages.data = group.pages + op.layer * 2 * group.half() * stored;
  pages.block_stride = group.block_stride() * stored;
  pages.value_offset = group.half() * stored;
  pages.head_bytes = group.slot_size() * stored;
  if (group.is_codes) pages.codes = size == 4 ? KvCodes::kOfFloat32 : KvCodes::kOfBfloat16;
  pages.block_size = group.block_size;
  const int64_t row_bytes = 2 * group.num_kv_heads * pages.head_bytes;
  const auto grain = static_cast<size_t>(std::max<int64_t>(1, kGrainCopiedBytes / row_bytes));
  runner.pool_->parallel_for(rows(), grain, [&](size_t begin, size_t end) {
    kv_write(pages, key, value, group.slots, group.num_kv_heads, static_cast<int64_t>(begin),
             static_cast<int64_t>(end));
  });
}

Work Execution::attention_work(const AttentionProblem& p, const AttentionOp& op) const {
  int64_t keys = 0;   // read
  int64_t pairs = 0;  // of a row and a key that it sees, without regard to ranges
  for (int64_t s = 0; s < p.num_spans; ++s) {
    const int64_t count = p.query_start[s + 1] - p.query_start[s];
    if (count == 0) continue;
    const int64_t length = p.seq_lens[s];
    const int64_t window = p.window == 0 ? length : std::min<int64_t>(p.window, length);
    keys += std::min(length, window + count - 1);
    const int64_t first = length - count + 1;  // keys that the first row sees, without a window
    const int64_t growing = std::clamp<int64_t>(window - first + 1, 0, count);
    pairs += growing * first + growing * (growing - 1) / 2 + (count - growing) * window;
  }
  const auto head_size = static_cast<int64_t>(op.query.head_size);
  const int64_t slot_bytes = p.slot_stride * runner.step_.groups[op.group].stored_bytes(type());
  return {keys * p.num_kv_heads * 2 * slot_bytes, pairs * p.num_heads * 4 * head_size};
}

// --- values
// ---------------------------------------------------------------------------------------

Work Execution::operator()(const GatedActivationOp& op) {
  GatedActivationArgs args{};
  args.x = at(op.input);
  args.type = type();
  args.size = width(op.output);
  args.row_stride = width(op.input);
  args.activation = op.activation;
  args.out = at(op.output);
  in_parts(runner.kernels_.gated_activation, args, rows(), 2 * width(op.input));
  return {};
}

Work Execution::operator()(const ActivationOp& op) {
  ActivationArgs args{};
  args.x = at(op.input);
  args.type = type();
  args.activation = op.activation;
  args.out = at(op.output);
  in_parts(runner.kernels_.activation, args, values(op.input), 2);
  return {};
}

Work Execution::operator()(const AddOp& op) {
  AddArgs args{};
  args.out = at(op.output);
  args.x = at(op.input);
  args.type = type();
  args.scale = op.scale;
  in_parts(runner.kernels_.residual.add, args, values(op.output), 1);
  return {};
}

Work Execution::operator()(const ScaleOp& op) {
  ScaleArgs args{};
  args.out = at(op.output);
  args.type = type();
  args.scale = op.scale;
  in_parts(runner.kernels_.residual.scale, args, values(op.output), 1);
  return {};
}

Work Execution::operator()(const CopyOp& op) {
  if (op.output == op.input) return {};
  const size_t row_bytes = width(op.output) * value_bytes();
  const size_t input_bytes = width(op.input) * value_bytes();
  const char* const first = at(op.input) + op.start * value_bytes();
  for (size_t row = 0; row < rows(); ++row) {
    std::memcpy(at(op.output) + row * row_bytes, first + row * input_bytes, row_bytes);
  }
  return {};
}

Work Execution::operator()(const TapOp& op) {
  const Step& step = runner.step_;
  const size_t row_bytes = width(op.input) * value_bytes();
  for (size_t tap = 0; tap < step.taps.size(); ++tap) {
    if (step.taps[tap] != op.layer) continue;
    for (size_t row = 0; row < rows(); ++row) {
      std::memcpy(static_cast<char*>(step.tapped) + (row * step.taps.size() + tap) * row_bytes,
                  at(op.input) + row * row_bytes, row_bytes);
    }
  }
  return {};
}

Work Execution::operator()(const AddEmbedsOp& op) {
  const Step& step = runner.step_;
  const size_t size = width(op.output);
  for (size_t i = 0; i < step.num_image_rows; ++i) {
    const auto row = static_cast<size_t>(step.image_rows[i]);
    AddArgs args{};
    args.out = at(op.output) + row * size * value_bytes();
    args.x = step.embeds + (i * step.embeds_stride + op.level * size) * value_bytes();
    args.type = type();
    args.scale = 1.0f;
    runner.kernels_.residual.add(args, 0, size);
  }
  return {};
}

Work Execution::operator()(const CallOp&) {
  refuse("program_step", "a call is not run here, but between two runs");
}

}  // namespace plait
