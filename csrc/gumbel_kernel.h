// The algorithm of gumbel.h, compiled once for each instruction set: plain loops over blocks, which
// the compiler turns into vectors.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "gumbel.h"

// Made once, in gumbel.cpp: what is compiled for one instruction set must not serve another's code.
extern template class std::vector<float>;

namespace plait {
namespace {

constexpr size_t kBlock = 256;
constexpr size_t kLanes = 16;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr double kLog2 = 0.693147180559945309417;
// The bound uses the 31 highest bits of u as a whole number.
constexpr int kBoundBits = 31;
// Far above what the bound's fp32 arithmetic can lose where a token can still win (about 2e-4).
constexpr double kSlack = 0.01;

inline uint64_t noise_bits(uint64_t key, size_t token) {
  uint64_t word = key + (static_cast<uint64_t>(token) + 1) * kGolden;
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
  return word ^ (word >> 31);
}

// Off by less than 1e-4 for whole numbers up to 2^31; -127 for 0.
inline float rough_log2(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const float exponent = static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
  const float m = std::bit_cast<float>((bits & 0x007fffffu) | 0x3f800000u);
  float p = 0.0439286278f;
  p = p * m - 0.4094755859f;
  p = p * m + 1.6101775469f;
  p = p * m - 3.5202188381f;
  p = p * m + 5.0697567563f;
  p = p * m - 2.7941536765f;
  return exponent + p;
}

// Bounds of a block's scores, short of the constant kBoundBits log 2; returns the largest.
inline float bound_block(const GumbelArgs& args, size_t begin, float inverse, float* bounds) {
  int32_t high[kBlock];
  float scaled[kBlock];
  for (size_t i = 0; i < kBlock; ++i) {
    high[i] = static_cast<int32_t>(noise_bits(args.key, begin + i) >> (64 - kBoundBits));
  }
  std::memcpy(scaled, args.logits + begin, sizeof(scaled));
  float largest[kLanes];
  std::fill_n(largest, kLanes, -INFINITY);
  for (size_t i = 0; i < kBlock; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float noise = rough_log2(static_cast<float>(high[i + lane]));
      const float bound =
          (scaled[i + lane] - args.top) * inverse - static_cast<float>(kLog2) * noise;
      bounds[i + lane] = bound;
      largest[lane] = bound > largest[lane] ? bound : largest[lane];
    }
  }
  return *std::max_element(largest, largest + kLanes);
}

inline double exact_score(const GumbelArgs& args, size_t token) {
  const double u = (static_cast<double>(noise_bits(args.key, token) >> 11) + 0.5) * 0x1p-53;
  const double scaled = (static_cast<double>(args.logits[token]) - args.top) / args.temperature;
  return scaled - std::log(-std::log1p(-u));
}

void gumbel_candidates(const GumbelArgs& args, std::vector<int64_t>& found) {
  thread_local std::vector<float> bounds;
  thread_local std::vector<float> block_bounds;
  const size_t num_blocks = args.size / kBlock;
  bounds.resize(args.size);
  block_bounds.resize(num_blocks + 1);
  const float inverse = static_cast<float>(1.0 / args.temperature);
  for (size_t block = 0; block < num_blocks; ++block) {
    block_bounds[block] = bound_block(args, block * kBlock, inverse, &bounds[block * kBlock]);
  }
  block_bounds[num_blocks] = -INFINITY;
  if (const size_t begin = num_blocks * kBlock; begin < args.size) {
    // The rest, padded to a block with tokens that cannot win.
    float logits[kBlock];
    float rest[kBlock];
    std::fill_n(logits, kBlock, -INFINITY);
    std::copy(args.logits + begin, args.logits + args.size, logits);
    GumbelArgs padded = args;
    padded.logits = logits;
    padded.key = args.key + static_cast<uint64_t>(begin) * kGolden;
    block_bounds[num_blocks] = bound_block(padded, 0, inverse, rest);
    std::copy(rest, rest + (args.size - begin), &bounds[begin]);
  }
  const auto best_block = static_cast<size_t>(
      std::max_element(block_bounds.begin(), block_bounds.end()) - block_bounds.begin());
  const auto begin = bounds.begin() + static_cast<ptrdiff_t>(best_block * kBlock);
  const auto end =
      bounds.begin() + static_cast<ptrdiff_t>(std::min((best_block + 1) * kBlock, args.size));
  const auto best = static_cast<size_t>(std::max_element(begin, end) - bounds.begin());
  const auto least = static_cast<float>(exact_score(args, best) - kBoundBits * kLog2 - kSlack);
  for (size_t block = 0; block <= num_blocks; ++block) {
    if (block_bounds[block] < least) continue;
    for (size_t i = block * kBlock; i < std::min((block + 1) * kBlock, args.size); ++i) {
      if (bounds[i] >= least) found.push_back(static_cast<int64_t>(i));
    }
  }
}

}  // namespace
}  // namespace plait
