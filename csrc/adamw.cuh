// AdamW (arXiv:1711.05101) or Adam (arXiv:1412.6980) for a rank's shard in one pass over memory: divides the gradients and may
// clear them, updates masters and moments in fp32, and writes the weights that the layers compute with, of dtype T, on this
// rank alone or on all ranks.
//
//   meet; update and write; meet.
//
// Peers that come to the first meeting no longer read the old weights; after the second one all writes are done. The first is
// left out if an earlier call of the step has it, the second if a later call has it, and both if no peer's weights are
// written. (Meetings: peers.cuh)

#ifndef P3D_ADAMW_CUH
#define P3D_ADAMW_CUH

#include <cmath>
#include <cstdint>

#include "packs.cuh"
#include "peers.cuh"

namespace {

constexpr int kMaxGroups = 32;

// Part of the shard that belongs to one parameter; in device memory. All arrays have `size` elements.
struct Part {
  float* master;
  void* gradient;          // in fp32, or in the weights' dtype
  float* average;          // of the gradient
  float* square_average;
  const float* step;       // number of the step, from 1 on
  int64_t size;
  int64_t place;           // index of its first element in the weights
  int64_t end;             // vectors of all parts up to this one
  int64_t group;
};

// Computed in double precision on the host, and rounded once.
struct Settings {
  double rate, beta1, beta2, epsilon, decay;
  bool decoupled;  // weight decay as in AdamW
};

struct Update {
  Peers peers;
  void* weights[kMaxWorld];  // of all ranks, all written; with a world of 1 this rank's alone
  const Part* parts;
  int64_t vectors;           // of all parts
  const double* divisor;     // of the gradients; or null
  const bool* skip;          // whether to do nothing; or null
  Settings groups[kMaxGroups];
  bool clear;                // the gradients
  bool meets_before, meets_after;
};

// Values that are the same for all elements of a part.
struct Rule {
  float keep1, take1, keep2, take2, rate, root, epsilon, shrink, decay;
};

__device__ Rule rule_of(const Settings& settings, float step) {
  Rule rule;
  rule.keep1 = settings.beta1, rule.take1 = 1 - settings.beta1;
  rule.keep2 = settings.beta2, rule.take2 = 1 - settings.beta2;
  rule.rate = settings.rate / (1 - pow(settings.beta1, double(step)));
  rule.root = sqrt(1 - pow(settings.beta2, double(step)));
  rule.epsilon = settings.epsilon;
  rule.shrink = settings.decoupled ? settings.rate * settings.decay : 0;
  rule.decay = settings.decoupled ? 0 : settings.decay;
  return rule;
}

template <typename T, typename G, int World>
__device__ void update(const Update& call) {
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  const float divisor = call.divisor == nullptr ? 1 : *call.divisor;
  if (call.skip != nullptr && *call.skip) return;
  const Part* part = call.parts;
  const Part* known = nullptr;  // the part that `rule` belongs to
  Rule rule;
  for (int64_t place = int64_t(blockIdx.x) * kThreads + threadIdx.x; place < call.vectors; place += stride) {
    while (place >= part->end) ++part;
    if (part != known) rule = rule_of(call.groups[part->group], *part->step), known = part;
    const int64_t size = part->size, vector = place - (part->end - (size + Pack<T>::size - 1) / Pack<T>::size);
    G* gradients = static_cast<G*>(part->gradient);
    Wide<T> master = load_wide<T>(part->master, vector, size), gradient = load_values<T>(gradients, vector, size);
    Wide<T> average = load_wide<T>(part->average, vector, size);
    Wide<T> square_average = load_wide<T>(part->square_average, vector, size);
#pragma unroll
    for (int v = 0; v < Wide<T>::size; ++v) {
      float x = master.values[v];
      const float g = gradient.values[v] / divisor + rule.decay * x;
      x -= rule.shrink * x;
      const float m = rule.keep1 * average.values[v] + rule.take1 * g;
      const float s = rule.keep2 * square_average.values[v] + rule.take2 * g * g;
      x -= rule.rate * m / (sqrtf(s) / rule.root + rule.epsilon);
      master.values[v] = x, average.values[v] = m, square_average.values[v] = s;
    }
    store_wide(part->master, vector, size, master);
    store_wide(part->average, vector, size, average);
    store_wide(part->square_average, vector, size, square_average);
    if (call.clear) store_values(gradients, vector, size, Wide<T>{});
    const Pack<T> weights = narrowed<T>(master);
#pragma unroll
    for (int r = 0; r < World; ++r) store(static_cast<T*>(call.weights[r]) + part->place, vector, size, weights);
  }
}

// Fills this rank's weights with NaN if a peer was late, so that the failure shows in all that is computed with them.
template <typename T>
__device__ void poison(const Update& call) {
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  const Part* part = call.parts;
  Pack<T> pack;
  for (int v = 0; v < Pack<T>::size; ++v) pack.values[v] = narrow<T>(NAN);
  for (int64_t place = int64_t(blockIdx.x) * kThreads + threadIdx.x; place < call.vectors; place += stride) {
    while (place >= part->end) ++part;
    const int64_t size = part->size, vector = place - (part->end - (size + Pack<T>::size - 1) / Pack<T>::size);
    store(static_cast<T*>(call.weights[call.peers.rank]) + part->place, vector, size, pack);
  }
}

template <typename T, typename G, int World>
__global__ void __launch_bounds__(kThreads) adamw(const __grid_constant__ Update call) {
  if constexpr (World == 1) {
    update<T, G, World>(call);
  } else {
    counted(
        call.peers,
        [&](unsigned long long number) {
          if (call.meets_before && !meet<World>(call.peers, 2 * number + 1)) return false;
          update<T, G, World>(call);
          return !call.meets_after || meet<World>(call.peers, 2 * number + 2);
        },
        [&] { poison<T>(call); });
  }
}

}  // namespace

#endif
