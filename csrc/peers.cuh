// Memory that the kernels of one host's GPUs share, the barriers between their blocks ("meetings"), and the count of calls.
//
// Every rank has a staging buffer of two halves, which its peers map, and a pad with one 64-bit word for each block and
// peer. Calls are counted in device memory (`calls`), so that a captured graph can be replayed. A call uses half calls % 2.
//
// A meeting is a barrier between the blocks with the same index on all ranks. Each block writes the meeting's epoch into its
// word on each peer's pad (release, system scope) and waits until its own words have reached that epoch (acquire). Epochs
// only grow: no word is ever reset, the signal of a peer that is ahead is not lost, and no word is waited for twice. 64 bits
// never wrap. If block b accesses the same part of a message on all ranks, it depends on no other block's meeting.
//
// One meeting per call is enough before a half is written again, two calls later. Call n + 2 begins when this rank's call
// n + 1 is complete (all calls are in one stream order), in which at least one block met all peers. A peer that came to
// that meeting was in its call n + 1, so all blocks of its call n are complete, with all their reads and writes. This holds
// for any kinds of calls in any order, and for any numbers of blocks, since the call determines the half, not a block.
// (tests/unit/kernels/test_staging_protocol.py checks all interleavings, test_kernels_on_threads.py runs the kernels on a
// CPU.)
#ifndef P3D_PEERS_CUH
#define P3D_PEERS_CUH

#include <cstdint>

#include "system_memory.cuh"

#ifndef P3D_THREADS
#define P3D_THREADS 512  // per block; a test that runs a kernel on a CPU sets fewer
#endif

namespace {

constexpr int kMaxWorld = 8;
constexpr int kThreads = P3D_THREADS;
constexpr unsigned kPollsPerLook = 64;  // of a word, before the clock is read, which is slower

// Counters of one rank, in its device memory; zero at first.
struct State {
  unsigned long long calls;
  unsigned int done;    // finished blocks of the current call
  unsigned int failed;  // 0, or 1 + the index of a peer that was late; later calls do not wait
};

struct Peers {
  char* staging[kMaxWorld];
  unsigned long long* pads[kMaxWorld];
  State* state;
  unsigned int* report;      // in host memory: a copy of State::failed
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

// Meets the blocks with this block's index on all peers, and returns whether all came in time. All threads of the block call
// it. Everything that any of them wrote before is visible to all of them afterwards: bar.sync orders the block's writes
// before the release of one thread, and that thread's acquire before the block's reads.
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

// Runs one call. run(number) returns whether all peers came to its meetings, whose epochs are 2 * number + 1 and + 2. If
// they did not, or a peer was late in an earlier call, give_up() is run instead. The last block to end counts the call, when
// all blocks have read the count.
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
