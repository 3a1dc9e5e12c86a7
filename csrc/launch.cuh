// Host code that all launchers share.
#ifndef P3D_LAUNCH_CUH
#define P3D_LAUNCH_CUH

#include <cstdint>

#include "peers.cuh"

namespace {

Peers make_peers(int world, int rank, const uint64_t* staging, const uint64_t* pads, void* state, void* report, int64_t half,
                 uint64_t limit) {
  Peers peers{{}, {}, static_cast<State*>(state), static_cast<unsigned int*>(report), half, limit, rank};
  for (int r = 0; r < world; ++r) {
    peers.staging[r] = reinterpret_cast<char*>(staging[r]);
    peers.pads[r] = reinterpret_cast<unsigned long long*>(pads[r]);
  }
  return peers;
}

constexpr int kMaxBlocks = 65535;

// Returns whether a launcher may use these numbers: they index arrays of kMaxWorld, and are the size of a grid.
bool valid(int world, int rank, int64_t size, int blocks) {
  return 1 <= world && world <= kMaxWorld && 0 <= rank && rank < world && 0 <= size && 1 <= blocks && blocks <= kMaxBlocks;
}

}  // namespace

#endif
