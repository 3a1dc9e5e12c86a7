// Reduce-scatter of gradients over data parallelism: each rank gets the sum of its shard over all ranks' gradients, which are
// in fp32 or T.
//
//   write the other ranks' shards, as T, into their staging; meet; sum this rank's shard over all ranks in fp32.
//
// Sums are in rank order, and all summands are rounded to T, this rank's too, so that results do not depend on the rank that
// sums. No rank waits before it writes over NVLink, and each rank reads its own memory only. (Staging and meetings: peers.cuh)

#ifndef P3D_REDUCE_SCATTER_CUH
#define P3D_REDUCE_SCATTER_CUH

#include <cmath>
#include <cstdint>

#include "block_sum.cuh"
#include "packs.cuh"
#include "peers.cuh"

namespace {

template <typename In>
struct Scatter {
  Peers peers;
  const In* input;     // the shards of all ranks, one every `stride` elements
  In* output;          // may be this rank's shard of the input
  double* squares;     // for each block, the sum of the squares of its results; or null
  int64_t stride, size;  // in elements; `size` elements of each shard are summed
  bool accumulate;       // add to the contents of the output
};

// Returns where a peer's part begins in a half of this rank's staging.
template <int World>
__device__ int64_t slot(const Peers& peers, int source) {
  return peers.half / World / 16 * 16 * source;
}

// Vectors that a thread loads at once, for any number of ranks.
template <int World>
constexpr int kScattered = World == 2 ? 4 : 8 / World;

// Whole: all vectors of all shards are whole.
template <typename T, int World, bool Whole, typename In>
__device__ bool reduce_scatter(const Scatter<In>& call, unsigned long long number) {
  constexpr int at_once = Whole ? kScattered<World> : 1;
  const int64_t offset = (number % 2) * call.peers.half;
  const int64_t vectors = (call.size + Pack<T>::size - 1) / Pack<T>::size;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, stride = int64_t(gridDim.x) * kThreads;
  const int rank = call.peers.rank;
  for (int64_t begin = first; begin < vectors; begin += at_once * stride) {
    Wide<T> parts[at_once][World - 1];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t vector = begin + k * stride;
#pragma unroll
      for (int p = 1; p < World; ++p) {
        if (vector >= vectors) continue;
        parts[k][p - 1] = load_values<T, Whole>(call.input + (rank + p) % World * call.stride, vector, call.size);
      }
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t vector = begin + k * stride;
#pragma unroll
      for (int p = 1; p < World; ++p) {  // each rank begins with another peer
        if (vector >= vectors) continue;
        char* staging = call.peers.staging[(rank + p) % World] + offset + slot<World>(call.peers, rank);
        store_staged(staging, vector, narrowed<T>(parts[k][p - 1]));
      }
    }
  }
  if (!meet<World>(call.peers, 2 * number + 1)) return false;
  const In* own = call.input + rank * call.stride;
  const char* staging = call.peers.staging[rank] + offset;
  double squares = 0;
  for (int64_t begin = first; begin < vectors; begin += at_once * stride) {
    Pack<T> parts[at_once][World];
    Wide<T> before[at_once]{};
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t vector = begin + k * stride;
      if (vector >= vectors) continue;
#pragma unroll
      for (int r = 0; r < World; ++r) {
        parts[k][r] = r == rank ? narrowed<T>(load_values<T, Whole>(own, vector, call.size))
                                : load_staged<T>(staging + slot<World>(call.peers, r), vector);
      }
      if (call.accumulate) before[k] = load_values<T, Whole>(call.output, vector, call.size);
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t vector = begin + k * stride;
      if (vector >= vectors) continue;
      Wide<T> total;
#pragma unroll
      for (int v = 0; v < Wide<T>::size; ++v) {
        float value = widen(parts[k][0].values[v]);
#pragma unroll
        for (int r = 1; r < World; ++r) value += widen(parts[k][r].values[v]);
        if (call.accumulate) value += before[k].values[v];
        total.values[v] = widen(narrow<In>(value));
        squares += double(total.values[v]) * total.values[v];
      }
      store_values<T, Whole>(call.output, vector, call.size, total);
    }
  }
  if (call.squares != nullptr) {
    squares = block_sum(squares);
    if (threadIdx.x == 0) call.squares[blockIdx.x] = squares;
  }
  return true;
}

// Writes NaN as the result of a call that failed, so that the failure shows in all that is computed from it. A thread writes
// to its own elements only, not to those of blocks whose peers came.
template <typename T, typename In>
__device__ void poison(const Scatter<In>& call) {
  Wide<T> wide;
  for (int v = 0; v < Wide<T>::size; ++v) wide.values[v] = NAN;
  const int64_t vectors = (call.size + Pack<T>::size - 1) / Pack<T>::size;
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  for (int64_t vector = int64_t(blockIdx.x) * kThreads + threadIdx.x; vector < vectors; vector += stride) {
    store_values<T>(call.output, vector, call.size, wide);
  }
  if (call.squares != nullptr && threadIdx.x == 0) call.squares[blockIdx.x] = NAN;
}

template <typename T, int World, typename In>
__global__ void __launch_bounds__(kThreads, 1) reduce_scatter(const __grid_constant__ Scatter<In> call) {
  counted(
      call.peers,
      [&](unsigned long long number) {
        const bool whole =
            is_vectors(call.input, call.size, Wide<T>::size) && is_vectors(call.output, call.stride, Wide<T>::size);
        return whole ? reduce_scatter<T, World, true>(call, number) : reduce_scatter<T, World, false>(call, number);
      },
      [&] { poison<T>(call); });
}

}  // namespace

#endif
