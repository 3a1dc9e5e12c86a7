// csrc/reduce_scatter.cuh on a CPU: sums are compared bit by bit with those of a plain loop.

#ifndef P3D_WORLDS
#define P3D_WORLDS 2, 4, 8
#endif
#include "ranks_on_threads.h"
//
#include "reduce_scatter.cuh"

namespace {

constexpr int kMost = kHalf / 2 + kMaxWorld * 8;

struct Plan {
  int64_t size, stride;
  bool in_place, accumulate, squares;
  int blocks;
};

template <typename T, int World>
struct Test : Host<World> {
  using In = std::conditional_t<World == 2, T, float>;  // of gradients: both are tried

  std::vector<Plan> plans;
  Tensor<In, kMost> inputs[World], outputs[World];
  double squares[World][kBlocks];

  explicit Test(const Options& options) : Host<World>(options) {
    std::mt19937 random(options.seed);
    const int64_t most = kHalf / 16 / World * Pack<T>::size;  // what a half takes
    for (int n = 0; n < options.calls; ++n) {
      const unsigned kind = random() % 4;
      int64_t size = kind == 0 ? most : kind == 1 ? 1 + random() % 20 : 1 + random() % most;
      if (options.absent()) size = most - random() % 20;
      const int blocks = options.absent() ? kBlocks : 1 + random() % kBlocks;
      plans.push_back({size, int64_t(size + random() % 7), random() % 2 == 0, random() % 2 == 0, random() % 4 > 0, blocks});
    }
  }

  int blocks(int n) const { return plans[n].blocks; }
  In* output(int r, int n) { return plans[n].in_place ? inputs[r].data + r * plans[n].stride : outputs[r].data; }

  void prepare(int r, int n) {
    const Plan& plan = plans[n];
    inputs[r].place(World * plan.stride, n + r);
    for (int64_t place = 0; place < World * plan.stride; ++place) inputs[r].data[place] = narrow<In>(value(r, n, place));
    outputs[r].place(plan.size, 2 * n + r);
    for (int64_t place = 0; place < plan.size; ++place) outputs[r].data[place] = narrow<In>(value(World + r, n, place));
    std::fill_n(squares[r], kBlocks, -1.0);
  }

  void launch(int r, int n) {
    const Plan& plan = plans[n];
    reduce_scatter<T, World>(Scatter<In>{this->peers(r), inputs[r].data, output(r, n), plan.squares ? squares[r] : nullptr,
                                         plan.stride, plan.size, plan.accumulate});
  }

  float expected(int r, int n, int64_t place) const {
    const int64_t in_whole = r * plans[n].stride + place;
    float total = widen(narrow<T>(value(0, n, in_whole)));
    for (int other = 1; other < World; ++other) total += widen(narrow<T>(value(other, n, in_whole)));
    const float before = plans[n].in_place ? value(r, n, in_whole) : value(World + r, n, place);
    return widen(narrow<In>(plans[n].accumulate ? total + widen(narrow<In>(before)) : total));
  }

  // Who writes an element: blocks take vectors in turn.
  int block_of(int n, int64_t place) const { return place / Pack<T>::size / kThreads % plans[n].blocks; }

  bool is_input_kept(int r, int n) const {
    const int64_t own = r * plans[n].stride, end = plans[n].in_place ? own + plans[n].size : own;
    for (int64_t place = 0; place < inputs[r].size; ++place) {
      if ((place < own || place >= end) && !same(inputs[r].data[place], narrow<In>(value(r, n, place)))) return false;
    }
    return inputs[r].is_intact_around();
  }

  void check(int r, int n) {
    const Plan& plan = plans[n];
    bool good = is_input_kept(r, n) && outputs[r].is_intact_around();
    double sums[kBlocks] = {};
    for (int64_t place = 0; place < plan.size && good; ++place) {
      const float found = widen(output(r, n)[place]), total = expected(r, n, place);
      const int b = block_of(n, place);
      good = this->all_come(b) ? same(found, total) : std::isnan(found);
      sums[b] += double(total) * total;
    }
    for (int b = 0; b < kBlocks && good; ++b) {
      const double found = squares[r][b];
      if (!plan.squares || b >= plan.blocks) {
        good = found == -1;
      } else {
        good = this->all_come(b) ? std::abs(found - sums[b]) <= 1e-12 * sums[b] : std::isnan(found);
      }
    }
    this->expect(good, "rank %d call %d: %d elements every %d, in_place %d, accumulate %d, squares %d, blocks %d\n", r, n,
                 int(plan.size), int(plan.stride), plan.in_place, plan.accumulate, plan.squares, plan.blocks);
  }

  void check_all() {}
};

}  // namespace

int main(int, char** arguments) { return play_any<Test, P3D_DTYPES>(arguments); }
