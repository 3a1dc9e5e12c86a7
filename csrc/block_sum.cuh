#ifndef P3D_BLOCK_SUM_CUH
#define P3D_BLOCK_SUM_CUH

#include "peers.cuh"

// Returns, in thread 0, the sum over all threads of a block, always in the same order. Call it once in a kernel.
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

// Returns, in each thread of a team, the sum over the team, always in the same order. A team is `team` consecutive threads, a
// power of two of whole warps. All threads of a block call it.
__device__ inline float team_sum(float value, int team) {
  __shared__ float warps[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  __syncthreads();  // the previous call's values have been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  const int first = threadIdx.x / team * (team / 32);
  float total = warps[first];
  for (int warp = 1; warp < team / 32; ++warp) total += warps[first + warp];
  return total;
}

#endif
