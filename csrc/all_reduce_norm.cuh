// The sum of every rank's tensor, a residual added to it, and RMSNorm (arXiv:1910.07467) of that: what lies between a row layer
// and the next column layer, without writing the sum and reading it again.
//
//   hidden = residual + sum,  scale = 1 / sqrt(mean(hidden^2) + eps),  normed = hidden * scale * weight
//
// The sum is rounded to T before the residual is added, as all_reduce.cuh does alone. A row is held by a team of threads, which
// finish it where they have its sum:
//
//   one-shot:  stage the rows; meet; sum all of them, finish them.
//   two-shot:  stage the rows of others; meet; sum the own slice of rows, write it over the same places of all peers' staging,
//              finish it; meet; finish the other slices from the own staging.
//
// (all_reduce.cuh, peers.cuh.) In staging a row takes whole vectors. Which thread adds which numbers in which order follows
// from rows, columns and team alone, and not from where tensors lie: bits are equal on all ranks and from run to run.

#ifndef P3D_ALL_REDUCE_NORM_CUH
#define P3D_ALL_REDUCE_NORM_CUH

#include <cmath>
#include <cstdint>

#include "all_reduce.cuh"
#include "block_sum.cuh"

namespace {

// Vectors of a row that a thread holds at most: with 512 threads, of 16384 numbers.
template <typename T>
constexpr int kHeld = 2 * sizeof(T);

struct SumNorm {
  Peers peers;
  const void *input, *residual, *weight;  // [rows, columns] twice, [columns]
  void *hidden, *normed;                  // [rows, columns]
  float* scale;                           // [rows]
  int64_t rows, columns;
  float eps;
  int team;  // threads
};

template <typename T>
__device__ int64_t vectors_of_row(const SumNorm& call) { return (call.columns + Pack<T>::size - 1) / Pack<T>::size; }

// The vectors of a row that a thread holds: use(k, vector). In registers where all are whole, else in little code.
template <typename T, bool Whole, typename Use>
__device__ void each_vector(const SumNorm& call, Use use) {
  const int64_t vectors = vectors_of_row<T>(call);
#pragma unroll(Whole ? kHeld<T> : 1)
  for (int k = 0; k < kHeld<T>; ++k) {
    const int64_t vector = threadIdx.x % call.team + k * call.team;
    if (vector < vectors) use(k, vector);
  }
}

// Rows first + place of `slice` places for this thread's team: use(row, here), where `here` is whether there is such a row. All
// threads of a block are called equally often.
template <typename Use>
__device__ void each_row(const SumNorm& call, int64_t first, int64_t slice, Use use) {
  const int teams = kThreads / call.team;
  for (int64_t begin = int64_t(blockIdx.x) * teams; begin < slice; begin += int64_t(gridDim.x) * teams) {
    const int64_t place = begin + threadIdx.x / call.team;
    use(first + place, place < slice && first + place < call.rows);
  }
}

// Puts rows of the input into the own staging.
template <typename T, bool Whole>
__device__ void stage_rows(const SumNorm& call, int64_t offset, int64_t first, int64_t slice) {
  each_row(call, first, slice, [&](int64_t row, bool here) {
    if (!here) return;
    const T* input = static_cast<const T*>(call.input) + row * call.columns;
    char* staging = call.peers.staging[call.peers.rank] + offset + row * vectors_of_row<T>(call) * 16;
    Pack<T> parts[kHeld<T>];
    each_vector<T, Whole>(call, [&](int k, int64_t vector) { parts[k] = load<T, Whole>(input, vector, call.columns); });
    each_vector<T, Whole>(call, [&](int k, int64_t vector) { store_staged(staging, vector, parts[k]); });
  });
}

// Sums a row of all ranks, of which a thread gets the vectors that it holds.
template <typename T, int World, bool Whole>
__device__ void sum_row(const SumNorm& call, int64_t offset, int64_t row, Pack<T> (&held)[kHeld<T>]) {
  const T* input = static_cast<const T*>(call.input) + row * call.columns;
  const int64_t vectors = vectors_of_row<T>(call), place = offset + row * vectors * 16;
  constexpr int at_once = Whole ? kAtOnce<World> : 1;
#pragma unroll(Whole ? kHeld<T> : 1)
  for (int begin = 0; begin < kHeld<T>; begin += at_once) {
    Pack<T> parts[at_once][World];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int64_t vector = threadIdx.x % call.team + (begin + k) * call.team;
      if (vector >= vectors) continue;
#pragma unroll(Whole ? World : 1)
      for (int r = 0; r < World; ++r) {
        const bool own = r == call.peers.rank;
        const char* staged = call.peers.staging[r] + place;
        if (Whole) {
          // One load whosever it is: no branches, and all are under way.
          parts[k][r] = load_staged<T>(own ? reinterpret_cast<const char*>(input) : staged, vector);
        } else {
          parts[k][r] = own ? load(input, vector, call.columns) : load_staged<T>(staged, vector);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) held[begin + k] = summed<T, World>(parts[k]);
  }
}

// From the sums of a row that its team holds, all that is wanted of it. All threads of a block call it; here: whether the team
// has a row.
template <typename T, bool Whole>
__device__ void finish_row(const SumNorm& call, int64_t row, bool here, Pack<T> (&held)[kHeld<T>]) {
  const int64_t start = row * call.columns;
  Pack<T> others[kHeld<T>];
  float squares = 0;
  if (here) {
    const T* residual = static_cast<const T*>(call.residual) + start;
    T* hidden = static_cast<T*>(call.hidden) + start;
    each_vector<T, Whole>(call, [&](int k, int64_t vector) { others[k] = load<T, Whole>(residual, vector, call.columns); });
    each_vector<T, Whole>(call, [&](int k, int64_t vector) {
#pragma unroll
      for (int v = 0; v < Pack<T>::size; ++v) {
        held[k].values[v] = narrow<T>(widen(others[k].values[v]) + widen(held[k].values[v]));
        const float value = widen(held[k].values[v]);
        squares = fmaf(value, value, squares);
      }
      store<T, Whole>(hidden, vector, call.columns, held[k]);
    });
  }
  const float scale = 1.0f / sqrtf(team_sum(squares, call.team) / float(call.columns) + call.eps);
  if (!here) return;
  if (threadIdx.x % call.team == 0) call.scale[row] = scale;
  const T* weight = static_cast<const T*>(call.weight);
  T* normed = static_cast<T*>(call.normed) + start;
  each_vector<T, Whole>(call, [&](int k, int64_t vector) { others[k] = load<T, Whole>(weight, vector, call.columns); });
  each_vector<T, Whole>(call, [&](int k, int64_t vector) {
#pragma unroll
    for (int v = 0; v < Pack<T>::size; ++v) {
      held[k].values[v] = narrow<T>(widen(held[k].values[v]) * scale * widen(others[k].values[v]));
    }
    store<T, Whole>(normed, vector, call.columns, held[k]);
  });
}

template <typename T, int World, bool Whole>
__device__ bool one_shot(const SumNorm& call, unsigned long long number) {
  const int64_t offset = (number % 2) * call.peers.half;
  stage_rows<T, Whole>(call, offset, 0, call.rows);
  if (!meet<World>(call.peers, 2 * number + 1)) return false;
  each_row(call, 0, call.rows, [&](int64_t row, bool here) {
    Pack<T> held[kHeld<T>];
    if (here) sum_row<T, World, Whole>(call, offset, row, held);
    finish_row<T, Whole>(call, row, here, held);
  });
  return true;
}

template <typename T, int World, bool Whole>
__device__ bool two_shot(const SumNorm& call, unsigned long long number) {
  const int64_t offset = (number % 2) * call.peers.half;
  const int64_t slice = (call.rows + World - 1) / World, row_bytes = vectors_of_row<T>(call) * 16;
  const int rank = call.peers.rank;
#pragma unroll 1  // or it compiles for long
  for (int s = 0; s < World; ++s) {
    if (s != rank) stage_rows<T, Whole>(call, offset, s * slice, slice);
  }
  if (!meet<World>(call.peers, 2 * number + 1)) return false;
  each_row(call, rank * slice, slice, [&](int64_t row, bool here) {
    Pack<T> held[kHeld<T>];
    if (here) {
      sum_row<T, World, Whole>(call, offset, row, held);
      each_vector<T, Whole>(call, [&](int k, int64_t vector) {
#pragma unroll
        for (int r = 0; r < World; ++r) {
          if (r != rank) store_staged(call.peers.staging[r] + offset + row * row_bytes, vector, held[k]);
        }
      });
    }
    finish_row<T, Whole>(call, row, here, held);
  });
  if (!meet<World>(call.peers, 2 * number + 2)) return false;
  const char* mine = call.peers.staging[rank] + offset;
#pragma unroll 1  // or it compiles for long
  for (int s = 0; s < World; ++s) {
    if (s == rank) continue;
    each_row(call, s * slice, slice, [&](int64_t row, bool here) {
      Pack<T> held[kHeld<T>];
      if (here) {
        each_vector<T, Whole>(call, [&](int k, int64_t vector) { held[k] = load_staged<T>(mine + row * row_bytes, vector); });
      }
      finish_row<T, Whole>(call, row, here, held);
    });
  }
  return true;
}

template <typename T, int World, bool TwoShot, bool Whole>
__device__ bool run(const SumNorm& call, unsigned long long number) {
  return TwoShot ? two_shot<T, World, Whole>(call, number) : one_shot<T, World, Whole>(call, number);
}

// The numbers of a call that failed: see all_reduce.cuh.
template <typename T, int Slices>
__device__ void poison(const SumNorm& call) {
  const int64_t slice = (call.rows + Slices - 1) / Slices;
  Pack<T> pack;
  for (int v = 0; v < Pack<T>::size; ++v) pack.values[v] = narrow<T>(NAN);
#pragma unroll 1  // or it compiles for long
  for (int s = 0; s < Slices; ++s) {
    each_row(call, s * slice, slice, [&](int64_t row, bool here) {
      if (!here) return;
      if (threadIdx.x % call.team == 0) call.scale[row] = NAN;
      each_vector<T, false>(call, [&](int, int64_t vector) {
        store(static_cast<T*>(call.hidden) + row * call.columns, vector, call.columns, pack);
        store(static_cast<T*>(call.normed) + row * call.columns, vector, call.columns, pack);
      });
    });
  }
}

template <typename T, int World, bool TwoShot>
__global__ void __launch_bounds__(kThreads, 1) all_reduce_norm(const __grid_constant__ SumNorm call) {
  counted(
      call.peers,
      [&](unsigned long long number) {
        const auto is_whole = [&](const void* rows) { return is_vectors(static_cast<const T*>(rows), call.columns); };
        const bool whole = is_whole(call.input) && is_whole(call.residual) && is_whole(call.weight) &&
                           is_whole(call.hidden) && is_whole(call.normed);
        return whole ? run<T, World, TwoShot, true>(call, number) : run<T, World, TwoShot, false>(call, number);
      },
      [&] { poison<T, TwoShot ? World : 1>(call); });
}

}  // namespace

#endif
