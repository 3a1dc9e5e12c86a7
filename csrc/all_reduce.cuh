// The sum of every rank's tensor on every rank, among GPUs of one host that reach each other's memory over NVLink.
//
// One-shot: each rank reads all of every peer's input and sums it. Two-shot: each rank sums one slice of all inputs and
// writes it to all peers. Sums are in fp32 and in rank order, so results are bitwise equal on all ranks and from run to run.
//
//   one-shot:  stage the input; meet; read all peers' staging, sum, write the output.
//   two-shot:  stage the slices of others; meet; read the own slice of all peers, sum, write it over the same places of
//              all peers' staging and into the output; meet; copy the other slices from the own staging to the output.
//
// (peers.cuh: staging and meetings.) Within a two-shot call, a slice of a peer's staging is read by the slice's owner alone,
// each vector by the thread that then writes the sum over it.

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

// Vectors that a thread sums at once, so that 8 loads are under way whatever the number of ranks.
template <int World>
constexpr int kAtOnce = 8 / World;

// The sum of every rank's vector, in rank order.
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

// Sums vectors first + k * stride < end of all ranks, and gives each to use(vector, sum). The own ones are those of the input,
// which need no staging.
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

// The numbers of a call that failed: what is computed from them is seen to be wrong. A thread writes what it would have, and
// nothing of a block whose peers came. Slices: World of two-shot, 1 of one-shot.
template <typename T, int Slices>
__device__ void poison(const Sum& call) {
  Pack<T> pack;
  for (int v = 0; v < Pack<T>::size; ++v) pack.values[v] = narrow<T>(NAN);
  const int64_t vectors = (call.size + Pack<T>::size - 1) / Pack<T>::size;
  const int64_t slice = (vectors + Slices - 1) / Slices;
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  for (int64_t place = int64_t(blockIdx.x) * kThreads + threadIdx.x; place < slice; place += stride) {
    for (int s = 0; s < Slices; ++s) {
      const int64_t vector = s * slice + place;
      if (vector < vectors) store(static_cast<T*>(call.output), vector, call.size, pack);
    }
  }
}

// Puts vectors first + k * stride < end of the input into the own staging.
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
  const int64_t slice = (vectors + World - 1) / World;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, stride = int64_t(gridDim.x) * kThreads;
  T* output = static_cast<T*>(call.output);
  for (int s = 0; s < World; ++s) {
    if (s == call.peers.rank) continue;
    stage<T, Whole>(call, offset, s * slice + first, min((s + 1) * slice, vectors), stride);
  }
  if (!meet<World>(call.peers, 2 * number + 1)) return false;
  const int64_t start = call.peers.rank * slice;
  sum<T, World, Whole>(call, offset, start + first, min(start + slice, vectors), stride,
                       [&](int64_t vector, const Pack<T>& total) {
#pragma unroll
                         for (int r = 0; r < World; ++r) {
                           if (r != call.peers.rank) store_staged(call.peers.staging[r] + offset, vector, total);
                         }
                         store<T, Whole>(output, vector, call.size, total);
                       });
  if (!meet<World>(call.peers, 2 * number + 2)) return false;
  const char* mine = call.peers.staging[call.peers.rank] + offset;
  for (int64_t place = first; place < slice; place += stride) {
#pragma unroll
    for (int s = 0; s < World; ++s) {
      const int64_t vector = s * slice + place;
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
