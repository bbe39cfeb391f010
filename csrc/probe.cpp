#include "probe.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

#include "probe_kernel.h"

namespace plait {
namespace {

struct Plain {
  typedef uint64_t W __attribute__((vector_size(16)));
  static W load(const uint64_t* p) {
    W v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
};

struct PlainDot {
  typedef float S __attribute__((vector_size(16)));
  using A = S;
  static A one() { return A{1, 1, 1, 1}; }
  static void hide(A& a) { asm volatile("" : "+m"(a)); }
  static void add(S& sum, A a, A b) { sum += a * b; }
  static int64_t total(S sum) { return sum_of_lanes<float, 4>(sum); }
};

// Where the system cannot do that, or the core is not ours, the thread runs anywhere.
void stay_on([[maybe_unused]] int core) {
#ifdef __linux__
  if (core < 0 || core >= CPU_SETSIZE) return;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores);
#endif
}

// Two threads meet: each counts up, and waits until the other has too. Past the end of time nobody
// waits, so that a thread that gets no core cannot hold up the other for long.
class Meeting {
 public:
  // False when it is over.
  bool meet(std::atomic<int64_t>& own, const std::atomic<int64_t>& other) {
    const int64_t round = own.load(std::memory_order_relaxed) + 1;
    own.store(round, std::memory_order_release);
    for (int spins = 0; other.load(std::memory_order_acquire) < round; ++spins) {
      if (over.load(std::memory_order_relaxed)) return false;
      if ((spins & 0xfff) == 0xfff) std::this_thread::yield();
    }
    return true;
  }

  // On cache lines of their own.
  alignas(64) std::atomic<int64_t> first{0};
  alignas(64) std::atomic<int64_t> second{0};
  alignas(64) std::atomic<bool> over{false};
};

}  // namespace

uint64_t probe_read_plain(const uint64_t* words, size_t num_words) {
  return read_words<Plain>(words, num_words);
}

// Without wide registers the kernels compute all types in fp32.
int64_t probe_dot_plain(ProbeDot, size_t rounds) { return sum_of_products<PlainDot, 8>(rounds); }

size_t probe_barrier(int64_t* samples, size_t size, double seconds, int core) {
  using Clock = std::chrono::steady_clock;
  Meeting meeting;
  std::thread partner([&] {
    stay_on(core);
    while (meeting.meet(meeting.second, meeting.first)) {
    }
  });
  size_t taken = 0;
  meeting.meet(meeting.first, meeting.second);  // the partner has started
  const auto start = Clock::now();
  auto last = start;
  while (taken < size && std::chrono::duration<double>(last - start).count() < seconds) {
    meeting.meet(meeting.first, meeting.second);
    const auto now = Clock::now();
    samples[taken++] = std::chrono::duration_cast<std::chrono::nanoseconds>(now - last).count();
    last = now;
  }
  meeting.over.store(true);
  partner.join();
  return taken;
}

}  // namespace plait
