// The threads that ops run by: those of the program that this thread runs, else torch's. Only for
// bindings.

#pragma once

#include <torch/csrc/stable/ops.h>

#include "linear.h"
#include "paged_attention.h"
#include "thread_pool.h"

namespace plait {
namespace {

// linear.h's ParallelFor.
inline void op_parallel_for(size_t count, size_t grain, const Body& body) {
  if (count <= grain) {
    body(0, count);
  } else if (const auto pool = pool_of_this_thread()) {
    pool->parallel_for(count, grain, body);
  } else {
    torch::stable::parallel_for(0, static_cast<int64_t>(count), static_cast<int64_t>(grain),
                                [&body](int64_t begin, int64_t end) {
                                  if (begin < end)
                                    body(static_cast<size_t>(begin), static_cast<size_t>(end));
                                });
  }
}

// paged_attention.h's RunWorkers.
inline void op_run_workers(int64_t count, const std::function<void(int64_t)>& body) {
  if (const auto pool = pool_of_this_thread()) {
    pool->run_workers(count, body);
  } else {
    torch::stable::parallel_for(0, count, 1, [&body](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }
}

inline int64_t op_num_threads() {
  const auto pool = pool_of_this_thread();
  return pool ? static_cast<int64_t>(pool->size())
              : static_cast<int64_t>(torch::stable::get_num_threads());
}

}  // namespace
}  // namespace plait
