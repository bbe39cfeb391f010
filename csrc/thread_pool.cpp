#include "thread_pool.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "checks.h"

#ifdef __linux__
#include <sched.h>
#endif

namespace plait {
namespace {

using Clock = std::chrono::steady_clock;

// Several chunks for each thread, so that one on a slow core takes fewer; the ticket has 16 bits.
constexpr size_t kChunksPerThread = 4;
constexpr size_t kChunksPerGrain = 4;
constexpr size_t kMaxThreads = 1024;
constexpr int kPausesPerLook = 32;  // between looks at the clock

constexpr size_t kMaxChunks = 0xffff;
constexpr uint64_t job_of(uint64_t ticket) { return ticket >> 32; }
constexpr size_t chunks_of(uint64_t ticket) { return static_cast<size_t>(ticket >> 16 & 0xffff); }
constexpr size_t next_of(uint64_t ticket) { return static_cast<size_t>(ticket & 0xffff); }

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// False where the system refuses.
bool bind_to_core([[maybe_unused]] pthread_t thread, [[maybe_unused]] int core) {
#ifdef __linux__
  if (core < 0 || core >= CPU_SETSIZE) return false;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(core), &set);
  return pthread_setaffinity_np(thread, sizeof(set), &set) == 0;
#else
  return true;
#endif
}

// Tried out, for the thread that asks may be bound to another core already.
bool may_use(int core) {
#ifdef __linux__
  cpu_set_t before;
  if (pthread_getaffinity_np(pthread_self(), sizeof(before), &before) != 0) return true;
  const bool may = bind_to_core(pthread_self(), core);
  pthread_setaffinity_np(pthread_self(), sizeof(before), &before);
  return may;
#else
  return core >= 0;
#endif
}

}  // namespace

ThreadPool::ThreadPool(size_t num_threads, std::vector<int> cores, std::chrono::microseconds spin)
    : cores_(std::move(cores)), spin_(spin), process_(getpid()) {
  check(num_threads >= 1 && num_threads <= kMaxThreads, "thread_pool", num_threads,
        " threads: there must be 1 to ", kMaxThreads);
  check(cores_.empty() || cores_.size() == num_threads, "thread_pool", cores_.size(),
        " cores are named for ", num_threads, " threads");
  for (const int core : cores_) {
    check(may_use(core), "thread_pool", "core ", core, " is not one that this process may use");
  }
  try {
    for (size_t i = 1; i < num_threads; ++i) {
      workers_.emplace_back([this] { work(); });
      if (!cores_.empty()) bind_to_core(workers_.back().native_handle(), cores_[i]);
    }
  } catch (...) {
    stop_ = true;
    ++signal_;
    signal_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() != process_) {  // a fork's child has the objects but not the threads
    new std::vector<std::thread>(std::move(workers_));
    return;
  }
  stop_ = true;
  ++signal_;
  signal_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::wake() {
  if (!cores_.empty()) {
    thread_local int bound = -1;
    if (bound != cores_[0]) bind_to_core(pthread_self(), cores_[0]);
    bound = cores_[0];
  }
  if (sleepers_.load() > 0) {
    ++signal_;
    signal_.notify_all();
  }
}

void ThreadPool::parallel_for(size_t count, size_t grain,
                              const std::function<void(size_t, size_t)>& body) {
  const size_t most = std::min(kMaxChunks, size() * kChunksPerThread);
  const size_t least = (grain + kChunksPerGrain - 1) / kChunksPerGrain;
  const size_t length = std::max({least, size_t{1}, (count + most - 1) / most});
  struct Context {
    const std::function<void(size_t, size_t)>* body;
    size_t count;
    size_t length;
  } const context{&body, count, length};
  const Chunk chunk = [](const void* given, size_t index) {
    const auto& c = *static_cast<const Context*>(given);
    (*c.body)(index* c.length, std::min(c.count, (index + 1) * c.length));
  };
  if (count <= length || !try_run(chunk, &context, (count + length - 1) / length)) body(0, count);
}

void ThreadPool::run_workers(int64_t count, const std::function<void(int64_t)>& body) {
  const Chunk chunk = [](const void* given, size_t index) {
    (*static_cast<const std::function<void(int64_t)>*>(given))(static_cast<int64_t>(index));
  };
  const bool fits = count > 1 && count <= static_cast<int64_t>(kMaxChunks);
  if (fits && try_run(chunk, &body, static_cast<size_t>(count))) return;
  for (int64_t i = 0; i < count; ++i) body(i);
}

// False where there is nobody to help, or they are at another job.
bool ThreadPool::try_run(Chunk chunk, const void* context, size_t count) {
  if (workers_.empty() || running_.exchange(true, std::memory_order_acquire)) return false;
  struct Running {
    std::atomic<bool>& flag;
    ~Running() { flag.store(false, std::memory_order_release); }
  } const running{running_};
  run(chunk, context, count);
  return true;
}

void ThreadPool::run(Chunk chunk, const void* context, size_t count) {
  chunk_.store(chunk, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  unfinished_.store(static_cast<uint32_t>(count), std::memory_order_relaxed);
  ticket_.store((job_of(ticket_.load()) + 1) << 32 | static_cast<uint64_t>(count) << 16);
  if (sleepers_.load() > 0) {
    ++signal_;
    signal_.notify_all();
  }
  while (claim_and_run()) {
  }
  const Clock::time_point patience = Clock::now() + spin_;
  for (int pauses = 0;; ++pauses) {
    const uint32_t left = unfinished_.load(std::memory_order_acquire);
    if (left == 0) break;
    if (pauses < kPausesPerLook || Clock::now() < patience) {
      pause();
    } else {
      unfinished_.wait(left, std::memory_order_acquire);
    }
  }
  if (failed_.load(std::memory_order_acquire)) {
    const std::exception_ptr failure = std::exchange(failure_, nullptr);
    failed_ = false;
    std::rethrow_exception(failure);
  }
}

bool ThreadPool::has_work() const {
  const uint64_t ticket = ticket_.load();
  return next_of(ticket) < chunks_of(ticket);
}

bool ThreadPool::claim_and_run() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (next_of(ticket) < chunks_of(ticket)) {
    const Chunk chunk = chunk_.load(std::memory_order_relaxed);
    const void* context = context_.load(std::memory_order_relaxed);
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
      continue;
    }
    try {
      chunk(context, next_of(ticket));
    } catch (...) {
      if (!failed_.exchange(true)) failure_ = std::current_exception();
    }
    finish_one();
    return true;
  }
  return false;
}

void ThreadPool::finish_one() {
  if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_one();
}

void ThreadPool::work() {
  Clock::time_point idle_since = Clock::now();
  int pauses = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (claim_and_run()) {
      while (claim_and_run()) {
      }
      idle_since = Clock::now();
    }
    pause();
    if (++pauses % kPausesPerLook != 0) continue;
    if (Clock::now() - idle_since >= spin_) {
      sleep();
      idle_since = Clock::now();
    }
  }
}

// Whoever brings work stores it and then looks for sleepers; whoever sleeps says so and then looks
// for work. So one of the two sees the other.
void ThreadPool::sleep() {
  ++sleepers_;
  const uint32_t seen = signal_.load();
  if (!has_work() && !stop_.load()) signal_.wait(seen);
  --sleepers_;
}

namespace {
thread_local std::weak_ptr<ThreadPool> shared_pool;
}

std::shared_ptr<ThreadPool> pool_of_this_thread() { return shared_pool.lock(); }

void share_with_this_thread(const std::shared_ptr<ThreadPool>& pool) { shared_pool = pool; }

}  // namespace plait
