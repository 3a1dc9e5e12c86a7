#ifndef P3D_BLOCK_SUM_CUH
#define P3D_BLOCK_SUM_CUH

#include "peers.cuh"

// Of all threads of a block, always in one order; for thread 0. Once in a kernel.
__device__ inline double block_sum(double value) {
  __shared__ double warps[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(~0u, value, distance);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / 32; ++warp) value += warps[warp];
  }
  return value;
}

// Of the threads of a team, each `team` in a row, a power of two of whole warps: for each of them, always in one order. All
// threads of a block call it.
__device__ inline float team_sum(float value, int team) {
  __shared__ float warps[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  __syncthreads();  // what the call before has left here is read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  const int first = threadIdx.x / team * (team / 32);
  float total = warps[first];
  for (int warp = 1; warp < team / 32; ++warp) total += warps[first + warp];
  return total;
}

#endif
