// C interface of reduce_scatter.cuh.

#include <cuda_runtime.h>

#include "launch.cuh"
#include "reduce_scatter.cuh"

namespace {

template <typename T, typename In>
bool launch(int world, const Peers& peers, const void* input, void* output, void* squares, int64_t stride, int64_t size,
            bool accumulate, int blocks, cudaStream_t stream) {
  const auto* from = static_cast<const In*>(input);
  const Scatter<In> call{peers, from, static_cast<In*>(output), static_cast<double*>(squares), stride, size, accumulate};
  switch (world) {
    case 2: reduce_scatter<T, 2><<<blocks, kThreads, 0, stream>>>(call); return true;
    case 4: reduce_scatter<T, 4><<<blocks, kThreads, 0, stream>>>(call); return true;
    case 8: reduce_scatter<T, 8><<<blocks, kThreads, 0, stream>>>(call); return true;
    default: return false;
  }
}

}  // namespace

// output[i] = the sum of input[rank * stride + i] over the ranks for i < size, plus output[i] if `accumulate`.
//
// - dtype: 0 (fp32), 1 (fp16) or 2 (bf16), to which all summands are rounded before they are sent. Sums are in fp32.
// - wide: input and output are in fp32; else in dtype.
// - squares: null, or a double for each block, which receives the block's part of the results' sum of squares.
//
// The other arguments are those of p3d_all_reduce. A half holds `size` elements of the dtype, rounded up to 16 bytes, for each
// rank.
extern "C" int p3d_reduce_scatter(int dtype, int wide, int world, int rank, const void* input, void* output, void* squares,
                                  int64_t stride, int64_t size, int accumulate, const uint64_t* staging, const uint64_t* pads,
                                  void* state, void* report, int64_t half, uint64_t limit, int blocks, int device,
                                  void* stream) {
  if (!valid(world, rank, size, blocks) || stride < 0) return cudaErrorInvalidValue;
  // Sets the device of this library's copy of the CUDA runtime.
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) return error;
  const Peers peers = make_peers(world, rank, staging, pads, state, report, half, limit);
  const auto queue = static_cast<cudaStream_t>(stream);
  const auto launched = [&](auto launch) {
    return launch(world, peers, input, output, squares, stride, size, accumulate != 0, blocks, queue);
  };
  bool known = false;
  if (dtype == 0) known = launched(launch<float, float>);
  if (dtype == 1) known = wide ? launched(launch<__half, float>) : launched(launch<__half, __half>);
  if (dtype == 2) known = wide ? launched(launch<__nv_bfloat16, float>) : launched(launch<__nv_bfloat16, __nv_bfloat16>);
  return known ? cudaGetLastError() : cudaErrorInvalidValue;
}
