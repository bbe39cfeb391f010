// Binds the ops that make tensors of images: checks every argument, hands pointers and sizes on.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "checks.h"
#include "cpu_features.h"
#include "pixels.h"
#include "resample.h"

namespace {

using plait::check;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_pixels(const Tensor& pixels, const char* op) {
  check(pixels.is_cpu() && pixels.scalar_type() == ScalarType::Byte && pixels.dim() == 3 &&
            pixels.size(2) == 3 && pixels.size(0) > 0 && pixels.size(1) > 0,
        op, "pixels must be uint8 [H, W, 3] on the CPU, and not empty");
}

// pixels [H, W, 3], rows may lie apart; out [h, w, 3]
void resize_rgb(const Tensor& pixels, const Tensor& out, int64_t filter, bool down_first) {
  constexpr const char* op = "resize_rgb_";
  check_pixels(pixels, op);
  check_pixels(out, op);
  check(pixels.stride(2) == 1 && (pixels.stride(1) == 3 || pixels.size(1) == 1) &&
            (pixels.stride(0) >= pixels.size(1) * 3 || pixels.size(0) == 1),
        op, "rows of pixels must be dense and not overlap");
  check(out.is_contiguous(), op, "out must be dense");
  check(filter >= 1 && filter <= 3, op, "filter must be 1, 2 or 3, it is ", filter);
  const plait::ResampleArgs args{static_cast<const uint8_t*>(pixels.const_data_ptr()),
                                 static_cast<size_t>(pixels.stride(0)),
                                 static_cast<size_t>(pixels.size(0)),
                                 static_cast<size_t>(pixels.size(1)),
                                 static_cast<uint8_t*>(out.mutable_data_ptr()),
                                 static_cast<size_t>(out.size(0)),
                                 static_cast<size_t>(out.size(1)),
                                 static_cast<plait::ResampleFilter>(filter),
                                 down_first};
  plait::ResampleKernel run = plait::resample_plain;
#if PLAIT_HAS_X86_SOURCES
  if (plait::cpu_isa() >= plait::CpuIsa::kAvx2) run = plait::resample_avx2;
#endif
  run(args);
}

plait::PixelArgs arguments(const Tensor& pixels, const Tensor& table, const Tensor& out,
                           const char* op) {
  check_pixels(pixels, op);
  check(pixels.stride(0) >= 0 && pixels.stride(1) >= 0 && pixels.stride(2) >= 0, op,
        "pixels must not run backwards");
  check(table.is_cpu() && table.scalar_type() == ScalarType::Float && table.is_contiguous() &&
            table.dim() == 2 && table.size(0) == 3 && table.size(1) == 256,
        op, "table must be float32 [3, 256] and dense");
  check(out.is_cpu() && out.scalar_type() == ScalarType::Float && out.is_contiguous(), op,
        "out must be float32 and dense");
  return {static_cast<const uint8_t*>(pixels.const_data_ptr()),
          static_cast<size_t>(pixels.stride(0)),
          static_cast<size_t>(pixels.stride(1)),
          static_cast<size_t>(pixels.stride(2)),
          static_cast<size_t>(pixels.size(0)),
          static_cast<size_t>(pixels.size(1)),
          static_cast<const float*>(table.const_data_ptr()),
          static_cast<float*>(out.mutable_data_ptr())};
}

// out [3, H, W]
void pixel_planes(const Tensor& pixels, const Tensor& table, const Tensor& out) {
  constexpr const char* op = "pixel_planes_";
  const plait::PixelArgs args = arguments(pixels, table, out, op);
  check(out.dim() == 3 && out.size(0) == 3 && out.size(1) == pixels.size(0) &&
            out.size(2) == pixels.size(1),
        op, "out must be [3, H, W]");
  plait::planes_of_pixels(args);
}

// out [H · W / size², 3 · times · size²]
void pixel_patches(const Tensor& pixels, const Tensor& table, const Tensor& out, int64_t size,
                   int64_t merge, int64_t times) {
  constexpr const char* op = "pixel_patches_";
  const plait::PixelArgs args = arguments(pixels, table, out, op);
  check(size > 0 && merge > 0 && times > 0 && size <= 1024 && merge <= 1024 && times <= 1024, op,
        "size, merge and times must lie in [1, 1024]");
  check(pixels.size(0) % (size * merge) == 0 && pixels.size(1) % (size * merge) == 0, op,
        "height and width must be multiples of ", size * merge);
  check(out.dim() == 2 && out.size(0) == pixels.size(0) * pixels.size(1) / (size * size) &&
            out.size(1) == 3 * times * size * size,
        op, "out must be [H * W / size^2, 3 * times * size^2]");
  plait::patches_of_pixels(args, static_cast<size_t>(size), static_cast<size_t>(merge),
                           static_cast<size_t>(times));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(plait, m) {
  m.def("resize_rgb_(Tensor pixels, Tensor(a!) out, int filter, bool down_first) -> ()");
  m.def("pixel_planes_(Tensor pixels, Tensor table, Tensor(a!) out) -> ()");
  m.def(
      "pixel_patches_(Tensor pixels, Tensor table, Tensor(a!) out, int size, int merge, "
      "int times) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(plait, CPU, m) {
  m.impl("resize_rgb_", TORCH_BOX(&resize_rgb));
  m.impl("pixel_planes_", TORCH_BOX(&pixel_planes));
  m.impl("pixel_patches_", TORCH_BOX(&pixel_patches));
}
