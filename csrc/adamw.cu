// C interface of adamw.cuh.

#include <cuda_runtime.h>

#include "adamw.cuh"
#include "launch.cuh"

namespace {

template <typename T, typename G>
bool launch(int world, const Update& call, int blocks, cudaStream_t stream) {
  switch (world) {
    case 1: adamw<T, G, 1><<<blocks, kThreads, 0, stream>>>(call); return true;
    case 2: adamw<T, G, 2><<<blocks, kThreads, 0, stream>>>(call); return true;
    case 4: adamw<T, G, 4><<<blocks, kThreads, 0, stream>>>(call); return true;
    case 8: adamw<T, G, 8><<<blocks, kThreads, 0, stream>>>(call); return true;
    default: return false;
  }
}

}  // namespace

// Return the bytes of a part in device memory (Part in adamw.cuh), and the maximum number of parameter groups.
extern "C" int p3d_adamw_part_bytes() { return sizeof(Part); }
extern "C" int p3d_adamw_groups() { return kMaxGroups; }

// Runs one step of AdamW or Adam.
//
// - dtype: of the weights, 1 (fp16) or 2 (bf16); gradients have it too, or fp32 where `wide`.
// - parts: in device memory; together they have `vectors` vectors of 16 bytes of weights.
// - groups: for each parameter group rate, beta1, beta2, epsilon, weight decay, and whether that is decoupled.
// - divisor, skip: in device memory, or null.
// - weights: addresses on `world` ranks in rank order, all of which are written; this rank's is the `rank`-th. For this rank
//   alone world is 1, and pads, state and report are null.
//
// The other arguments are those of p3d_all_reduce.
extern "C" int p3d_adamw(int dtype, int wide, int world, int rank, const void* parts, int64_t vectors, const double* groups,
                         int num_groups, const void* divisor, const void* skip, int clear,
                         const uint64_t* weights, int meets_before, int meets_after, const uint64_t* pads, void* state,
                         void* report, uint64_t limit, int blocks, int device, void* stream) {
  if (!valid(world, rank, vectors, blocks) || num_groups < 1 || num_groups > kMaxGroups) return cudaErrorInvalidValue;
  // Sets the device of this library's copy of the CUDA runtime.
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) return error;
  Update call{};
  if (world > 1) call.peers = make_peers(world, rank, weights, pads, state, report, 0, limit);
  for (int r = 0; r < world; ++r) call.weights[r] = reinterpret_cast<void*>(weights[r]);
  call.parts = static_cast<const Part*>(parts);
  call.vectors = vectors;
  call.divisor = static_cast<const double*>(divisor);
  call.skip = static_cast<const bool*>(skip);
  for (int k = 0; k < num_groups; ++k, groups += 6) {
    call.groups[k] = {groups[0], groups[1], groups[2], groups[3], groups[4], groups[5] != 0};
  }
  call.clear = clear != 0;
  call.meets_before = meets_before != 0, call.meets_after = meets_after != 0;
  const auto launched = [&](auto launch) { return launch(world, call, blocks, static_cast<cudaStream_t>(stream)); };
  bool known = false;
  if (dtype == 1) known = wide ? launched(launch<__half, float>) : launched(launch<__half, __half>);
  if (dtype == 2) known = wide ? launched(launch<__nv_bfloat16, float>) : launched(launch<__nv_bfloat16, __nv_bfloat16>);
  return known ? cudaGetLastError() : cudaErrorInvalidValue;
}
