// linear.h's ParallelFor by torch's threads. Only for bindings.

#pragma once

#include <torch/csrc/stable/ops.h>

#include "linear.h"

namespace plait {
namespace {

inline void torch_parallel_for(size_t count, size_t grain, const Body& body) {
  if (count <= grain) {
    body(0, count);
    return;
  }
  torch::stable::parallel_for(0, static_cast<int64_t>(count), static_cast<int64_t>(grain),
                              [&body](int64_t begin, int64_t end) {
                                if (begin < end)
                                  body(static_cast<size_t>(begin), static_cast<size_t>(end));
                              });
}

}  // namespace
}  // namespace plait
