// What csrc/'s kernels take from CUDA, on a CPU: a thread for each of a kernel's. Memory that ranks share is accessed plainly
// but for signals, so that only these and barriers order what is done to it, as ThreadSanitizer sees it.
#pragma once

#define P3D_SYSTEM_MEMORY_CUH  // in whose place, and
#define P3D_BLOCK_SUM_CUH      // in whose:

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>

using std::min;

constexpr unsigned long long kLimit = 1'000'000'000;  // for which a peer is waited for, where some never come

inline uint4 load_vector(const void* address) {
  uint4 value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

inline void store_vector(void* address, const uint4& value) { std::memcpy(address, &value, sizeof value); }

inline unsigned int load_relaxed(const unsigned int* address) {
  return std::atomic_ref(*const_cast<unsigned int*>(address)).load(std::memory_order_relaxed);
}

inline void store_relaxed(unsigned int* address, unsigned int value) { std::atomic_ref(*address).store(value); }

// What must happen before the clock runs: in a test of ranks that never come, the first signals of all threads that do come, and
// the ends of those that wait for none of them. So nobody else is late, however busy the machine is.
inline std::atomic<int> awaited{0};
thread_local bool has_signalled = false;

inline void store_release(unsigned long long* address, unsigned long long value) {
  std::atomic_ref(*address).store(value, std::memory_order_release);
  // Elsewhere nothing is counted: it would order threads that ThreadSanitizer is to find without order.
  if (awaited.load(std::memory_order_relaxed) > 0 && !std::exchange(has_signalled, true)) {
    awaited.fetch_sub(1, std::memory_order_release);
  }
}

inline unsigned long long load_acquire(const unsigned long long* address) {
  std::this_thread::yield();
  return std::atomic_ref(*const_cast<unsigned long long*>(address)).load(std::memory_order_acquire);
}

// Asked after many polls in vain: a thread that waits for long leaves the cores to others.
inline unsigned long long nanoseconds() {
  thread_local unsigned long long time = 1;
  std::this_thread::sleep_for(std::chrono::microseconds(200));
  if (awaited.load(std::memory_order_acquire) <= 0) time += kLimit;
  return time;
}

struct Index {
  unsigned x;
};
thread_local Index threadIdx, blockIdx, gridDim;

struct Block {
  std::barrier<> barrier{P3D_THREADS};
  std::atomic<int> any{0};
  double values[P3D_THREADS];
};
thread_local Block* block;

inline void __syncthreads() { block->barrier.arrive_and_wait(); }

inline int __syncthreads_or(int predicate) {
  block->any.fetch_or(predicate);
  __syncthreads();
  const int result = block->any.load();
  __syncthreads();
  block->any.store(0);
  __syncthreads();
  return result;
}

// For thread 0, once in a kernel.
inline double block_sum(double value) {
  block->values[threadIdx.x] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int thread = 1; thread < P3D_THREADS; ++thread) value += block->values[thread];
  }
  return value;
}

inline float team_sum(float value, int team) {
  block->values[threadIdx.x] = value;
  __syncthreads();
  const int first = threadIdx.x / team * team;
  float total = 0;
  for (int thread = first; thread < first + team; ++thread) total += float(block->values[thread]);
  __syncthreads();
  return total;
}

// The kernels' fence and relaxed addition together.
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* address, unsigned value) { return std::atomic_ref(*address).fetch_add(value); }
inline unsigned atomicCAS(unsigned* address, unsigned expected, unsigned value) {
  std::atomic_ref(*address).compare_exchange_strong(expected, value);
  return expected;
}

#undef __grid_constant__
#define __grid_constant__
#undef __launch_bounds__
#define __launch_bounds__(...)
