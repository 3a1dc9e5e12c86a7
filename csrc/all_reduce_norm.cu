// The C interface of all_reduce_norm.cuh.

#include <cuda_runtime.h>

#include "all_reduce_norm.cuh"
#include "launch.cuh"

namespace {

template <typename T, int World>
void launch_shot(bool two_shot, const SumNorm& call, int blocks, cudaStream_t stream) {
  if (two_shot) {
    all_reduce_norm<T, World, true><<<blocks, kThreads, 0, stream>>>(call);
  } else {
    all_reduce_norm<T, World, false><<<blocks, kThreads, 0, stream>>>(call);
  }
}

template <typename T>
bool launch(int world, bool two_shot, const SumNorm& call, int blocks, cudaStream_t stream) {
  const int64_t most = int64_t(kHeld<T>) * call.team * Pack<T>::size;
  if (call.team % 32 != 0 || call.team < 32 || kThreads % call.team != 0 || call.columns > most) return false;
  switch (world) {
    case 2: launch_shot<T, 2>(two_shot, call, blocks, stream); return true;
    case 4: launch_shot<T, 4>(two_shot, call, blocks, stream); return true;
    case 8: launch_shot<T, 8>(two_shot, call, blocks, stream); return true;
    default: return false;
  }
}

}  // namespace

// hidden = residual + the sum of `input` over the ranks, normed = RMSNorm of hidden by `weight`, all of dtype 0 (fp32), 1
// (fp16) or 2 (bf16), and of [rows, columns] but weight, [columns]; scale: [rows] of fp32, 1 / sqrt(mean(hidden^2) + eps).
// Nothing that is written may be what is read. team: threads that hold a row, 32, 64, ... of p3d_all_reduce_threads, so many
// that each holds no more vectors of it than p3d_all_reduce_norm_held. The rest is as in p3d_all_reduce, whose calls may share
// staging, pads and state with these; a half takes the rows, each rounded up to 16 bytes.
extern "C" int p3d_all_reduce_norm(int two_shot, int dtype, int world, int rank, const void* input, const void* residual,
                                   const void* weight, void* hidden, void* normed, void* scale, int64_t rows,
                                   int64_t columns, float eps, int team, const uint64_t* staging, const uint64_t* pads,
                                   void* state, void* report, int64_t half, uint64_t limit, int blocks, int device,
                                   void* stream) {
  if (world > kMaxWorld || blocks < 1) return cudaErrorInvalidValue;
  // Of this library's own copy of the CUDA runtime.
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) return error;
  const Peers peers = make_peers(world, rank, staging, pads, state, report, half, limit);
  const SumNorm call{peers, input, residual, weight,  hidden, normed, static_cast<float*>(scale),
                     rows,  columns, eps,     team};
  bool known = false;
  const auto queue = static_cast<cudaStream_t>(stream);
  if (dtype == 0) known = launch<float>(world, two_shot, call, blocks, queue);
  if (dtype == 1) known = launch<__half>(world, two_shot, call, blocks, queue);
  if (dtype == 2) known = launch<__nv_bfloat16>(world, two_shot, call, blocks, queue);
  return known ? cudaGetLastError() : cudaErrorInvalidValue;
}
