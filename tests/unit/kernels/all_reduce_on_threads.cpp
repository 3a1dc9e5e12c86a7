// csrc/all_reduce.cuh on a CPU: a thread for each of the kernel's, with few to a block; sums are checked bit by bit, and
// ThreadSanitizer looks for races. Staging is accessed plainly, so that only signals and barriers order what is done to it.
//
// all_reduce_on_threads DTYPE WORLD SEED CALLS [absent]: prints what is wrong, or "ok". absent: the last rank never comes.

#define P3D_SYSTEM_MEMORY_CUH  // in its place:

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_types.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

using std::min;

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

inline void store_release(unsigned long long* address, unsigned long long value) {
  std::atomic_ref(*address).store(value, std::memory_order_release);
}

inline unsigned long long load_acquire(const unsigned long long* address) {
  std::this_thread::yield();
  return std::atomic_ref(*const_cast<unsigned long long*>(address)).load(std::memory_order_acquire);
}

inline unsigned long long nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

struct Index {
  unsigned x;
};
thread_local Index threadIdx, blockIdx, gridDim;

struct BlockState {
  std::barrier<> barrier{P3D_THREADS};
  std::atomic<int> any{0};
};
thread_local BlockState* block;

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
// The kernel's fence and relaxed addition together.
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

#include "all_reduce.cuh"

namespace {

constexpr int kBlocks = 3, kMost = 700, kGuard = 16, kShift = 8;
constexpr int64_t kHalf = 4096;

struct Plan {
  int64_t size;
  bool two_shot, in_place;
  int blocks;
};

template <typename T>
struct Rank {
  alignas(16) char staging[2 * kHalf] = {};
  unsigned long long pad[kBlocks * kMaxWorld] = {};
  State state = {};
  unsigned int report = 0;
  alignas(16) T input[kMost + kShift + kGuard], output[kMost + kShift + 2 * kGuard];
  std::unique_ptr<std::barrier<>> kernel_ends = std::make_unique<std::barrier<>>(kBlocks * P3D_THREADS);
  BlockState blocks[kBlocks];
};

// What rank `r` sums in a call: numbers whose sums round, in another order to other bits.
float value(int r, int call, int64_t place) {
  std::minstd_rand random(1 + 7919 * r + 104729 * call + 31 * place);
  random.discard(3);
  return float(int(random() % 4096) - 2048) / 63 * (place % 5 == 0 ? 1000 : 1);
}

template <typename T>
bool same(T a, T b) { return std::memcmp(&a, &b, sizeof(T)) == 0; }

template <typename T, int World>
struct Run {
  std::vector<Plan> plans;
  std::vector<std::unique_ptr<Rank<T>>> ranks;
  int present;
  unsigned long long limit;
  std::atomic<int> wrong{0};

  T* input(int r, int n) { return ranks[r]->input + (n + r) % kShift; }
  T* output(int r, int n) { return plans[n].in_place ? input(r, n) : ranks[r]->output + kGuard + (2 * n + r) % kShift; }

  void prepare(int r, int n) {
    std::fill_n(ranks[r]->output, kMost + kShift + 2 * kGuard, narrow<T>(77));
    for (int64_t place = 0; place < plans[n].size; ++place) input(r, n)[place] = narrow<T>(value(r, n, place));
    input(r, n)[plans[n].size] = narrow<T>(77);
  }

  void check(int r, int n) {
    const T* out = output(r, n);
    bool good = same(out[plans[n].size], narrow<T>(77));
    good = good && (plans[n].in_place || same(out[-1], narrow<T>(77)));
    for (int64_t place = 0; place < plans[n].size && good; ++place) {
      float total = widen(narrow<T>(value(0, n, place)));
      for (int other = 1; other < World; ++other) total += widen(narrow<T>(value(other, n, place)));
      good = present < World ? std::isnan(widen(out[place])) : same(out[place], narrow<T>(total));
    }
    if (!good && wrong++ < 5) {
      std::printf("rank %d call %d: %lld elements, two_shot %d, in_place %d, blocks %d\n", r, n, (long long)plans[n].size,
                  plans[n].two_shot, plans[n].in_place, plans[n].blocks);
    }
  }

  void thread(int r, int b, int t, unsigned seed) {
    std::minstd_rand random(seed + 1000 * r);
    threadIdx.x = t, blockIdx.x = b, block = &ranks[r]->blocks[b];
    const bool first = b == 0 && t == 0;
    for (int n = 0; n < int(plans.size()); ++n) {
      if (first) prepare(r, n);
      // Some ranks come later than others.
      const unsigned late = random() % 8;
      if (first && late == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      ranks[r]->kernel_ends->arrive_and_wait();
      gridDim.x = plans[n].blocks;
      if (b < plans[n].blocks) {
        Call call{input(r, n), output(r, n), plans[n].size, {}, {}, &ranks[r]->state, &ranks[r]->report, kHalf, limit, r};
        for (int other = 0; other < World; ++other) {
          call.staging[other] = ranks[other]->staging, call.pads[other] = ranks[other]->pad;
        }
        if (plans[n].two_shot) {
          all_reduce<T, World, true>(call);
        } else {
          all_reduce<T, World, false>(call);
        }
      }
      ranks[r]->kernel_ends->arrive_and_wait();
      if (first) check(r, n);
    }
  }
};

template <typename T, int World>
int run(unsigned seed, int calls, bool absent) {
  Run<T, World> all{.present = absent ? World - 1 : World, .limit = absent ? 2'000'000'000ull : ~0ull};
  std::minstd_rand random(seed);
  for (int n = 0; n < calls; ++n) {
    const int64_t size = random() % 4 ? 1 + random() % kMost : 1 + random() % 20;
    all.plans.push_back({size, random() % 2 == 0, random() % 2 == 0, int(1 + random() % kBlocks)});
  }
  for (int r = 0; r < World; ++r) all.ranks.push_back(std::make_unique<Rank<T>>());
  std::vector<std::thread> threads;
  for (int r = 0; r < all.present; ++r) {
    for (int b = 0; b < kBlocks; ++b) {
      for (int t = 0; t < P3D_THREADS; ++t) threads.emplace_back([&all, r, b, t, seed] { all.thread(r, b, t, seed); });
    }
  }
  for (auto& thread : threads) thread.join();
  for (int r = 0; r < all.present; ++r) {
    const unsigned expected = absent ? World : 0;
    if (all.ranks[r]->report != expected && all.wrong++ < 5) std::printf("rank %d reports %u\n", r, all.ranks[r]->report);
  }
  if (all.wrong == 0) std::printf("ok\n");
  return all.wrong != 0;
}

template <typename T>
int run_world(int world, unsigned seed, int calls, bool absent) {
  if (world == 2) return run<T, 2>(seed, calls, absent);
  if (world == 4) return run<T, 4>(seed, calls, absent);
  return run<T, 8>(seed, calls, absent);
}

}  // namespace

int main(int, char** arguments) {
  const std::string dtype = arguments[1];
  const int world = std::atoi(arguments[2]), seed = std::atoi(arguments[3]), calls = std::atoi(arguments[4]);
  const bool absent = arguments[5] != nullptr;
  if (dtype == "fp32") return run_world<float>(world, seed, calls, absent);
  if (dtype == "fp16") return run_world<__half>(world, seed, calls, absent);
  return run_world<__nv_bfloat16>(world, seed, calls, absent);
}
