// Threads that stay between steps: they spin for a short time after work, then sleep. No torch.
//
// A job is cut into chunks that threads claim one by one, the caller among them. So the caller
// never waits for a thread that has not claimed anything: one that the system runs late, or not at
// all (after a fork, say), costs nothing but its help.

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace plait {

class ThreadPool {
 public:
  // `num_threads` counts the caller's. Where `cores` are given, each thread is bound to its own,
  // the caller's to the first as soon as it calls `wake`. Throws std::runtime_error where that
  // fails.
  ThreadPool(size_t num_threads, std::vector<int> cores, std::chrono::microseconds spin);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t size() const { return workers_.size() + 1; }

  // Work is near: sleeping threads begin to spin.
  void wake();

  // Calls body(begin, end) over parts of 0 … count; on the calling thread where there is one part.
  // `grain` is what is worth waking a thread for, about 20 µs; ours are awake, so that parts may be
  // a quarter of it. While another call is under way, perhaps the one that this comes from, all
  // runs on the calling thread. What a body throws is thrown again when all have ended.
  void parallel_for(size_t count, size_t grain, const std::function<void(size_t, size_t)>& body);

  // Calls body(i) for every i in 0 … count, on as many threads as there are.
  void run_workers(int64_t count, const std::function<void(int64_t)>& body);

 private:
  using Chunk = void (*)(const void* context, size_t index);

  bool try_run(Chunk chunk, const void* context, size_t count);
  void run(Chunk chunk, const void* context, size_t count);
  bool claim_and_run();
  void finish_one();
  void work();
  bool has_work() const;
  void sleep();

  std::vector<std::thread> workers_;
  std::vector<int> cores_;
  std::chrono::microseconds spin_;
  int64_t process_;

  // The job: written while every chunk of the one before it is claimed, so that whoever claims a
  // chunk has read the job it belongs to. The ticket: 32 bits of the job's number, 16 of its
  // chunks, 16 of the next to claim.
  std::atomic<Chunk> chunk_{nullptr};
  std::atomic<const void*> context_{nullptr};
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> signal_{0};  // changes to wake sleepers
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> running_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
};

// The pool that ops called on this thread run by, or null. A thread that runs a program shares the
// program's for as long as that lives.
std::shared_ptr<ThreadPool> pool_of_this_thread();
void share_with_this_thread(const std::shared_ptr<ThreadPool>& pool);

}  // namespace plait
