// A stream's wait for a count that another GPU, or its copy engine, writes into this one's memory.
//
// One thread polls. The driver's own wait, cuStreamWaitValue32, takes no multiprocessor, but was seen to go on only some
// hundred microseconds after the count was there, where other streams of the device waited too.

#include <cuda_runtime.h>

#include <cstdint>

#include "system_memory.cuh"

namespace {

constexpr unsigned kPollsPerLook = 64;  // at the clock, which is slower than a word

// Counts wrap around: it is there when it is ahead of `count` by less than 2^31.
__global__ void await_count(const unsigned int* word, unsigned int count, unsigned long long limit, unsigned int* report) {
  unsigned long long begin = 0;
  for (unsigned polls = 1;; ++polls) {
    if (static_cast<int>(load_acquire(word) - count) >= 0) return;
    if (polls % kPollsPerLook) continue;
    const unsigned long long now = nanoseconds();
    if (begin == 0) begin = now;
    if (now - begin > limit) {
      // What comes next on the stream would compute with memory that nobody has filled.
      store_relaxed(report, 1u);
      __threadfence_system();
      __trap();
    }
  }
}

}  // namespace

// The stream goes on when the 32-bit word has reached `count`. Where it has not within `limit` nanoseconds, `report`, in
// pinned memory of the host, becomes 1, and the device's context is lost. Returns a CUDA error, 0 for none.
extern "C" int p3d_await_count(const void* word, uint32_t count, uint64_t limit, void* report, int device, void* stream) {
  // Of this library's own copy of the CUDA runtime.
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) return error;
  await_count<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const unsigned int*>(word), count, limit,
                                                             static_cast<unsigned int*>(report));
  return cudaGetLastError();
}
