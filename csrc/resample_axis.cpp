// Weights in double precision, each step in Pillow's order: another order would round otherwise.

#include <cmath>
#include <numbers>

#include "resample.h"

namespace plait {
namespace {

double bilinear(double x) {
  x = std::fabs(x);
  return x < 1.0 ? 1.0 - x : 0.0;
}

double bicubic(double x) {
  constexpr double a = -0.5;
  x = std::fabs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}

double sinc(double x) {
  if (x == 0.0) return 1.0;
  x *= std::numbers::pi;
  return std::sin(x) / x;
}

double lanczos(double x) { return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

struct Shape {
  double (*at)(double);
  double support;
};

Shape shape_of(ResampleFilter filter) {
  switch (filter) {
    case ResampleFilter::kLanczos:
      return {lanczos, 3.0};
    case ResampleFilter::kBilinear:
      return {bilinear, 1.0};
    default:
      return {bicubic, 2.0};
  }
}

int32_t fixed_point(double weight) {
  const double scaled = weight * (1 << kWeightBits);
  return static_cast<int32_t>(weight < 0 ? -0.5 + scaled : 0.5 + scaled);
}

}  // namespace

ResampleAxis resample_axis(size_t size, size_t out_size, ResampleFilter filter) {
  const Shape shape = shape_of(filter);
  const double scale = static_cast<double>(size) / static_cast<double>(out_size);
  const double widened = scale < 1.0 ? 1.0 : scale;
  const double support = shape.support * widened;
  const size_t num_taps = static_cast<size_t>(std::ceil(support)) * 2 + 1;
  ResampleAxis axis{num_taps, std::vector<size_t>(out_size), std::vector<size_t>(out_size),
                    std::vector<int32_t>(out_size * num_taps)};
  std::vector<double> weights(num_taps);
  for (size_t i = 0; i < out_size; ++i) {
    const double center = (static_cast<double>(i) + 0.5) * scale;
    const double step = 1.0 / widened;
    const double low = center - support + 0.5;
    const double high = center + support + 0.5;
    const size_t first = low < 0 ? 0 : static_cast<size_t>(low);
    const size_t last = high > static_cast<double>(size) ? size : static_cast<size_t>(high);
    const size_t count = last - first;
    double sum = 0.0;
    for (size_t k = 0; k < count; ++k) {
      weights[k] = shape.at((static_cast<double>(k + first) - center + 0.5) * step);
      sum += weights[k];
    }
    axis.first[i] = first;
    axis.count[i] = count;
    for (size_t k = 0; k < count; ++k) {
      axis.weights[i * num_taps + k] = fixed_point(sum != 0.0 ? weights[k] / sum : weights[k]);
    }
  }
  return axis;
}

}  // namespace plait
