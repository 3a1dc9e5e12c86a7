// The sum of every rank's tensor on every rank, among GPUs of one host that reach each other's memory over NVLink.
//
// One-shot: each rank reads all of every peer's input and sums it. Two-shot: each rank sums one slice of all inputs and
// writes it to all peers. Sums are in fp32 and in rank order, so results are bitwise equal on all ranks and from run to run.
//
// Every rank has a staging buffer that its peers map, of two halves, and a pad of one 64-bit word for each block and
// peer. A call (`calls` counts them, in device memory, so that a captured graph can be replayed) uses half calls % 2:
//
//   one-shot:  stage the input; meet; read all peers' staging, sum, write the output.
//   two-shot:  stage the slices of others; meet; read the own slice of all peers, sum, write it over the same places of
//              all peers' staging and into the output; meet; copy the other slices from the own staging to the output.
//
// A meeting is between the blocks of one index: each thread block writes the meeting's epoch into its word on each peer's
// pad (release, system scope) and waits until its own words have reached it (acquire). Epochs only grow, so that nothing
// is ever reset, a peer that is ahead is no lost signal, and no word is waited for twice. In 64 bits they never wrap.
// Block b touches the same places of the message on all ranks and in all phases, so no other block's meeting matters.
//
// Why one meeting a call is enough before a half is written again, two calls later: call n + 2 begins when the
// own call n + 1 is complete (one stream order for all calls), in which at least one block met all peers. A peer that came
// to that meeting was in its call n + 1, so all blocks of its call n are complete, and with them all that they read or
// wrote anywhere. It holds for any order of one- and two-shot calls and for any numbers of blocks, since the half
// follows from the call and not from a block. (tests/unit/kernels/test_all_reduce_protocol.py plays all interleavings,
// test_all_reduce_on_threads.py runs this file on a CPU.)
//
// Within a two-shot call, a slice of a peer's staging is read by the slice's owner alone, each vector by the thread
// that then writes the sum over it.

#ifndef P3D_ALL_REDUCE_CUH
#define P3D_ALL_REDUCE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "system_memory.cuh"

#ifndef P3D_THREADS
#define P3D_THREADS 512  // of a block; a test that runs the kernel on a CPU takes fewer
#endif

namespace {

constexpr int kMaxWorld = 8;
constexpr int kThreads = P3D_THREADS;
constexpr unsigned kPollsPerLook = 64;  // at the clock, which is slower than a word

// In device memory of its rank, zero at first.
struct State {
  unsigned long long calls;
  unsigned int done;    // blocks of the call under way
  unsigned int failed;  // 0, or 1 + the index of a peer that didn't come in time: no later call waits again
};

struct Call {
  const void* input;
  void* output;
  int64_t size;  // elements
  char* staging[kMaxWorld];
  unsigned long long* pads[kMaxWorld];
  State* state;
  unsigned int* report;  // in the host's memory: a copy of State::failed
  int64_t half;          // bytes
  unsigned long long limit;  // nanoseconds
  int rank;
};

template <typename T>
struct alignas(16) Pack {
  static constexpr int size = 16 / sizeof(T);
  T values[size];
};

__device__ float widen(float x) { return x; }
__device__ float widen(__half x) { return __half2float(x); }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ T narrow(float x);
template <>
__device__ float narrow<float>(float x) { return x; }
template <>
__device__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

template <typename T>
__device__ Pack<T> load_staged(const char* staging, int64_t vector) {
  const uint4 raw = load_vector(staging + vector * 16);
  return *reinterpret_cast<const Pack<T>*>(&raw);
}

template <typename T>
__device__ void store_staged(char* staging, int64_t vector, const Pack<T>& pack) {
  store_vector(staging + vector * 16, *reinterpret_cast<const uint4*>(&pack));
}

// The user's tensors begin anywhere, and end within a vector. No __restrict__: input and output may be the same.
template <typename T>
__device__ bool is_whole(const T* tensor, int64_t vector, int64_t size) {
  return reinterpret_cast<uintptr_t>(tensor) % 16 == 0 && (vector + 1) * Pack<T>::size <= size;
}

template <typename T>
__device__ Pack<T> load(const T* tensor, int64_t vector, int64_t size) {
  if (is_whole(tensor, vector, size)) return reinterpret_cast<const Pack<T>*>(tensor)[vector];
  Pack<T> pack;
  for (int k = 0; k < Pack<T>::size; ++k) {
    const int64_t place = vector * Pack<T>::size + k;
    pack.values[k] = place < size ? tensor[place] : narrow<T>(0.0f);
  }
  return pack;
}

template <typename T>
__device__ void store(T* tensor, int64_t vector, int64_t size, const Pack<T>& pack) {
  if (is_whole(tensor, vector, size)) {
    reinterpret_cast<Pack<T>*>(tensor)[vector] = pack;
    return;
  }
  for (int k = 0; k < Pack<T>::size; ++k) {
    const int64_t place = vector * Pack<T>::size + k;
    if (place < size) tensor[place] = pack.values[k];
  }
}

__device__ bool await(const unsigned long long* word, unsigned long long epoch, unsigned long long limit) {
  unsigned long long begin = 0;
  for (unsigned polls = 1;; ++polls) {
    if (load_acquire(word) >= epoch) return true;
    if (polls % kPollsPerLook == 0) {
      const unsigned long long time = nanoseconds();
      if (begin == 0) begin = time;
      if (time - begin > limit) return false;
    }
  }
}

// All threads of the block, and the blocks of its index on all peers: whether all came in time. What any of them did to
// staging before is seen by all of them after: bar.sync hands it to the thread that releases, and on from the one that acquires.
template <int World>
__device__ bool meet(const Call& call, unsigned long long epoch) {
  static_assert(World <= kThreads, "a thread for each peer");
  __syncthreads();
  bool late = false;
  const int peer = threadIdx.x;
  if (peer < World && peer != call.rank) {
    store_release(call.pads[peer] + blockIdx.x * World + call.rank, epoch);
    late = !await(call.pads[call.rank] + blockIdx.x * World + peer, epoch, call.limit);
    if (late && atomicCAS(&call.state->failed, 0u, 1u + peer) == 0u) store_relaxed(call.report, 1u + peer);
  }
  return !__syncthreads_or(late);
}

// Vectors that a thread sums at once, so that 8 loads are under way whatever the number of ranks.
template <int World>
constexpr int kAtOnce = 8 / World;

// Sums vectors first + k * stride < end of all ranks in rank order, and gives each to use(vector, sum). The own ones are those
// of the input, which need no staging.
template <typename T, int World, typename Use>
__device__ void sum(const Call& call, int64_t offset, int64_t first, int64_t end, int64_t stride, Use use) {
  constexpr int at_once = kAtOnce<World>;
  const T* input = static_cast<const T*>(call.input);
  for (int64_t begin = first; begin < end; begin += at_once * stride) {
    Pack<T> parts[at_once][World];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t vector = begin + k * stride;
#pragma unroll
      for (int r = 0; r < World; ++r) {
        if (vector < end) {
          parts[k][r] = r == call.rank ? load(input, vector, call.size) : load_staged<T>(call.staging[r] + offset, vector);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t vector = begin + k * stride;
      if (vector < end) {
        Pack<T> total;
#pragma unroll
        for (int v = 0; v < Pack<T>::size; ++v) {
          float value = widen(parts[k][0].values[v]);
#pragma unroll
          for (int r = 1; r < World; ++r) value += widen(parts[k][r].values[v]);
          total.values[v] = narrow<T>(value);
        }
        use(vector, total);
      }
    }
  }
}

// The numbers of a call that failed: what is computed from them is seen to be wrong.
template <typename T>
__device__ void poison(const Call& call) {
  Pack<T> pack;
  for (int v = 0; v < Pack<T>::size; ++v) pack.values[v] = narrow<T>(NAN);
  const int64_t vectors = (call.size + Pack<T>::size - 1) / Pack<T>::size;
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  for (int64_t vector = int64_t(blockIdx.x) * kThreads + threadIdx.x; vector < vectors; vector += stride) {
    store(static_cast<T*>(call.output), vector, call.size, pack);
  }
}

template <typename T, int World>
__device__ bool one_shot(const Call& call, unsigned long long number) {
  const int64_t offset = (number % 2) * call.half;
  const int64_t vectors = (call.size + Pack<T>::size - 1) / Pack<T>::size;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, stride = int64_t(gridDim.x) * kThreads;
  const T* input = static_cast<const T*>(call.input);
  T* output = static_cast<T*>(call.output);
#pragma unroll 4
  for (int64_t vector = first; vector < vectors; vector += stride) {
    store_staged(call.staging[call.rank] + offset, vector, load(input, vector, call.size));
  }
  if (!meet<World>(call, 2 * number + 1)) return false;
  sum<T, World>(call, offset, first, vectors, stride,
                [&](int64_t vector, const Pack<T>& total) { store(output, vector, call.size, total); });
  return true;
}

template <typename T, int World>
__device__ bool two_shot(const Call& call, unsigned long long number) {
  const int64_t offset = (number % 2) * call.half;
  const int64_t vectors = (call.size + Pack<T>::size - 1) / Pack<T>::size;
  const int64_t slice = (vectors + World - 1) / World;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, stride = int64_t(gridDim.x) * kThreads;
  const T* input = static_cast<const T*>(call.input);
  T* output = static_cast<T*>(call.output);
  char* mine = call.staging[call.rank] + offset;
  for (int64_t place = first; place < slice; place += stride) {
#pragma unroll
    for (int s = 0; s < World; ++s) {
      const int64_t vector = s * slice + place;
      if (s != call.rank && vector < vectors) store_staged(mine, vector, load(input, vector, call.size));
    }
  }
  if (!meet<World>(call, 2 * number + 1)) return false;
  const int64_t start = call.rank * slice;
  sum<T, World>(call, offset, start + first, min(start + slice, vectors), stride,
                [&](int64_t vector, const Pack<T>& total) {
#pragma unroll
                  for (int r = 0; r < World; ++r) {
                    if (r != call.rank) store_staged(call.staging[r] + offset, vector, total);
                  }
                  store(output, vector, call.size, total);
                });
  if (!meet<World>(call, 2 * number + 2)) return false;
  for (int64_t place = first; place < slice; place += stride) {
#pragma unroll
    for (int s = 0; s < World; ++s) {
      const int64_t vector = s * slice + place;
      if (s != call.rank && vector < vectors) store(output, vector, call.size, load_staged<T>(mine, vector));
    }
  }
  return true;
}

template <typename T, int World, bool TwoShot>
__global__ void __launch_bounds__(kThreads, 1) all_reduce(const __grid_constant__ Call call) {
  // The last block to end counts the call, when all blocks have read the count.
  const unsigned long long number = *const_cast<volatile unsigned long long*>(&call.state->calls);
  const bool failed = load_relaxed(&call.state->failed) != 0;
  bool good = !__syncthreads_or(failed);
  if (good) good = TwoShot ? two_shot<T, World>(call, number) : one_shot<T, World>(call, number);
  if (!good) poison<T>(call);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&call.state->done, 1u) == gridDim.x - 1) {
      call.state->done = 0;
      call.state->calls = number + 1;
    }
  }
}

}  // namespace

#endif
