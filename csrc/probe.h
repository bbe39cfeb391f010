// What this machine can do at most: reading memory, arithmetic in registers, and how long two
// threads wait for each other. Every kernel's rate is judged against these. No torch in here.

#pragma once

#include <cstddef>
#include <cstdint>

namespace plait {

// Xor of `num_words` words: reads all of them, as fast as loads alone go.
using ProbeReadKernel = uint64_t (*)(const uint64_t* words, size_t num_words);

uint64_t probe_read_plain(const uint64_t* words, size_t num_words);
uint64_t probe_read_avx2(const uint64_t* words, size_t num_words);
uint64_t probe_read_avx512(const uint64_t* words, size_t num_words);

enum class ProbeDot {
  kFloat32,   // fused multiply-adds
  kBfloat16,  // pairs, as the kernels of this instruction set multiply them
  kInt8,      // unsigned by signed bytes, summed in 32 bits
};

// Multiplies one by one and adds, in enough independent sums, `rounds` times. Returns the sum of
// all: the number of multiply-adds that were done, exact while rounds <= 2^22.
using ProbeDotKernel = int64_t (*)(ProbeDot kind, size_t rounds);

int64_t probe_dot_plain(ProbeDot kind, size_t rounds);
int64_t probe_dot_avx2(ProbeDot kind, size_t rounds);
int64_t probe_dot_avx512(ProbeDot kind, size_t rounds);
// Where the processor has these dot products.
int64_t probe_dot_avx512_bf16(size_t rounds);
int64_t probe_dot_avx512_vnni(size_t rounds);

// Nanoseconds that rounds of a barrier of two spinning threads took: the caller's, and one on the
// core `partner` (-1: on any). Stops after `seconds`, or when `samples` is full; returns how many
// were taken.
size_t probe_barrier(int64_t* samples, size_t size, double seconds, int partner);

}  // namespace plait
