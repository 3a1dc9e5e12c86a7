// What the kernels of one host's GPUs share: where each rank's memory is, how they meet, how calls are counted.
//
// Every rank has a staging buffer that its peers map, of two halves, and a pad of one 64-bit word for each block and
// peer. A call (`calls` counts them, in device memory, so that a captured graph can be replayed) uses half calls % 2.
//
// A meeting is between the blocks of one index: each thread block writes the meeting's epoch into its word on each peer's
// pad (release, system scope) and waits until its own words have reached it (acquire). Epochs only grow, so that nothing
// is ever reset, a peer that is ahead is no lost signal, and no word is waited for twice. In 64 bits they never wrap.
// Where block b touches the same places of a message on all ranks, no other block's meeting matters.
//
// Why one meeting a call is enough before a half is written again, two calls later: call n + 2 begins when the
// own call n + 1 is complete (one stream order for all calls), in which at least one block met all peers. A peer that came
// to that meeting was in its call n + 1, so all blocks of its call n are complete, and with them all that they read or
// wrote anywhere. It holds for any kinds of calls, in any order, and for any numbers of blocks, since the half follows
// from the call and not from a block. (tests/unit/kernels/test_staging_protocol.py plays all interleavings,
// test_kernels_on_threads.py runs the kernels on a CPU.)
#ifndef P3D_PEERS_CUH
#define P3D_PEERS_CUH

#include <cstdint>

#include "system_memory.cuh"

#ifndef P3D_THREADS
#define P3D_THREADS 512  // of a block; a test that runs a kernel on a CPU takes fewer
#endif

namespace {

constexpr int kMaxWorld = 8;
constexpr int kThreads = P3D_THREADS;
constexpr unsigned kPollsPerLook = 64;  // at the clock, which is slower than a word

// In device memory of its rank, zero at first.
struct State {
  unsigned long long calls;
  unsigned int done;    // blocks of the call under way
  unsigned int failed;  // 0, or 1 + the index of a peer that didn't come in time: no later call waits again
};

struct Peers {
  char* staging[kMaxWorld];
  unsigned long long* pads[kMaxWorld];
  State* state;
  unsigned int* report;      // in the host's memory: a copy of State::failed
  int64_t half;              // bytes
  unsigned long long limit;  // nanoseconds
  int rank;
};

__device__ bool await(const unsigned long long* word, unsigned long long epoch, unsigned long long limit) {
  unsigned long long begin = 0;
  for (unsigned polls = 1;; ++polls) {
    if (load_acquire(word) >= epoch) return true;
    if (polls % kPollsPerLook == 0) {
      const unsigned long long time = nanoseconds();
      if (begin == 0) begin = time;
      if (time - begin > limit) return false;
    }
  }
}

// All threads of the block, and the blocks of its index on all peers: whether all came in time. What any of them did before
// is seen by all of them after: bar.sync hands it to the thread that releases, and on from the one that acquires.
template <int World>
__device__ bool meet(const Peers& peers, unsigned long long epoch) {
  static_assert(World <= kThreads, "a thread for each peer");
  __syncthreads();
  bool late = false;
  const int peer = threadIdx.x;
  if (peer < World && peer != peers.rank) {
    store_release(peers.pads[peer] + blockIdx.x * World + peers.rank, epoch);
    late = !await(peers.pads[peers.rank] + blockIdx.x * World + peer, epoch, peers.limit);
    if (late && atomicCAS(&peers.state->failed, 0u, 1u + peer) == 0u) store_relaxed(peers.report, 1u + peer);
  }
  return !__syncthreads_or(late);
}

// A call, which the last block to end counts, when all blocks have read the count: run(number) is whether all peers came to
// its meetings, of epochs 2 * number + 1 and + 2; what is to be done where they did not, or not to an earlier call, is give_up().
template <typename Run, typename GiveUp>
__device__ void counted(const Peers& peers, Run run, GiveUp give_up) {
  const unsigned long long number = *const_cast<volatile unsigned long long*>(&peers.state->calls);
  const bool failed = load_relaxed(&peers.state->failed) != 0;
  bool good = !__syncthreads_or(failed);
  if (good) good = run(number);
  if (!good) give_up();
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&peers.state->done, 1u) == gridDim.x - 1) {
      peers.state->done = 0;
      peers.state->calls = number + 1;
    }
  }
}

}  // namespace

#endif
