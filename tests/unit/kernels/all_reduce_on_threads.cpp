// csrc/all_reduce.cuh on a CPU: sums are compared bit by bit with those of a plain loop.

#ifndef P3D_WORLDS
#define P3D_WORLDS 2, 4, 8
#endif
#include "ranks_on_threads.h"
//
#include "all_reduce.cuh"

namespace {

constexpr int kMost = 700;

struct Plan {
  int64_t size;
  bool two_shot, in_place;
  int blocks;
};

template <typename T, int World>
struct Test : Host<World> {
  std::vector<Plan> plans;
  Tensor<T, kMost> inputs[World], outputs[World];

  explicit Test(const Options& options) : Host<World>(options) {
    std::mt19937 random(options.seed);
    for (int n = 0; n < options.calls; ++n) {
      const int64_t size = options.absent() || random() % 4 ? kMost - random() % (kMost / 2) : 1 + random() % 20;
      const int blocks = options.absent() ? kBlocks : 1 + random() % kBlocks;
      plans.push_back({size, random() % 2 == 0, random() % 2 == 0, blocks});
    }
  }

  int blocks(int n) const { return plans[n].blocks; }
  Tensor<T, kMost>& output(int r, int n) { return plans[n].in_place ? inputs[r] : outputs[r]; }

  void prepare(int r, int n) {
    inputs[r].place(plans[n].size, n + r);
    outputs[r].place(plans[n].size, 2 * n + r);
    for (int64_t place = 0; place < plans[n].size; ++place) inputs[r].data[place] = narrow<T>(value(r, n, place));
  }

  void launch(int r, int n) {
    const Sum call{this->peers(r), inputs[r].data, output(r, n).data, plans[n].size};
    if (plans[n].two_shot) {
      all_reduce<T, World, true>(call);
    } else {
      all_reduce<T, World, false>(call);
    }
  }

  // Who writes an element: of each slice, blocks take vectors in turn.
  int block_of(const Plan& plan, int64_t place) const {
    const int64_t vectors = (plan.size + Pack<T>::size - 1) / Pack<T>::size, slices = plan.two_shot ? World : 1;
    return place / Pack<T>::size % ((vectors + slices - 1) / slices) / kThreads % plan.blocks;
  }

  void check(int r, int n) {
    const Plan& plan = plans[n];
    bool good = inputs[r].is_intact_around() && outputs[r].is_intact_around();
    for (int64_t place = 0; place < plan.size && good; ++place) {
      float total = widen(narrow<T>(value(0, n, place)));
      for (int other = 1; other < World; ++other) total += widen(narrow<T>(value(other, n, place)));
      const T found = output(r, n).data[place];
      good = this->all_come(block_of(plan, place)) ? same(found, narrow<T>(total)) : std::isnan(widen(found));
    }
    this->expect(good, "rank %d call %d: %d elements, two_shot %d, in_place %d, blocks %d\n", r, n, int(plan.size),
                 plan.two_shot, plan.in_place, plan.blocks);
  }

  void check_all() {}
};

}  // namespace

int main(int, char** arguments) { return play_any<Test, P3D_DTYPES>(arguments); }
