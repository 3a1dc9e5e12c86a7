// The ranks of a host as threads of one process, which make the same calls of a kernel, one after the other.
//
// A program takes DTYPE WORLD SEED CALLS [FAULT], and prints what is wrong, or "ok". FAULT: "absent", where the last rank never
// comes, "partly absent", where of its blocks only the first comes, "broken N", where the kernel is a copy with some rules that may
// be broken (the N-th is), or what else the program knows.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda_on_threads.h"
#include "packs.cuh"
#include "peers.cuh"

// What programs are made for; one kind alone is compiled in less time.
#ifndef P3D_DTYPES
#define P3D_DTYPES float, __half, __nv_bfloat16
#endif
#ifndef P3D_WORLDS
#define P3D_WORLDS 1, 2, 4, 8
#endif

namespace {

int broken = 0;  // which rule of the kernel's

constexpr int kBlocks = 3, kGuard = 16, kShift = 8;
constexpr int64_t kHalf = 16 * 203;  // of which no world gets an equal number of vectors

struct Options {
  std::string dtype;
  int world;
  unsigned seed;
  int calls;
  std::string fault;

  bool absent() const { return fault == "absent" || fault == "partly absent"; }
  // Blocks of the last rank that come.
  int last_blocks() const { return fault == "absent" ? 0 : fault == "partly absent" ? 1 : kBlocks; }
};

template <typename T>
bool same(T a, T b) { return std::memcmp(&a, &b, sizeof(T)) == 0; }

// A tensor that begins anywhere in a vector, and elements around it, which nobody may touch.
template <typename T, int Most>
class Tensor {
 public:
  T* data = nullptr;
  int64_t size = 0;

  void place(int64_t elements, int shift) {
    std::fill_n(memory, kAll, narrow<T>(kUntouched));
    data = memory + kGuard + shift % kShift, size = elements;
  }

  bool is_intact_around() const {
    const auto differs = [](T x) { return !same(x, narrow<T>(kUntouched)); };
    return std::none_of<const T*>(memory, data, differs) && std::none_of<const T*>(data + size, memory + kAll, differs);
  }

  static constexpr float kUntouched = 77;

 private:
  static constexpr int kAll = kGuard + kShift + Most + kGuard;
  alignas(16) T memory[kAll];
};

// A number of a tensor that some rank has in some call: of sizes so unlike that sums in another order have other bits.
float value(int tensor, int call, int64_t place) {
  std::minstd_rand random(1 + 7919 * tensor + 104729 * call + 31 * place);
  random.discard(3);
  const int number = int(random() % 4096) - 2048;
  return std::ldexp(number / 63.0f, int(random() % 24) - 14);
}

// What a kernel takes of a rank's memory.
struct Rank {
  alignas(16) char staging[2 * kHalf] = {};
  unsigned long long pad[kBlocks * kMaxWorld] = {};
  State state = {};
  unsigned int report = 0;
  std::barrier<> kernel_ends{kBlocks * kThreads};
  Block blocks[kBlocks];
};

template <int World>
class Host {
 public:
  explicit Host(const Options& options) : options(options) {
    for (auto& rank : ranks) rank = std::make_unique<Rank>();
  }

  Peers peers(int r) {
    const unsigned long long limit = options.absent() ? kLimit : ~0ull;
    Peers all{{}, {}, &ranks[r]->state, &ranks[r]->report, kHalf, limit, r};
    for (int other = 0; other < World; ++other) {
      all.staging[other] = ranks[other]->staging, all.pads[other] = ranks[other]->pad;
    }
    return all;
  }

  bool comes(int r, int b) const { return r < World - 1 || b < options.last_blocks(); }
  // Whether no block of this index waits in vain.
  bool all_come(int b) const { return comes(World - 1, b); }

  template <typename... Values>
  void expect(bool good, const char* format, Values... values) {
    if (!good && wrong++ < 5) std::printf(format, values...);
  }

  const Options options;
  std::unique_ptr<Rank> ranks[World];
  std::atomic<int> wrong{0};
};

// A thread of a rank's: every call is made on one stream.
template <typename Test>
void play_thread(Test& test, int r, int b, int t) {
  Rank& rank = *test.ranks[r];
  std::minstd_rand random(test.options.seed + 1000 * r);
  threadIdx.x = t, blockIdx.x = b, block = &rank.blocks[b];
  const bool first = b == 0 && t == 0;
  for (int n = 0; n < test.options.calls; ++n) {
    if (first) test.prepare(r, n);
    // Some ranks come later than others.
    if (first && random() % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    rank.kernel_ends.arrive_and_wait();
    gridDim.x = test.blocks(n);
    if (b < int(gridDim.x) && test.comes(r, b)) test.launch(r, n);
    if (n == 0 && test.options.absent() && test.all_come(b)) awaited.fetch_sub(1, std::memory_order_release);
    rank.kernel_ends.arrive_and_wait();
    if (first && test.comes(r, kBlocks - 1)) test.check(r, n);
  }
}

// Test: a Host<World> that says of the n-th call how many blocks it has, and prepares, launches and checks it on a rank; and
// that checks at the end what it has noted of all ranks.
template <typename Test, int World>
int play(const Options& options) {
  const auto test = std::make_unique<Test>(options);
  for (int r = 0; r < World && options.absent(); ++r) {
    for (int b = 0; b < kBlocks; ++b) {
      if (b < test->blocks(0) && test->comes(r, b)) awaited += World - 1;
      if (test->all_come(b)) awaited += kThreads;
    }
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < World; ++r) {
    for (int b = 0; b < kBlocks; ++b) {
      for (int t = 0; t < kThreads; ++t) threads.emplace_back([&test, r, b, t] { play_thread(*test, r, b, t); });
    }
  }
  for (auto& thread : threads) thread.join();
  for (int r = 0; r < World; ++r) {
    const unsigned expected = options.absent() && r < World - 1 ? World : 0;
    test->expect(test->ranks[r]->report == expected, "rank %d reports %u\n", r, test->ranks[r]->report);
  }
  test->check_all();
  if (test->wrong == 0) std::printf("ok\n");
  return test->wrong != 0;
}

template <typename T>
constexpr const char* kName = nullptr;
template <>
constexpr const char* kName<float> = "fp32";
template <>
constexpr const char* kName<__half> = "fp16";
template <>
constexpr const char* kName<__nv_bfloat16> = "bf16";

template <template <typename, int> class Test, typename T, int... Worlds>
void play_world(const Options& options, int& status, std::integer_sequence<int, Worlds...>) {
  ((options.world == Worlds ? void(status = play<Test<T, Worlds>, Worlds>(options)) : void()), ...);
}

template <template <typename, int> class Test, typename... Types>
int play_any(char** arguments) {
  const Options options{arguments[1], std::atoi(arguments[2]), unsigned(std::atoi(arguments[3])), std::atoi(arguments[4]),
                        arguments[5] == nullptr ? "" : arguments[5]};
  std::sscanf(options.fault.c_str(), "broken %d", &broken);
  int status = 2;  // there is no such dtype or world
  const std::integer_sequence<int, P3D_WORLDS> worlds;
  ((options.dtype == kName<Types> ? play_world<Test, Types>(options, status, worlds) : void()), ...);
  return status;
}

}  // namespace
