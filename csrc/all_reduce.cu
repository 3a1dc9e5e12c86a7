// C interface of all_reduce.cuh.

#include <cuda_runtime.h>

#include "all_reduce.cuh"
#include "launch.cuh"

namespace {

template <typename T, int World>
void launch_shot(bool two_shot, const Sum& call, int blocks, cudaStream_t stream) {
  if (two_shot) {
    all_reduce<T, World, true><<<blocks, kThreads, 0, stream>>>(call);
  } else {
    all_reduce<T, World, false><<<blocks, kThreads, 0, stream>>>(call);
  }
}

template <typename T>
bool launch(int world, bool two_shot, const Sum& call, int blocks, cudaStream_t stream) {
  switch (world) {
    case 2: launch_shot<T, 2>(two_shot, call, blocks, stream); return true;
    case 4: launch_shot<T, 4>(two_shot, call, blocks, stream); return true;
    case 8: launch_shot<T, 8>(two_shot, call, blocks, stream); return true;
    default: return false;
  }
}

}  // namespace

// Returns the number of threads of a block, each of which processes a vector of 16 bytes at a time.
extern "C" int p3d_all_reduce_threads() { return kThreads; }

// Writes the sum of `input` over the ranks to `output`, which may be the input. Returns a CUDA error, 0 for none.
//
// - size: elements, of dtype 0 (fp32), 1 (fp16) or 2 (bf16).
// - staging: addresses of every rank's staging buffer in rank order. Each has two halves of `half` bytes, a multiple of 16,
//   at least the message rounded up to 16 bytes.
// - pads: addresses of every rank's pad in rank order, each of 8 * world * blocks bytes that were 0 at first.
// - state: 16 bytes of device memory that were 0 at first.
// - report: 4 bytes of pinned host memory, 0 as long as every peer came within `limit` nanoseconds, else 1 + the index of the
//   peer that was late.
//
// Every rank calls with the same two_shot, dtype, world, size and blocks, in the same order; all calls with one staging buffer
// are in one stream order.
extern "C" int p3d_all_reduce(int two_shot, int dtype, int world, int rank, const void* input, void* output, int64_t size,
                              const uint64_t* staging, const uint64_t* pads, void* state, void* report, int64_t half,
                              uint64_t limit, int blocks, int device, void* stream) {
  const int64_t most = half / (dtype == 0 ? 4 : 2);  // elements
  if (!valid(world, rank, size, blocks) || size > most) return cudaErrorInvalidValue;
  // Sets the device of this library's copy of the CUDA runtime.
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) return error;
  const Peers peers = make_peers(world, rank, staging, pads, state, report, half, limit);
  const Sum call{peers, input, output, size};
  bool known = false;
  const auto queue = static_cast<cudaStream_t>(stream);
  if (dtype == 0) known = launch<float>(world, two_shot, call, blocks, queue);
  if (dtype == 1) known = launch<__half>(world, two_shot, call, blocks, queue);
  if (dtype == 2) known = launch<__nv_bfloat16>(world, two_shot, call, blocks, queue);
  return known ? cudaGetLastError() : cudaErrorInvalidValue;
}

extern "C" const char* p3d_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
