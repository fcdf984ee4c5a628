#include "quern/ops/sampling/draw.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "quern/ops/sampling/logit_blocks.h"
#include "quern/ops/sampling/philox.h"
#include "quern/ops/sampling/sampler.h"
#include "quern/ops/sampling/sampler_kernels.h"
#include "quern/ops/sampling/token_order.h"

namespace quern {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Tokens in equal steps of their offset. One bucket is then searched for the
// last token that is kept, and what lies beyond it is dropped unseen.
constexpr int kBuckets = 2048;

class Drawing {
 public:
  Drawing(const float* logits, int64_t vocab, const SamplingParams& params,
          const SamplerKernels& kernels, const DrawScratch& scratch)
      : logits_(logits),
        params_(params),
        kernels_(kernels),
        scratch_(scratch),
        blocks_(logits, vocab) {
    rule_.largest = blocks_.Largest(kernels_, scratch_.largest);
    rule_.temperature = params.temperature;
    rule_.least_logit = -kInfinity;
    rule_.least_weight = params.min_p;
    top_k_ = params.top_k < vocab ? params.top_k : 0;
  }

  int32_t Token() {
    if (rule_.largest == -kInfinity) return SamplerPlan::kNoToken;
    if (params_.top_n_sigma > 0.0f) rule_.least_logit = LeastWithinSigmas();
    if (top_k_ == 0 && params_.top_p == 1.0f && params_.typical_p == 1.0f) {
      return DrawFromAll();
    }
    Select();
    for (int64_t i = 0; i < num_gathered_; ++i) {
      scratch_.sums[i] = kernels_.sum(WeightsOf(scratch_.gathered[i]));
    }
    const Place place = PlaceOf(num_gathered_);
    const int32_t block = scratch_.gathered[place.index];
    return Within(block, WeightsOf(block), place);
  }

 private:
  // Where a running sum passes the draw: in which of the blocks that have sums,
  // and after how much.
  struct Place {
    int64_t index = 0;
    double before = 0.0;
    double at = 0.0;
  };
  Place PlaceOf(int64_t count) const {
    double total = 0.0;
    for (int64_t i = 0; i < count; ++i) total += scratch_.sums[i];
    Place place;
    place.at = PhiloxUniform(params_.seed, params_.step) * total;
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      if (scratch_.sums[i] == 0.0) continue;
      place.index = i;
      place.before = sum;
      sum += scratch_.sums[i];
      if (sum > place.at) break;
    }
    return place;
  }
  // The token at a place within a block. If rounding made the draw equal the
  // block's sum, this is the last token with a weight.
  static int32_t Within(int64_t block, const float* weights,
                        const Place& place) {
    int64_t token = 0;
    double sum = place.before;
    for (int64_t i = 0; i < kSamplerBlock; ++i) {
      if (weights[i] == 0.0f) continue;
      token = i;
      sum += static_cast<double>(weights[i]);
      if (sum > place.at) break;
    }
    return static_cast<int32_t>(block * kSamplerBlock + token);
  }

  float* WeightsOf(int64_t block) const {
    return scratch_.weights + block * kSamplerBlock;
  }

  // Sums of the weights of all blocks, which are not kept.
  double SumAll() const {
    float weights[kSamplerBlock];
    double total = 0.0;
    for (int64_t b = 0; b < blocks_.count(); ++b) {
      scratch_.sums[b] = 0.0;
      if (scratch_.largest[b] < rule_.least_logit) continue;
      scratch_.sums[b] = kernels_.weights(blocks_[b], rule_, weights);
      total += scratch_.sums[b];
    }
    return total;
  }
  int32_t DrawFromAll() const {
    SumAll();
    const Place place = PlaceOf(blocks_.count());
    float weights[kSamplerBlock];
    kernels_.weights(blocks_[place.index], rule_, weights);
    return Within(place.index, weights, place);
  }

  // The least f32 within top_n_sigma standard deviations of the largest logit.
  float LeastWithinSigmas() const {
    if (rule_.largest == kInfinity) return kInfinity;
    SamplerMoments all;
    for (int64_t b = 0; b < blocks_.count(); ++b) {
      const SamplerMoments one = kernels_.moments(blocks_[b], rule_);
      all.sum += one.sum;
      all.squares += one.squares;
      all.count += one.count;
    }
    const auto count = static_cast<double>(all.count);
    const double mean = all.sum / count;
    const double variance = std::max(all.squares / count - mean * mean, 0.0);
    const double least =
        static_cast<double>(rule_.largest) -
        static_cast<double>(params_.top_n_sigma) * std::sqrt(variance);
    if (least < -std::numeric_limits<float>::max()) return -kInfinity;
    const auto rounded = static_cast<float>(least);
    return static_cast<double>(rounded) < least
               ? std::nextafter(rounded, kInfinity)
               : rounded;
  }

  float KthLargestBlock(int64_t k) const {
    return blocks_.KthLargest(k, scratch_.largest, scratch_.order);
  }

  // Keeps the weights of the logits from `least` on, and their ids in a list.
  // Returns the sum of the weights.
  double Gather(float least) {
    WeightRule rule = rule_;
    rule.least_logit = std::max(least, rule_.least_logit);
    const double total = GatherWeights(rule);
    end_ = scratch_.ids;
    ForWeights([&](int32_t id) { *end_++ = id; });
    return total;
  }
  // Keeps all weights, without a list.
  double GatherAll() {
    end_ = nullptr;
    return GatherWeights(rule_);
  }
  double GatherWeights(const WeightRule& rule) {
    num_gathered_ = 0;
    double total = 0.0;
    for (int64_t b = 0; b < blocks_.count(); ++b) {
      if (scratch_.largest[b] < rule.least_logit) continue;
      scratch_.gathered[num_gathered_++] = static_cast<int32_t>(b);
      total += kernels_.weights(blocks_[b], rule, WeightsOf(b));
    }
    return total;
  }
  // fn(first id, weights) for every block that was gathered.
  template <class Fn>
  void ForGathered(const Fn& fn) const {
    for (int64_t g = 0; g < num_gathered_; ++g) {
      const int64_t b = scratch_.gathered[g];
      fn(b * kSamplerBlock, WeightsOf(b));
    }
  }
  // fn(id) for every weight above 0, in the order of ids. A padded token has no
  // weight.
  template <class Fn>
  void ForWeights(const Fn& fn) const {
    constexpr int64_t kGroup = 8;
    ForGathered([&](int64_t first, const float* weights) {
      for (int64_t i = 0; i < kSamplerBlock; i += kGroup) {
        // Most groups have no weight, and none is -0.
        uint64_t pairs[kGroup / 2];
        std::memcpy(pairs, weights + i, sizeof(pairs));
        if ((pairs[0] | pairs[1] | pairs[2] | pairs[3]) == 0) continue;
        for (int64_t j = i; j < i + kGroup; ++j) {
          if (weights[j] > 0.0f) fn(static_cast<int32_t>(first + j));
        }
      }
    });
  }
  double SumGathered() const {
    double total = 0.0;
    for (int64_t i = 0; i < num_gathered_; ++i) {
      total += kernels_.sum(WeightsOf(scratch_.gathered[i]));
    }
    return total;
  }
  // Drops the candidates of the list from `kept` on.
  void Drop(int32_t* kept) {
    for (const int32_t* id = kept; id != end_; ++id) {
      scratch_.weights[*id] = 0.0f;
    }
    end_ = kept;
  }

  // Where there is no list, drops all tokens that certainly come after the
  // fewest whose measures sum to `wanted`, and lists those among which the last
  // of them is. Returns the sum of the measures of what comes before these.
  // steps: buckets in one unit of the offset.
  template <class Order, class Measure>
  double ListTheEdge(double wanted, double steps, const Order& order,
                     const Measure& measure) {
    double sums[kBuckets] = {};
    int32_t* const buckets = scratch_.ids;
    ForGathered([&](int64_t first, const float* weights) {
      for (int64_t i = 0; i < kSamplerBlock; ++i) {
        int32_t bucket = kBuckets;  // without a weight
        if (weights[i] > 0.0f) {
          const auto id = static_cast<int32_t>(first + i);
          const double at = std::min(order.Offset(id) * steps, kBuckets - 1.0);
          bucket = static_cast<int32_t>(at);
          sums[bucket] += measure(id);
        }
        buckets[first + i] = bucket;
      }
    });
    double before = 0.0;
    int32_t edge = 0;
    while (edge < kBuckets - 1 && before + sums[edge] < wanted) {
      before += sums[edge++];
    }
    // The list grows over buckets that were read. Two loops, because whether a
    // weight is dropped is not to be predicted: a loop that does both and
    // branches takes ten times as long (Zen 5, 2026).
    end_ = scratch_.ids;
    ForGathered([&](int64_t first, float* weights) {
      const int32_t* const of_block = buckets + first;
      for (int64_t i = 0; i < kSamplerBlock; ++i) {
        weights[i] = of_block[i] > edge ? 0.0f : weights[i];
      }
      for (int64_t i = 0; i < kSamplerBlock; ++i) {
        if (of_block[i] == edge) *end_++ = static_cast<int32_t>(first + i);
      }
    });
    return before;
  }

  // Keeps the top_k_ first of all tokens that have a weight.
  void KeepTopK(const ByLogit& larger) {
    int32_t* const begin = scratch_.ids;
    double before = 0.0;
    if (end_ == nullptr) {
      before = ListTheEdge(static_cast<double>(top_k_),
                           kBuckets / (88.0 * double{rule_.temperature}),
                           larger, [](int32_t) { return 1.0; });
    }
    const int64_t wanted = top_k_ - static_cast<int64_t>(before);
    if (wanted >= end_ - begin) return;
    std::nth_element(begin, begin + wanted - 1, end_, larger);
    Drop(begin + wanted);
  }

  // Keeps the fewest first tokens whose weights sum to `wanted`.
  template <class Order>
  void KeepFewest(double wanted, double steps, const Order& order) {
    double before = 0.0;
    if (end_ == nullptr) {
      before = ListTheEdge(wanted, steps, order, [&](int32_t id) {
        return static_cast<double>(scratch_.weights[id]);
      });
    }
    Drop(FewestThatReach(wanted, before, scratch_.ids, end_, scratch_.weights,
                         order));
  }

  // Leaves the weights of what the filters keep.
  void Select() {
    const ByLogit larger = {logits_, rule_.largest};
    const double steps = kBuckets / (88.0 * double{rule_.temperature});
    const double top_p = static_cast<double>(params_.top_p);
    double total = 0.0;
    // Whether the ids of all tokens that are left are in the list.
    bool listed = false;
    if (top_k_ > 0) {
      listed = top_k_ <= blocks_.count();
      if (listed) {
        Gather(KthLargestBlock(top_k_));
      } else {
        GatherAll();
      }
      KeepTopK(larger);
      total = SumGathered();
      if (params_.top_p < 1.0f) {
        if (!listed) end_ = nullptr;
        KeepFewest(top_p * total, steps, larger);
      }
    } else if (params_.top_p < 1.0f) {
      // A few of the largest logits often suffice: a sixteenth as many as there
      // are blocks, or a quarter.
      const double wanted = top_p * SumAll();
      for (const int64_t share : {16, 4}) {
        const int64_t few = std::max<int64_t>(blocks_.count() / share, 1);
        listed = Gather(KthLargestBlock(few)) >= wanted;
        if (listed) break;
      }
      if (!listed) GatherAll();
      KeepFewest(wanted, steps, larger);
    } else {
      total = GatherAll();
    }
    if (params_.typical_p == 1.0f) return;
    if (params_.top_p < 1.0f) total = SumGathered();
    MoreTypical typical{logits_, rule_};
    ForWeights([&](int32_t id) {
      typical.mean +=
          static_cast<double>(scratch_.weights[id]) * typical.Exponent(id);
    });
    typical.mean /= total;
    if (!listed) end_ = nullptr;
    KeepFewest(static_cast<double>(params_.typical_p) * total, kBuckets / 88.0,
               typical);
  }

  const float* logits_;
  const SamplingParams& params_;
  const SamplerKernels& kernels_;
  const DrawScratch& scratch_;
  LogitBlocks blocks_;
  WeightRule rule_;
  int64_t top_k_ = 0;  // 0: all
  int64_t num_gathered_ = 0;
  int32_t* end_ = nullptr;  // of the list of candidates; null: no list
};

}  // namespace

int32_t GreedyToken(const float* logits, int64_t vocab,
                    const SamplerKernels& kernels) {
  const LogitBlocks blocks(logits, vocab);
  int64_t best = 0;
  float largest = -kInfinity;
  for (int64_t b = 0; b < blocks.count(); ++b) {
    const float most = kernels.largest(blocks[b]);
    if (most > largest) {
      largest = most;
      best = b;
    }
  }
  if (largest == -kInfinity) return SamplerPlan::kNoToken;
  const float* const block = blocks[best];
  return static_cast<int32_t>(
      best * kSamplerBlock +
      (std::find(block, block + kSamplerBlock, largest) - block));
}

int32_t DrawToken(const float* logits, int64_t vocab,
                  const SamplingParams& params, const SamplerKernels& kernels,
                  const DrawScratch& scratch) {
  return Drawing(logits, vocab, params, kernels, scratch).Token();
}

}  // namespace quern
