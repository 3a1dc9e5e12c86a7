// csrc/all_reduce_norm.cuh on a CPU: hidden states are compared bit by bit with those of a plain loop, the norm with
// double precision, and its bits among ranks, whose tensors begin at different places.

#ifndef P3D_WORLDS
#define P3D_WORLDS 2, 4, 8
#endif
#include "ranks_on_threads.h"
//
#include "all_reduce_norm.cuh"

namespace {

constexpr int kMost = kHalf / 2;  // numbers of 2 bytes that a half of the staging takes
constexpr float kEps = 1e-5f;

struct Plan {
  int64_t rows, columns;
  bool two_shot, whole;
  int team, blocks;

  int64_t size() const { return rows * columns; }
};

template <typename T, int World>
struct Test : Host<World> {
  std::vector<Plan> plans;
  Tensor<T, kMost> inputs[World], residuals[World], weights[World], hidden[World], normed[World];
  Tensor<float, kMost> scales[World];
  std::vector<std::vector<float>> noted[World];  // of each call, scales and norms

  explicit Test(const Options& options) : Host<World>(options) {
    std::mt19937 random(options.seed);
    const auto below = [&](int64_t most) { return int64_t(random() % most); };
    for (int n = 0; n < options.calls; ++n) {
      const bool whole = below(2), two_shot = below(2);
      int64_t columns = 1 + below(below(2) ? 20 : kHeld<T> * kThreads * Pack<T>::size);
      if (whole) columns = (columns + Pack<T>::size - 1) / Pack<T>::size * Pack<T>::size;
      const int64_t vectors = (columns + Pack<T>::size - 1) / Pack<T>::size, most = kHalf / 16 / vectors;
      const int64_t rows = options.absent() ? most : 1 + below(most);
      int team = 1 << below(4);
      while (team * kHeld<T> < vectors) team *= 2;
      plans.push_back({rows, columns, two_shot, whole, team, options.absent() ? kBlocks : 1 + int(below(kBlocks))});
    }
  }

  int blocks(int n) const { return plans[n].blocks; }

  float partial(int r, int n, int64_t place) { return widen(narrow<T>(std::ldexp(value(r, n, place), -3))); }
  float residual(int n, int64_t place) { return partial(50, n, place); }
  float weight(int64_t column) { return 0.5f + 0.125f * (column % 7); }

  void prepare(int r, int n) {
    const Plan& plan = plans[n];
    // On some ranks all is made of whole vectors, and on others in the same call not.
    const bool aligned = plan.whole && (n + r) % 3;
    int shift = n + r;
    const auto place = [&](auto& tensor, int64_t size) { tensor.place(size, aligned ? 0 : shift++); };
    for (auto* tensor : {&inputs[r], &residuals[r], &hidden[r], &normed[r]}) place(*tensor, plan.size());
    place(weights[r], plan.columns);
    place(scales[r], plan.rows);
    for (int64_t k = 0; k < plan.size(); ++k) {
      inputs[r].data[k] = narrow<T>(partial(r, n, k)), residuals[r].data[k] = narrow<T>(residual(n, k));
    }
    for (int64_t k = 0; k < plan.columns; ++k) weights[r].data[k] = narrow<T>(weight(k));
  }

  void launch(int r, int n) {
    const Plan& plan = plans[n];
    const SumNorm call{this->peers(r), inputs[r].data, residuals[r].data, weights[r].data, hidden[r].data, normed[r].data,
                       scales[r].data, plan.rows,      plan.columns,      kEps,            plan.team};
    if (plan.two_shot) {
      all_reduce_norm<T, World, true>(call);
    } else {
      all_reduce_norm<T, World, false>(call);
    }
  }

  // Who writes a row: of each slice, teams take rows in turn.
  int block_of(const Plan& plan, int64_t row) const {
    const int64_t slices = plan.two_shot ? World : 1, teams = kThreads / plan.team;
    return row % ((plan.rows + slices - 1) / slices) / teams % plan.blocks;
  }

  bool is_right(int r, int n, int64_t row) {
    const Plan& plan = plans[n];
    const float scale = scales[r].data[row];
    double squares = 0;
    for (int64_t column = 0; column < plan.columns; ++column) {
      const int64_t place = row * plan.columns + column;
      float total = partial(0, n, place);
      for (int other = 1; other < World; ++other) total += partial(other, n, place);
      const T sum = narrow<T>(residual(n, place) + widen(narrow<T>(total)));
      const float wide = widen(sum);
      squares += double(wide) * wide;
      if (!same(hidden[r].data[place], sum)) return false;
      if (!same(normed[r].data[place], narrow<T>(wide * scale * widen(narrow<T>(weight(column)))))) return false;
    }
    return std::abs(scale * std::sqrt(squares / plan.columns + double(kEps)) - 1) < 1e-6;
  }

  bool is_poisoned(int r, int n, int64_t row) {
    bool all = std::isnan(scales[r].data[row]);
    for (int64_t place = row * plans[n].columns; place < (row + 1) * plans[n].columns; ++place) {
      all = all && std::isnan(widen(hidden[r].data[place])) && std::isnan(widen(normed[r].data[place]));
    }
    return all;
  }

  void check(int r, int n) {
    const Plan& plan = plans[n];
    bool good = scales[r].is_intact_around();
    for (auto* tensor : {&inputs[r], &residuals[r], &weights[r], &hidden[r], &normed[r]}) {
      good = good && tensor->is_intact_around();
    }
    for (int64_t row = 0; row < plan.rows && good; ++row) {
      good = this->all_come(block_of(plan, row)) ? is_right(r, n, row) : is_poisoned(r, n, row);
    }
    this->expect(good, "rank %d call %d: %d x %d, two_shot %d, whole %d, team %d, blocks %d\n", r, n, int(plan.rows),
                 int(plan.columns), plan.two_shot, plan.whole, plan.team, plan.blocks);
    std::vector<float> numbers(scales[r].data, scales[r].data + plan.rows);
    for (int64_t k = 0; k < plan.size(); ++k) numbers.push_back(widen(normed[r].data[k]));
    noted[r].push_back(numbers);
  }

  void check_all() {
    for (int r = 1; r < World && !this->options.absent(); ++r) {
      for (int n = 0; n < this->options.calls; ++n) {
        this->expect(noted[r][n] == noted[0][n], "call %d: bits of rank %d are others than of rank 0\n", n, r);
      }
    }
  }
};

}  // namespace

int main(int, char** arguments) { return play_any<Test, P3D_DTYPES>(arguments); }
