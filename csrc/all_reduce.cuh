// All-reduce (sum) among GPUs of one host that reach each other's memory over NVLink.
//
// One-shot: each rank reads all of every peer's input and sums it. Two-shot: each rank sums one part of all inputs and
// writes it to all peers. Sums are in fp32 and in rank order, so results are bitwise equal on all ranks and from run to run.
//
//   one-shot:  stage the input; meet; read all peers' staging, sum, write the output.
//   two-shot:  stage the other ranks' parts; meet; read this rank's part from all peers, sum, write the sum to the same
//              place of all peers' staging and to the output; meet; copy the other parts from this rank's staging to the
//              output.
//
// Within a two-shot call, only the rank that sums a part reads it from a peer's staging, each vector by the thread that then
// writes the sum there. (Staging and meetings: peers.cuh)

#ifndef P3D_ALL_REDUCE_CUH
#define P3D_ALL_REDUCE_CUH

#include <cmath>
#include <cstdint>

#include "packs.cuh"
#include "peers.cuh"

namespace {

struct Sum {
  Peers peers;
  const void* input;
  void* output;
  int64_t size;  // elements
};

// Vectors that a thread sums at once: 8 loads in flight for any number of ranks.
template <int World>
constexpr int kAtOnce = 8 / World;

// Returns the sum of every rank's vector, in rank order.
template <typename T, int World>
__device__ Pack<T> summed(const Pack<T> (&parts)[World]) {
  Pack<T> total;
#pragma unroll
  for (int v = 0; v < Pack<T>::size; ++v) {
    float value = widen(parts[0].values[v]);
#pragma unroll
    for (int r = 1; r < World; ++r) value += widen(parts[r].values[v]);
    total.values[v] = narrow<T>(value);
  }
  return total;
}

// Sums vectors first + k * stride < end over all ranks, and calls use(vector, sum) for each. This rank's vectors are read from
// the input and need no staging.
template <typename T, int World, bool Whole, typename Use>
__device__ void sum(const Sum& call, int64_t offset, int64_t first, int64_t end, int64_t stride, Use use) {
  constexpr int at_once = Whole ? kAtOnce<World> : 1;
  const T* input = static_cast<const T*>(call.input);
  for (int64_t begin = first; begin < end; begin += at_once * stride) {
    Pack<T> parts[at_once][World];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t vector = begin + k * stride;
#pragma unroll
      for (int r = 0; r < World; ++r) {
        if (vector < end) {
          parts[k][r] = r == call.peers.rank ? load<T, Whole>(input, vector, call.size)
                                             : load_staged<T>(call.peers.staging[r] + offset, vector);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t vector = begin + k * stride;
      if (vector < end) use(vector, summed<T, World>(parts[k]));
    }
  }
}

// Writes NaN as the result of a call that failed, so that the failure shows in all that is computed from it. A thread writes
// to its own elements only, not to those of blocks whose peers came. Parts: World for two-shot, 1 for one-shot.
template <typename T, int Parts>
__device__ void poison(const Sum& call) {
  Pack<T> pack;
  for (int v = 0; v < Pack<T>::size; ++v) pack.values[v] = narrow<T>(NAN);
  const int64_t vectors = (call.size + Pack<T>::size - 1) / Pack<T>::size;
  const int64_t part = (vectors + Parts - 1) / Parts;
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  for (int64_t place = int64_t(blockIdx.x) * kThreads + threadIdx.x; place < part; place += stride) {
    for (int s = 0; s < Parts; ++s) {
      const int64_t vector = s * part + place;
      if (vector < vectors) store(static_cast<T*>(call.output), vector, call.size, pack);
    }
  }
}

// Copies vectors first + k * stride < end of the input into this rank's staging.
template <typename T, bool Whole>
__device__ void stage(const Sum& call, int64_t offset, int64_t first, int64_t end, int64_t stride) {
  constexpr int at_once = Whole ? 8 : 1;
  char* staging = call.peers.staging[call.peers.rank] + offset;
  for (int64_t begin = first; begin < end; begin += at_once * stride) {
    Pack<T> parts[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t vector = begin + k * stride;
      if (vector < end) parts[k] = load<T, Whole>(static_cast<const T*>(call.input), vector, call.size);
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t vector = begin + k * stride;
      if (vector < end) store_staged(staging, vector, parts[k]);
    }
  }
}

template <typename T, int World, bool Whole>
__device__ bool one_shot(const Sum& call, unsigned long long number) {
  const int64_t offset = (number % 2) * call.peers.half;
  const int64_t vectors = (call.size + Pack<T>::size - 1) / Pack<T>::size;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, stride = int64_t(gridDim.x) * kThreads;
  T* output = static_cast<T*>(call.output);
  stage<T, Whole>(call, offset, first, vectors, stride);
  if (!meet<World>(call.peers, 2 * number + 1)) return false;
  sum<T, World, Whole>(call, offset, first, vectors, stride,
                       [&](int64_t vector, const Pack<T>& total) { store<T, Whole>(output, vector, call.size, total); });
  return true;
}

template <typename T, int World, bool Whole>
__device__ bool two_shot(const Sum& call, unsigned long long number) {
  const int64_t offset = (number % 2) * call.peers.half;
  const int64_t vectors = (call.size + Pack<T>::size - 1) / Pack<T>::size;
  const int64_t part = (vectors + World - 1) / World;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, stride = int64_t(gridDim.x) * kThreads;
  T* output = static_cast<T*>(call.output);
  for (int s = 0; s < World; ++s) {
    if (s == call.peers.rank) continue;
    stage<T, Whole>(call, offset, s * part + first, min((s + 1) * part, vectors), stride);
  }
  if (!meet<World>(call.peers, 2 * number + 1)) return false;
  const int64_t start = call.peers.rank * part;
  sum<T, World, Whole>(call, offset, start + first, min(start + part, vectors), stride,
                       [&](int64_t vector, const Pack<T>& total) {
#pragma unroll
                         for (int r = 0; r < World; ++r) {
                           if (r != call.peers.rank) store_staged(call.peers.staging[r] + offset, vector, total);
                         }
                         store<T, Whole>(output, vector, call.size, total);
                       });
  if (!meet<World>(call.peers, 2 * number + 2)) return false;
  const char* mine = call.peers.staging[call.peers.rank] + offset;
  for (int64_t place = first; place < part; place += stride) {
#pragma unroll
    for (int s = 0; s < World; ++s) {
      const int64_t vector = s * part + place;
      if (s != call.peers.rank && vector < vectors) {
        store<T, Whole>(output, vector, call.size, load_staged<T>(mine, vector));
      }
    }
  }
  return true;
}

template <typename T, int World, bool TwoShot, bool Whole>
__device__ bool run(const Sum& call, unsigned long long number) {
  return TwoShot ? two_shot<T, World, Whole>(call, number) : one_shot<T, World, Whole>(call, number);
}

template <typename T, int World, bool TwoShot>
__global__ void __launch_bounds__(kThreads, 1) all_reduce(const __grid_constant__ Sum call) {
  counted(
      call.peers,
      [&](unsigned long long number) {
        const bool whole = is_vectors(static_cast<const T*>(call.input), call.size) &&
                           is_vectors(static_cast<const T*>(call.output), call.size);
        return whole ? run<T, World, TwoShot, true>(call, number) : run<T, World, TwoShot, false>(call, number);
      },
      [&] { poison<T, TwoShot ? World : 1>(call); });
}

}  // namespace

#endif
