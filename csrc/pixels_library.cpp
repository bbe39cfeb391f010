// What a process without torch calls, by ctypes: plait/_pixels.so has this and no torch. A server's
// processor of images resizes and normalises so, within what `vision/pixel_library.py` has checked.

#include <cstddef>
#include <cstdint>
#include <exception>

#include "cpu_features.h"
#include "pixels.h"
#include "resample.h"

#define PLAIT_EXPORT extern "C" __attribute__((visibility("default")))

// pixels [height][width][3], dense; out [out_height][out_width][3]. 0, or 1 where PLAIT_CPU_ISA is
// unknown or memory runs out.
PLAIT_EXPORT int plait_resize_rgb(const uint8_t* pixels, size_t height, size_t width, uint8_t* out,
                                  size_t out_height, size_t out_width, int filter, int down_first) {
  try {
    const plait::ResampleArgs args{pixels,
                                   width * 3,
                                   height,
                                   width,
                                   out,
                                   out_height,
                                   out_width,
                                   static_cast<plait::ResampleFilter>(filter),
                                   down_first != 0};
    plait::ResampleKernel run = plait::resample_plain;
#if PLAIT_HAS_X86_SOURCES
    if (plait::cpu_isa() >= plait::CpuIsa::kAvx2) run = plait::resample_avx2;
#endif
    run(args);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

// pixels [height][width][3], rows `row_stride` bytes apart; table [3][256]; out [3][height][width]
PLAIT_EXPORT void plait_pixel_planes(const uint8_t* pixels, size_t row_stride, size_t height,
                                     size_t width, const float* table, float* out) {
  plait::planes_of_pixels({pixels, row_stride, 3, 1, height, width, table, out});
}
