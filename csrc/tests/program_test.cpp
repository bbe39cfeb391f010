// Runs the thread pool and small programs on buffers of exact size, for sanitizers: built by
// tests/model/native/test_runner_memory.py without torch. Programs whose integers were tampered
// with must be refused, or run within their memory.

#include <atomic>
#include <bit>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <vector>

#include "program_decode.h"
#include "program_runner.h"
#include "thread_pool.h"

namespace {

using plait::ThreadPool;
using plait::ValueType;

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  ++failures;
}

// --- the pool ------------------------------------------------------------------------------------

void test_every_part_is_run_once(size_t num_threads, std::chrono::microseconds spin) {
  ThreadPool pool(num_threads, {}, spin);
  for (size_t count = 0; count < 200; ++count) {
    std::vector<std::atomic<int>> times(count);
    pool.parallel_for(count, count % 7, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) ++times[i];
    });
    bool right = true;
    for (const auto& time : times) right = right && time == 1;
    expect(right, "parallel_for missed a part, or ran it twice");
    if (count % 50 == 0) std::this_thread::sleep_for(2 * spin);  // so that threads fall asleep
  }
  std::atomic<int64_t> sum{0};
  pool.run_workers(5, [&](int64_t i) { sum += i; });
  expect(sum == 10, "run_workers missed a worker");
}

void test_a_failure_reaches_the_caller() {
  ThreadPool pool(3, {}, std::chrono::microseconds(10));
  for (int round = 0; round < 50; ++round) {
    bool caught = false;
    try {
      pool.parallel_for(30, 1, [&](size_t begin, size_t) {
        if (begin > 10) throw std::runtime_error("no");
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    expect(caught, "a failure was lost");
  }
}

// --- programs ------------------------------------------------------------------------------------

constexpr int64_t kWidth = 12;
constexpr int64_t kHead = 4;
constexpr int64_t kBlock = 2;

int64_t bits(double value) { return std::bit_cast<int64_t>(value); }

// A layer with one query head and one KV head, over exact buffers.
struct Example {
  std::vector<float> tiles = std::vector<float>(kWidth * 16, 0.25f);
  std::vector<float> weight = std::vector<float>(kWidth, 1.0f);
  std::vector<float> head_weight = std::vector<float>(kHead, 1.0f);
  std::vector<float> table = std::vector<float>(8 * kHead, 0.5f);
  std::vector<int64_t> code;
  plait::EncodedProgram encoded{};

  Example() {
    const std::vector<int64_t> query{1, 0, 1, kHead, kHead}, key{1, 4, 1, kHead, kHead},
        value{1, 8, 1, kHead, kHead};
    add(1, {0, 2, 1, bits(1e-5), bits(0.0), 1});                 // rms norm
    add(0, {2, 1, 0, kWidth, kWidth, 1, -1});                    // linear
    add(3, {1, 0, 3, kHead, kHead, 2, bits(1e-5), bits(0), 0});  // head norm
    add(4, {1, 0, 2, kHead, kHead, 3, 3, -1, 0, 1});             // rope
    std::vector<int64_t> attention;
    for (const auto* heads : {&query, &key, &value}) {
      attention.insert(attention.end(), heads->begin(), heads->end());
    }
    for (const int64_t field :
         {int64_t{3}, int64_t{0}, int64_t{0}, bits(0.5), int64_t{3}, bits(0), int64_t{-1}}) {
      attention.push_back(field);
    }
    add(5, attention);
    add(6, {2, 4, 0});                  // gated activation
    add(7, {4, 4, 1});                  // activation
    add(8, {0, 2, bits(0.5)});          // add
    add(9, {0, bits(2.0)});             // scale
    add(11, {0, 1});                    // tap
    add(12, {0, 1});                    // add embeds
    add(2, {0, 2, 1, -1, bits(1e-5)});  // layer norm
    encoded.type = plait::Element::kFloat32;
    encoded.widths = {kWidth, kWidth, kWidth, kHead, kWidth / 2};
    encoded.output = 2;
    encoded.tensors = {{tiles.data(), ValueType::kFloat32, {1, kWidth, 16}},
                       {weight.data(), ValueType::kFloat32, {kWidth}},
                       {head_weight.data(), ValueType::kFloat32, {kHead}},
                       {table.data(), ValueType::kFloat32, {8, kHead}}};
  }
  void add(int64_t kind, const std::vector<int64_t>& fields) {
    code.insert(code.end(), {kind, kind, static_cast<int64_t>(fields.size())});
    code.insert(code.end(), fields.begin(), fields.end());
  }
  plait::Program decode() {
    encoded.code = code.data();
    encoded.code_size = code.size();
    return plait::decode_program(encoded);
  }
};

// Three rows of two sequences.
struct ExampleStep {
  std::vector<float> rows = std::vector<float>(3 * kWidth, 1.0f);
  std::vector<float> output = std::vector<float>(3 * kWidth);
  std::vector<float> tapped = std::vector<float>(3 * kWidth);
  std::vector<float> embeds = std::vector<float>(2 * 2 * kWidth, 1.0f);
  std::vector<float> pages = std::vector<float>(4 * 2 * kBlock * kHead, 0.0f);
  std::vector<int64_t> positions{1, 2, 0};
  std::vector<int64_t> image_rows{0, 2};
  std::vector<int64_t> slots{3, 4, 6};
  std::vector<int32_t> table{1, 2, 3, 0};
  std::vector<int32_t> query_start{0, 2, 3};
  std::vector<int32_t> seq_lens{3, 1};
  std::vector<int32_t> ranges{0, 1, 3};

  plait::Step step() {
    plait::Step s;
    s.rows = 3;
    s.input = rows.data();
    s.output = output.data();
    s.positions = positions.data();
    s.query_start = query_start.data();
    s.seq_lens = seq_lens.data();
    s.num_spans = 2;
    s.groups = {{reinterpret_cast<char*>(pages.data()), 4, 1, 1, kBlock, kHead, slots.data(),
                 table.data(), 2, 2}};
    s.ranges = ranges.data();
    s.num_ranges = 1;
    s.embeds = reinterpret_cast<const char*>(embeds.data());
    s.embeds_stride = 2 * kWidth;
    s.num_levels = 2;
    s.image_rows = image_rows.data();
    s.num_image_rows = 2;
    s.taps = {1};
    s.tapped = tapped.data();
    return s;
  }
};

void run(plait::Program program, plait::CpuIsa isa, size_t num_threads, ExampleStep& example) {
  const size_t end = program.code.size();
  plait::ProgramRunner runner(std::move(program), isa, num_threads, {},
                              std::chrono::microseconds(5));
  for (int round = 0; round < 3; ++round) {
    runner.begin(example.step());
    runner.run(0, end);
  }
}

void test_programs_run_on_every_instruction_set() {
  for (const auto isa : {plait::CpuIsa::kPlain, plait::CpuIsa::kAvx2, plait::CpuIsa::kAvx512,
                         plait::CpuIsa::kAvx512Bf16}) {
    if (isa > plait::best_cpu_isa()) continue;
    Example example;
    ExampleStep one, two;
    run(example.decode(), isa, 1, one);
    run(example.decode(), isa, 2, two);
    expect(one.output == two.output && one.tapped == two.tapped, "threads change the rows");
    bool is_finite = true;
    for (const float value : one.output) is_finite = is_finite && value - value == 0.0f;
    expect(is_finite, "rows are not finite");
  }
}

void test_programs_that_were_tampered_with() {
  std::mt19937_64 random(1);
  int refused = 0;
  constexpr int kRounds = 3000;
  for (int round = 0; round < kRounds; ++round) {
    Example example;
    const int64_t values[] = {-1, 0, 1, 2, 3, 5, 12, 1 << 20, INT64_MAX, INT64_MIN};
    example.code[random() % example.code.size()] = values[random() % std::size(values)];
    if (random() % 8 == 0) example.code.resize(random() % example.code.size());
    try {
      ExampleStep step;
      run(example.decode(), plait::CpuIsa::kPlain, 1, step);
    } catch (const std::runtime_error&) {
      ++refused;
    }
  }
  expect(refused > kRounds / 4, "few programs were refused");
}

void test_steps_that_were_tampered_with() {
  std::mt19937_64 random(2);
  int refused = 0;
  constexpr int kRounds = 2000;
  Example example;
  plait::Program program = example.decode();
  const size_t end = program.code.size();
  plait::ProgramRunner runner(std::move(program), plait::CpuIsa::kPlain, 1, {},
                              std::chrono::microseconds(0));
  for (int round = 0; round < kRounds; ++round) {
    ExampleStep step;
    const int32_t values[] = {-1, 0, 1, 2, 3, 4, 7, 8, 1 << 20, INT32_MAX, INT32_MIN};
    const int32_t value = values[random() % std::size(values)];
    const size_t place = random();
    const auto put = [&](auto& list) { list[place % list.size()] = value; };
    switch (random() % 7) {
      case 0:
        put(step.positions);
        break;
      case 1:
        put(step.image_rows);
        break;
      case 2:
        put(step.slots);
        break;
      case 3:
        put(step.table);
        break;
      case 4:
        put(step.query_start);
        break;
      case 5:
        put(step.seq_lens);
        break;
      default:
        put(step.ranges);
        break;
    }
    try {
      runner.begin(step.step());
      runner.run(0, end);
    } catch (const std::runtime_error&) {
      ++refused;
    }
  }
  expect(refused > kRounds / 4, "few steps were refused");
}

}  // namespace

int main() {
  for (const size_t num_threads : {1, 2, 4}) {
    test_every_part_is_run_once(num_threads, std::chrono::microseconds(0));
    test_every_part_is_run_once(num_threads, std::chrono::microseconds(100));
  }
  test_a_failure_reaches_the_caller();
  test_programs_run_on_every_instruction_set();
  test_programs_that_were_tampered_with();
  test_steps_that_were_tampered_with();
  return failures == 0 ? 0 : 1;
}
