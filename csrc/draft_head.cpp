#include "draft_head.h"

#include <algorithm>

namespace plait {
namespace {

constexpr size_t kLogitRows = 16;  // made at a time

}  // namespace

void multiply(const ProgramRunner& runner, const DraftMatrix& matrix, const void* x, size_t rows,
              void* out, size_t out_stride, Element out_type) {
  const Element type = runner.program().type;
  if (matrix.is_quantized) {
    QuantizedLinearArgs args{};
    args.x = x;
    args.x_type = type;
    args.rows = rows;
    args.x_stride = matrix.in_features;
    args.weight = matrix.quantized;
    args.out = out;
    args.out_stride = out_stride;
    args.out_type = out_type;
    quantized_linear(*runner.kernels().quantized_linear, args, runner.parallel_for());
    return;
  }
  LinearArgs args{};
  args.x = x;
  args.rows = rows;
  args.x_stride = matrix.in_features;
  args.in_features = matrix.in_features;
  args.weight = matrix.weight;
  args.weight_type = type;
  args.out_features = matrix.out_features;
  args.out = out;
  args.out_stride = out_stride;
  args.out_type = out_type;
  linear(runner.kernels().linear, args, runner.parallel_for());
}

void norm_rows(const ProgramRunner& runner, const Vector& weight, float eps, size_t width,
               const void* x, size_t rows, void* out) {
  RmsNormArgs norm{};
  norm.x = x;
  norm.type = runner.program().type;
  norm.outer = rows;
  norm.inner = 1;
  norm.size = width;
  norm.outer_stride = width;
  norm.weight = weight.data;
  norm.weight_type = weight.type;
  norm.eps = eps;
  norm.round_first = true;
  norm.out = out;
  runner.kernels().rms_norm(norm, 0, rows);
}

std::vector<BestToken> likeliest(const ProgramRunner& runner, const DraftHead& head,
                                 const void* hidden, size_t rows) {
  const size_t row_bytes = head.logits.in_features * element_size(runner.program().type);
  std::vector<char> normed(rows * row_bytes);
  norm_rows(runner, head.norm, head.eps, head.logits.in_features, hidden, rows, normed.data());
  std::vector<float> logits(std::min(rows, kLogitRows) * head.num_tokens);
  std::vector<BestToken> found;
  for (size_t begin = 0; begin < rows; begin += kLogitRows) {
    const size_t count = std::min(kLogitRows, rows - begin);
    multiply(runner, head.logits, normed.data() + begin * row_bytes, count, logits.data(),
             head.num_tokens, Element::kFloat32);
    for (size_t i = 0; i < count; ++i) {
      found.push_back(
          runner.kernels().best_token(logits.data() + i * head.num_tokens, head.num_tokens));
    }
  }
  return found;
}

}  // namespace plait
