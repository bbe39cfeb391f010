// A thread's buffer of floats, kept between calls: it grows to the largest need and stays. Only for
// files that are compiled for any processor, see vec.h.

#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace plait {
namespace {

class ThreadScratch {
 public:
  // Aligned to 64 bytes; whatever the last call left is in it.
  float* at_least(size_t floats) {
    if (floats > size_) {
      data_.reset();
      size_ = 0;
      data_.reset(new (kAlignment) float[floats]());
      size_ = floats;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, kAlignment); }
  };
  std::unique_ptr<float, Free> data_;
  size_t size_ = 0;
};

}  // namespace
}  // namespace plait
