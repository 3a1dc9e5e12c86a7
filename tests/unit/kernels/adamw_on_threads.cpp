// csrc/adamw.cuh on a CPU: steps in a row, each of calls for several buckets, between which every rank reads its weights.
// Masters and moments are compared with double-precision arithmetic; weights with the masters of all ranks, bit by bit.
//
// CALLS is a multiple of kBuckets. FAULT may be "no meeting before" or "no meeting after": ThreadSanitizer finds what they keep apart.

#ifndef P3D_DTYPES
#define P3D_DTYPES __half, __nv_bfloat16
#endif
#ifndef P3D_WORLDS
#define P3D_WORLDS 1, 2, 4
#endif
#include "ranks_on_threads.h"
//
#include "adamw.cuh"

namespace {

constexpr int kMost = 300, kBuckets = 3, kMostParts = 4;
constexpr double kEpsilon = 0x1p-24;  // of fp32, rounded to nearest
const Settings kGroups[2] = {{0.05, 0.9, 0.95, 1e-3, 0.1, true}, {0.02, 0.8, 0.99, 1e-2, 0.01, false}};

// What a rank has of a parameter.
template <typename G>
struct Shard {
  Tensor<float, kMost> master, average, square_average;
  Tensor<G, kMost> gradient;
  float step;
  int64_t place;
  int group;

  auto tensors() { return std::array{&master, &average, &square_average}; }
};

// Of a parameter after a step; and of a rank.
struct Numbers {
  std::vector<float> master, gradient, average, square_average;
};
template <typename T>
struct Seen {
  std::vector<Numbers> parts;
  std::vector<T> weights;
};

struct Plan {
  bool skip, clear;
  double divisor;  // 0 for none
  int blocks[kBuckets];
};

template <typename T, int World>
struct Test : Host<World> {
  using G = std::conditional_t<World == 2, T, float>;  // of gradients: both are tried
  static constexpr int kWeights = World * kBuckets * kMostParts * (kMost + 4);

  std::vector<Plan> plans;
  std::vector<std::unique_ptr<Shard<G>>> shards[World];  // of all buckets, one after the other
  std::vector<int> ends[World];                       // of buckets, in shards
  std::vector<Part> tables[World][kBuckets];
  int64_t vectors[World][kBuckets] = {};
  Tensor<T, kWeights> weights[World];
  std::vector<Seen<T>> seen[World];  // at first, and after each step

  explicit Test(const Options& options) : Host<World>(options) {
    std::mt19937 random(options.seed);
    for (int n = 0; n < options.calls; n += kBuckets) {
      Plan plan{random() % 4 == 0, random() % 2 == 0, random() % 3 == 0 ? 0 : 1 + random() % 100 / 30.0, {}};
      for (int& blocks : plan.blocks) blocks = 1 + random() % kBlocks;
      plans.push_back(plan);
    }
    int64_t place = 0;
    for (int r = 0; r < World; ++r) {
      for (int bucket = 0; bucket < kBuckets; ++bucket) {
        for (int part = 1 + random() % kMostParts; part > 0; --part) place = add(r, place + random() % 4, random);
        ends[r].push_back(shards[r].size());
      }
    }
    for (int r = 0; r < World; ++r) {
      weights[r].place(place, 3 * r);
      std::fill_n(weights[r].data, place, narrow<T>(weights[r].kUntouched));
      for (int bucket = 0; bucket < kBuckets; ++bucket) lay_out(r, bucket);
      seen[r].push_back(look(r));
    }
  }

  // A part that begins here in the weights: where it ends.
  int64_t add(int r, int64_t place, std::mt19937& random) {
    Shard<G>& shard = *shards[r].emplace_back(std::make_unique<Shard<G>>());
    const int64_t size = random() % 3 ? 1 + random() % kMost : 1 + random() % 20;
    const int name = shards[r].size();
    shard.place = place, shard.group = random() % 2, shard.step = random() % 3;
    for (int k = 0; k < 3; ++k) {
      shard.tensors()[k]->place(size, random() % kShift);
      for (int64_t i = 0; i < size; ++i) {
        const float x = value(16 * r + name, 1000 + k, i) / 1000;
        shard.tensors()[k]->data[i] = k == 2 ? x * x : x;
      }
    }
    shard.gradient.place(size, random() % kShift);
    std::fill_n(shard.gradient.data, size, narrow<G>(0));
    return place + size;
  }

  int begin(int r, int bucket) const { return bucket == 0 ? 0 : ends[r][bucket - 1]; }

  void lay_out(int r, int bucket) {
    for (int k = begin(r, bucket); k < ends[r][bucket]; ++k) {
      Shard<G>& shard = *shards[r][k];
      const int64_t size = shard.master.size;
      vectors[r][bucket] += (size + Pack<T>::size - 1) / Pack<T>::size;
      tables[r][bucket].push_back({shard.master.data, shard.gradient.data, shard.average.data, shard.square_average.data,
                                   &shard.step, size, shard.place, vectors[r][bucket], shard.group});
    }
  }

  Seen<T> look(int r) {
    const auto copied = [](const auto& tensor) { return std::vector(tensor.data, tensor.data + tensor.size); };
    const auto wide = [](const auto& tensor) {
      std::vector<float> all;
      for (int64_t i = 0; i < tensor.size; ++i) all.push_back(widen(tensor.data[i]));
      return all;
    };
    Seen<T> found{{}, copied(weights[r])};
    for (auto& shard : shards[r]) {
      found.parts.push_back(
          {copied(shard->master), wide(shard->gradient), copied(shard->average), copied(shard->square_average)});
    }
    return found;
  }

  int blocks(int n) const { return plans[n / kBuckets].blocks[n % kBuckets]; }
  float gradient(int r, int name, int step, int64_t place) const {
    return widen(narrow<G>(value(16 * r + name, step, place)));
  }

  void prepare(int r, int n) {
    const int step = n / kBuckets, bucket = n % kBuckets;
    for (int k = begin(r, bucket); k < ends[r][bucket]; ++k) {
      Shard<G>& shard = *shards[r][k];
      for (int64_t i = 0; i < shard.gradient.size; ++i) shard.gradient.data[i] = narrow<G>(gradient(r, k, step, i));
      shard.step += !plans[step].skip;
    }
  }

  void launch(int r, int n) {
    const Plan& plan = plans[n / kBuckets];
    const int bucket = n % kBuckets;
    Update call{};
    if (World > 1) call.peers = this->peers(r);
    for (int other = 0; other < World; ++other) call.weights[other] = weights[other].data;
    call.parts = tables[r][bucket].data(), call.vectors = vectors[r][bucket];
    call.divisor = plan.divisor == 0 ? nullptr : &plan.divisor;
    call.skip = plan.skip || n % 2 ? &plan.skip : nullptr;
    std::copy_n(kGroups, 2, call.groups);
    call.clear = plan.clear;
    call.meets_before = bucket == 0 && this->options.fault != "no meeting before";
    call.meets_after = bucket == kBuckets - 1 && this->options.fault != "no meeting after";
    adamw<T, G, World>(call);
  }

  void check(int r, int n) {
    if (n % kBuckets < kBuckets - 1) return;
    seen[r].push_back(look(r));
    bool good = weights[r].is_intact_around();
    for (auto& shard : shards[r]) {
      for (auto* tensor : shard->tensors()) good = good && tensor->is_intact_around();
      good = good && shard->gradient.is_intact_around();
    }
    this->expect(good, "rank %d step %d: written beyond an end\n", r, n / kBuckets);
  }

  // One step in double precision, to some roundings of what its terms are.
  static bool follows(const Numbers& before, const Numbers& after, const std::vector<float>& gradients, const Plan& plan,
                      const Settings& its, float step) {
    bool good = true;
    const auto close = [&](double x, double exact, double scale) {
      good = good && std::abs(x - exact) <= 8 * kEpsilon * scale + 1e-40;
    };
    for (size_t i = 0; i < gradients.size(); ++i) {
      double x = before.master[i];
      const double mean = gradients[i] / (plan.divisor == 0 ? 1.0 : plan.divisor);
      const double decayed = its.decoupled ? 0 : its.decay * x, g = mean + decayed;
      const double scale = std::abs(mean) + std::abs(decayed);
      if (its.decoupled) x -= its.rate * its.decay * x;
      const double m = its.beta1 * before.average[i] + (1 - its.beta1) * g;
      const double s = its.beta2 * before.square_average[i] + (1 - its.beta2) * g * g;
      const double m_scale = its.beta1 * std::abs(before.average[i]) + (1 - its.beta1) * scale;
      const double s_scale = its.beta2 * before.square_average[i] + (1 - its.beta2) * scale * scale;
      const double rate = its.rate / (1 - std::pow(its.beta1, step));
      const double root = std::sqrt(s / (1 - std::pow(its.beta2, step))) + its.epsilon;
      close(after.average[i], m, m_scale);
      close(after.square_average[i], s, s_scale);
      close(after.master[i], x - rate * m / root, std::abs(x) + rate * m_scale / root * (s == 0 ? 1 : s_scale / s));
      good = good && same(after.gradient[i], plan.clear ? 0.0f : gradients[i]);
    }
    return good;
  }

  static bool is_kept(const Numbers& before, const Numbers& after, const std::vector<float>& gradients) {
    return before.master == after.master && before.average == after.average &&
           before.square_average == after.square_average && after.gradient == gradients;
  }

  void check_all() {
    std::vector<float> steps[World];
    std::vector<T> expected[World];
    for (int r = 0; r < World; ++r) {
      expected[r] = seen[r][0].weights;
      for (auto& shard : shards[r]) steps[r].push_back(shard->step);
      for (const Plan& plan : plans) {
        for (float& step : steps[r]) step -= !plan.skip;  // what it was at first
      }
    }
    for (int step = 0; step < int(plans.size()); ++step) {
      for (int r = 0; r < World; ++r) {
        if (this->comes(r, kBlocks - 1)) check_parts(r, step, steps[r], expected);
      }
      for (int r = 0; r < World; ++r) {
        if (this->comes(r, kBlocks - 1)) check_weights(r, step, expected[r]);
      }
    }
  }

  void check_parts(int r, int step, std::vector<float>& steps, std::vector<T>* expected) {
    const Plan& plan = plans[step];
    for (int k = 0; k < int(shards[r].size()); ++k) {
      const Numbers &before = seen[r][step].parts[k], &after = seen[r][step + 1].parts[k];
      std::vector<float> gradients;
      for (size_t i = 0; i < after.master.size(); ++i) gradients.push_back(gradient(r, k, step, i));
      const bool absent = this->options.absent(), idle = absent || plan.skip;
      steps[k] += !plan.skip;
      this->expect(idle ? is_kept(before, after, gradients)
                        : follows(before, after, gradients, plan, kGroups[shards[r][k]->group], steps[k]),
                   "rank %d step %d part %d of %d elements: skip %d, clear %d, divisor %f, group %d, step %f\n", r, step, k,
                   int(gradients.size()), plan.skip, plan.clear, plan.divisor, shards[r][k]->group, double(steps[k]));
      if (plan.skip && !absent) continue;
      for (int other = 0; other < World; ++other) {
        if (absent && other != r) continue;
        for (size_t i = 0; i < after.master.size(); ++i) {
          expected[other][shards[r][k]->place + i] = narrow<T>(absent ? NAN : after.master[i]);
        }
      }
    }
  }

  void check_weights(int r, int step, const std::vector<T>& expected) {
    const std::vector<T>& found = seen[r][step + 1].weights;
    const auto alike = [](T a, T b) { return same(a, b) || (std::isnan(widen(a)) && std::isnan(widen(b))); };
    const auto wrong = std::mismatch(found.begin(), found.end(), expected.begin(), alike).first;
    this->expect(wrong == found.end(), "rank %d step %d: weight %d is wrong\n", r, step, int(wrong - found.begin()));
  }
};

}  // namespace

int main(int, char** arguments) { return play_any<Test, P3D_DTYPES>(arguments); }
