// Runs resampling and look-ups over awkward shapes on buffers of exact size, for sanitizers: built
// by tests/ops/test_pixels_memory.py without torch. All instruction sets must give the same bytes.

#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu_features.h"
#include "pixels.h"
#include "resample.h"

namespace {

int failures = 0;

std::vector<uint8_t> noise(size_t count) {
  std::vector<uint8_t> made(count);
  uint32_t state = 12345;
  for (uint8_t& byte : made) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return made;
}

struct Case {
  size_t height, width, gap, out_height, out_width;
};

std::vector<uint8_t> resampled(plait::ResampleKernel run, const Case& c,
                               plait::ResampleFilter filter, bool down_first) {
  // The last row ends where its pixels do.
  const size_t stride = c.width * 3 + c.gap;
  const std::vector<uint8_t> in = noise((c.height - 1) * stride + c.width * 3);
  std::vector<uint8_t> out(c.out_height * c.out_width * 3);
  run({in.data(), stride, c.height, c.width, out.data(), c.out_height, c.out_width, filter,
       down_first});
  return out;
}

void test_resample() {
  const Case cases[] = {{1, 1, 0, 1, 1},    {1, 1, 0, 9, 7},   {9, 7, 0, 1, 1},  {9, 7, 5, 9, 7},
                        {9, 7, 5, 9, 20},   {9, 7, 5, 30, 7},  {17, 5, 1, 4, 3}, {3, 100, 0, 50, 2},
                        {100, 3, 2, 2, 50}, {33, 31, 0, 8, 9}, {8, 8, 0, 64, 64}};
  for (const Case& c : cases) {
    for (int filter = 1; filter <= 3; ++filter) {
      for (const bool down_first : {false, true}) {
        const auto kind = static_cast<plait::ResampleFilter>(filter);
        const auto plain = resampled(plait::resample_plain, c, kind, down_first);
#if PLAIT_HAS_X86_SOURCES
        if (plait::best_cpu_isa() >= plait::CpuIsa::kAvx2 &&
            resampled(plait::resample_avx2, c, kind, down_first) != plain) {
          std::printf("filter %d from %zu x %zu to %zu x %zu differs\n", filter, c.height, c.width,
                      c.out_height, c.out_width);
          ++failures;
        }
#endif
      }
    }
  }
}

void test_look_ups() {
  std::vector<float> table(3 * 256);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<float>(i);
  for (const size_t size : {1, 2, 7}) {
    for (const size_t merge : {1, 2}) {
      const size_t height = size * merge * 2, width = size * merge * 3;
      const std::vector<uint8_t> in = noise(height * width * 3);
      std::vector<float> planes(in.size()), patches(in.size() * 2);
      plait::planes_of_pixels(
          {in.data(), width * 3, 3, 1, height, width, table.data(), planes.data()});
      plait::patches_of_pixels(
          {in.data(), width * 3, 3, 1, height, width, table.data(), patches.data()}, size, merge,
          2);
      const float last = static_cast<float>(512 + in.back());
      if (planes[0] != static_cast<float>(in[0]) || planes.back() != last ||
          patches[0] != planes[0] || patches.back() != last) {
        std::printf("squares of %zu are looked up wrongly\n", size);
        ++failures;
      }
    }
  }
}

}  // namespace

int main() {
  test_resample();
  test_look_ups();
  return failures == 0 ? 0 : 1;
}
